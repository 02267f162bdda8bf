"""The embedder: pictures to local features, one embedding pooled from them, and their histogram.

Letters: B images, S pixels a side, n = h * w locations, d dimensions, m prototypes, C backbone channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting
from training.method.histogram import histogram
from training.network.backbone import Backbone, build_backbone
from training.network.pooling import PoolingName, build_pooling
from training.recipes.recipe import AssignOn, Recipe

__all__ = ["Embedder", "Features", "build_embedder"]


class Features(NamedTuple):
    """What the embedder gives for B images; all float32, nothing normalised to unit length."""

    locations: Tensor  # (B, n, d)
    embeddings: Tensor  # (B, d), with pooling gap the mean over locations
    histograms: Tensor  # (B, m), each row sums to one
    detached: Tensor | None = None  # the same (B, m), whose gradient moves the codebook alone


class Embedder(nn.Module):
    """Backbone, pooling, bias-free 1x1 convolution, and the histogram operator beside it."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        image_size: int,
        dimension: int,
        prototypes: int,
        assignment_scale: float,
        assign_on: AssignOn,
        pooling: PoolingName = "gap",
        reconstructs: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.image_size = image_size
        self.dimension = dimension
        self.assignment_scale = assignment_scale
        self.assign_on: AssignOn = assign_on
        self.mean = backbone.mean
        self.std = backbone.std
        self.grid = _grid(backbone, image_size)  # (h, w): locations are read row by row
        self.pooling: PoolingName = pooling
        self.reconstructs = reconstructs
        self.pool = build_pooling(pooling)
        # before GAP this 1x1 convolution equals a linear layer after it
        self.head = nn.Conv2d(backbone.channels, dimension, 1, bias=False)
        self.codebook = nn.Parameter(torch.randn(prototypes, dimension) / dimension**0.5)
        # x / 255, minus mean, over std, as one product and one sum
        scale = 1 / (255 * torch.tensor(self.std)).view(1, 3, 1, 1)
        shift = -(torch.tensor(self.mean) / torch.tensor(self.std)).view(1, 3, 1, 1)
        self._scale: Tensor
        self._shift: Tensor
        self.register_buffer("_scale", scale, persistent=False)
        self.register_buffer("_shift", shift, persistent=False)

    def forward(self, images: Tensor, *, mapped: bool = False) -> Features:
        """Embed normalised images, float32 (B, 3, S, S).

        Args:
            images: The images; or with `mapped` what the backbone gives for them, float (B, C, h, w), or at
                some of the places, (B, C, k, 1).
            mapped: The backbone has run already.

        Returns:
            Local features, embeddings and histograms, and where it `reconstructs`, in training, histograms
            of detached locations.
        """
        features: Tensor = images if mapped else self.backbone(images)  # (B, C, h, w)
        maps: Tensor = self.head(features)  # (B, d, h, w)
        locations = maps.flatten(2).transpose(1, 2)  # (B, n, d)
        if self.pooling == "gap":  # the head is linear: the mean can be taken behind it
            embeddings = locations.mean(dim=1)  # (B, d)
        else:
            embeddings = self.head(self.pool(features)[:, :, None, None])[:, :, 0, 0]  # (B, d)
        histograms = self.histogram(locations)
        detached = self.histogram(locations.detach()) if self.reconstructs and self.training else None
        return Features(locations, embeddings, histograms, detached)

    def histogram(self, locations: Tensor) -> Tensor:
        """Give the histograms, float (B, m), of local features (B, n, d)."""
        return histogram(  # eq. 2.4
            locations, self.codebook, assignment_scale=self.assignment_scale, assign_on=self.assign_on
        )

    def assignments(self, locations: Tensor) -> Tensor:
        """Give the dominant prototype of each location, the largest term of eq. 2.4's softmax.

        Returns:
            uint8 (B, n) for locations (B, n, d).
        """
        codebook = self.codebook.to(locations.dtype)
        if self.assign_on == "unit":  # a location's own length does not change which one is largest
            codebook = functional.normalize(codebook, dim=1)
        return (locations @ codebook.T).argmax(dim=2).to(torch.uint8)

    def normalise(self, images: Tensor, *, mapped: bool = False) -> Tensor:
        """Turn pixels, uint8 RGB (B, S, S, 3), into what `forward` takes, float32 (B, 3, S, S).

        Maps of the backbone, where it has run already, only become float32.
        """
        if mapped:
            return images.float()
        if self.backbone.order == "BGR":
            images = images.flip(3)
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        return pixels * self._scale + self._shift

    def pooled(self, images: Tensor, *, mapped: bool = False) -> Tensor:
        """Pool the backbone's own features, (B, C), of what `forward` takes."""
        maps: Tensor = images if mapped else self.backbone(images)
        vectors: Tensor = self.pool(maps.float())
        return vectors


def build_embedder(recipe: Recipe) -> Embedder:
    """Build the embedder as training starts it: the recipe's weights, the rest drawn from the recipe's seed.

    Raises:
        CrossbatchError: If the backbone or its weights are unknown, missing or do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Embedder(
            build_backbone(recipe.backbone, recipe.weights, image_size=recipe.image_size),
            image_size=recipe.image_size,
            dimension=recipe.dimension,
            prototypes=recipe.prototypes,
            assignment_scale=recipe.assignment_scale,
            assign_on=recipe.assign_on,
            pooling=recipe.pooling,
            reconstructs=recipe.reconstruction_weight > 0,
        )


@torch.no_grad()
def _grid(backbone: Backbone, image_size: int) -> tuple[int, int]:
    """Find (h, w) of the backbone's map by running one black image of the given size."""
    training = backbone.training
    backbone.eval()
    try:
        maps = backbone(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise BadSetting(
            f"the backbone does not take images of {image_size} px ({reason}): set another image_size"
        ) from error
    finally:
        backbone.train(training)
    if maps.ndim != 4 or maps.shape[1] != backbone.channels:
        raise BadSetting(
            f"the backbone gives features of shape {tuple(maps.shape)}, not a map of {backbone.channels}"
            " channels; choose a convolutional backbone or a plain vision transformer"
        )
    return int(maps.shape[2]), int(maps.shape[3])
