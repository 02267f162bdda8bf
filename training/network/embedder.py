"""The embedder: pictures to local features, one embedding pooled from them, and their histogram.

Letters: B images, S pixels a side, n = h * w locations, d dimensions, m prototypes, C backbone channels.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serving.errors import BadSetting, cause_of
from training.data.pictures import Embed
from training.method.histogram import Metric, assign, histogram
from training.network.backbone import Backbone, build_backbone
from training.recipes.recipe import AssignOn, PoolingName, Recipe

__all__ = [
    "LEAST", "Embedder", "Features", "Pooling", "array_function", "build_embedder",
    "describer_function", "embedder_function", "generalised_mean", "pooled_function",
]  # fmt: skip

Device = torch.device | str

LEAST: Final = 1e-6  # what features below it count as in the generalised mean


class Features(NamedTuple):
    """What the embedder gives for B images; all float32, nothing normalised to unit length."""

    locations: Tensor  # (B, n, d)
    embeddings: Tensor  # (B, d), with pooling gap the mean over locations
    histograms: Tensor  # (B, m), each row sums to one
    detached: Tensor | None = None  # the same (B, m), whose gradient moves the codebook alone


def generalised_mean(maps: Tensor, exponent: Tensor | float) -> Tensor:
    """Take (1/n sum_j max(x_j, LEAST)^p)^(1/p) over locations, (3) of Radenovic et al., arXiv 1711.02512.

    Maps (B, C, h, w), meant to be those after a ReLU, become (B, C), at least float32.
    """
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32)).clamp_min(LEAST)
    # in shares of the largest, which no power makes infinite; it cancels, so it needs no gradient
    largest = maps.amax(dim=(2, 3), keepdim=True).detach()
    means = (maps / largest).pow(exponent).mean(dim=(2, 3))
    return largest[:, :, 0, 0] * means.pow(1 / exponent)


class Pooling(nn.Module):
    """The map (B, C, h, w) to one vector (B, C): its mean, mean plus maximum, or generalised mean."""

    def __init__(self, name: PoolingName) -> None:
        super().__init__()
        self.name = name
        if name == "gem":  # one exponent for all channels, learnt, from where Radenovic et al. start it
            self.exponent = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, maps: Tensor) -> Tensor:
        """Pool maps, (B, C, h, w), to (B, C)."""
        if self.name == "gem":
            return generalised_mean(maps, self.exponent)
        # an adaptive pooling does not survive the export to ONNX for every size of map
        means = maps.mean(dim=(2, 3))
        return means if self.name == "gap" else means + maps.amax(dim=(2, 3))


class Embedder(nn.Module):
    """Backbone, pooling, bias-free 1x1 convolution, and the histogram operator beside it."""

    def __init__(self, backbone: Backbone, recipe: Recipe) -> None:
        super().__init__()
        self.backbone = backbone
        self.image_size, self.dimension = recipe.image_size, recipe.dimension
        self.assignment_scale = recipe.assignment_scale
        self.assign_on: AssignOn = recipe.assign_on
        self.grid = _grid(backbone, recipe.image_size)  # (h, w): locations are read row by row
        self.pooling: PoolingName = recipe.pooling
        self.reconstructs = recipe.reconstruction_weight > 0
        self.pool = Pooling(recipe.pooling)
        # before GAP this 1x1 convolution equals a linear layer after it
        self.head = nn.Conv2d(backbone.channels, self.dimension, 1, bias=False)
        self.codebook = nn.Parameter(torch.randn(recipe.prototypes, self.dimension) / self.dimension**0.5)
        # x / 255, minus mean, over std, as one product and one sum
        mean, std = torch.tensor(backbone.mean), torch.tensor(backbone.std)
        self._scale: Tensor
        self._shift: Tensor
        self.register_buffer("_scale", 1 / (255 * std), persistent=False)
        self.register_buffer("_shift", -(mean / std), persistent=False)

    def forward(self, images: Tensor, *, mapped: bool = False) -> Features:
        """Embed normalised images, float32 (B, 3, S, S).

        With `mapped` they are what the backbone gave for them, float (B, C, h, w), or some places of it.
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
        """Give the histograms, float (B, m), of local features (B, n, d) (eq. 2.4)."""
        return histogram(
            locations, self.codebook, assignment_scale=self.assignment_scale, assign_on=self.assign_on
        )

    def assignments(self, locations: Tensor) -> Tensor:
        """Give the largest term of eq. 2.4's softmax, uint8 (B, n), of locations (B, n, d)."""
        metric: Metric = "cosine" if self.assign_on == "unit" else "inner"
        return assign(locations, self.codebook.to(locations.dtype), metric=metric).to(torch.uint8)

    def normalise(self, images: Tensor, *, mapped: bool = False) -> Tensor:
        """Turn pixels, uint8 RGB (B, S, S, 3), or maps of the backbone into what `forward` takes, float32."""
        if mapped:
            return images.float()
        if self.backbone.order == "BGR":
            images = images.flip(3)
        side = images.shape[2]
        # By whole rows: in int8 ONNX Runtime keeps colours last, and takes 20 times as long by three.
        rows = images.flatten(2).to(torch.float32) * self._scale.repeat(side) + self._shift.repeat(side)
        return rows.reshape(-1, *images.shape[1:]).permute(0, 3, 1, 2)

    def pooled(self, images: Tensor, *, mapped: bool = False) -> Tensor:
        """Pool the backbone's own features, (B, C), of what `forward` takes."""
        maps: Tensor = images if mapped else self.backbone(images)
        vectors: Tensor = self.pool(maps.float())
        return vectors


def build_embedder(recipe: Recipe) -> Embedder:
    """Build the embedder as training starts it: the recipe's weights, the rest drawn from its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        backbone = build_backbone(recipe.backbone, recipe.weights, image_size=recipe.image_size)
        return Embedder(backbone, recipe)


# The network as functions of arrays, which put it into evaluation mode: from pixels, uint8 (B, S, S, 3), or
# with `mapped` from the backbone's own maps (B, C, h, w), as from a `FeatureSet`.


def embedder_function(embedder: Embedder, device: Device = "cpu", *, mapped: bool = False) -> Embed:
    """Give the function from images to embeddings (B, d)."""
    return array_function(embedder, device, mapped, lambda images: embedder(images, mapped=mapped).embeddings)


def describer_function(embedder: Embedder, device: Device = "cpu", *, mapped: bool = False) -> Embed:
    """Give the function from images to embeddings and histograms side by side, (B, d + m)."""

    def describe(images: Tensor) -> Tensor:
        features = embedder(images, mapped=mapped)
        return torch.cat((features.embeddings, features.histograms), dim=1)

    return array_function(embedder, device, mapped, describe)


def pooled_function(embedder: Embedder, device: Device = "cpu", *, mapped: bool = False) -> Embed:
    """Give the function from images to the backbone's own features, pooled, (B, C)."""
    return array_function(embedder, device, mapped, lambda images: embedder.pooled(images, mapped=mapped))


def array_function(embedder: Embedder, device: Device, mapped: bool, run: Callable[[Tensor], Any]) -> Embed:
    """Give `run`, which takes what `Embedder.forward` does, as a function of arrays."""

    @torch.no_grad()
    def wrapper(images: NDArray[Any]) -> NDArray[Any]:
        embedder.eval()
        found: Tensor = run(embedder.normalise(torch.from_numpy(images).to(device), mapped=mapped))
        return found.float().cpu().numpy()

    return wrapper


@torch.no_grad()
def _grid(backbone: Backbone, image_size: int) -> tuple[int, int]:
    """Find (h, w) of a new backbone's map by running one black image of the given size."""
    backbone.eval()
    try:
        maps = backbone(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise BadSetting(
            f"the backbone does not take images of {image_size} px ({cause_of(error)}): set another"
            " image_size"
        ) from error
    finally:
        backbone.train()
    if maps.ndim != 4 or maps.shape[1] != backbone.channels:
        raise BadSetting(
            f"the backbone gives features of shape {tuple(maps.shape)}, not a map of {backbone.channels}"
            " channels; choose a convolutional backbone or a plain vision transformer"
        )
    return int(maps.shape[2]), int(maps.shape[3])
