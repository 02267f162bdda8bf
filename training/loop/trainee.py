"""What a training step moves: the embedder, its objective, their optimiser, the average of weights."""

from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from training.data.feature_cache import FeatureSet
from training.data.pictures import Pictures, Stream, class_numbers, embed_pictures, viewing_decoder
from training.data.sample import draw_sample
from training.loop.objective import Objective
from training.loop.optimizer import average_weights, build_optimizer, freeze_weights
from training.loop.processes import sync_batchnorm
from training.method.codebook import start_codebook
from training.network.embedder import Embedder, build_embedder
from training.network.embedding import locations_function, pooled_function
from training.network.head_init import closed_form_head
from training.recipes.recipe import Recipe

__all__ = ["Trainee", "build_network", "start_trainee"]

_SAMPLE = 400
"""Most images whose local features start the prototypes."""


@dataclass(frozen=True, slots=True)
class Trainee:
    """What a training step moves."""

    fabric: Fabric
    embedder: Embedder
    forward: nn.Module
    """The embedder as Fabric wraps it, in the recipe's precision and for several processes."""
    objective: Objective
    optimizer: Optimizer
    average: AveragedModel | None

    @property
    def device(self) -> torch.device:
        """Where it is trained."""
        return self.fabric.device

    @property
    def eval_model(self) -> Embedder:
        """The weights that are measured and kept: the moving average, where there is one."""
        return self.average.module if self.average else self.embedder  # type: ignore[return-value]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds besides the optimiser, by name."""
        found: dict[str, nn.Module] = {"model": self.embedder, "objective": self.objective}
        return found | ({"average": self.average} if self.average else {})


def build_network(recipe: Recipe, *, classes: int, fresh: bool) -> tuple[Embedder, Objective]:
    """Build what learns, as a training starts it: what a setting can spoil fails here, before images.

    Args:
        recipe: All settings.
        classes: Number of classes that train.
        fresh: No checkpoint will overwrite the weights, so that they have to be right.

    Raises:
        BadSetting: If a setting does not fit the backbone or the loss.
        CrossbatchError: If weights cannot be read.
    """
    with torch.random.fork_rng(devices=[]):  # the same proxies in every process
        torch.manual_seed(recipe.seed)
        objective = Objective(recipe, classes=classes)
    # a checkpoint holds the weights: what the backbone started from need not be here any more
    embedder = build_embedder(recipe if fresh else recipe.model_copy(update={"weights": "none"}))
    freeze_weights(embedder, recipe)
    if recipe.mixing in ("feature", "all"):
        _ = embedder.backbone.middle  # refuses a backbone that has none, before hours of training
    return embedder, objective


def start_trainee(
    recipe: Recipe,
    network: tuple[Embedder, Objective],
    pictures: Pictures | FeatureSet,
    *,
    fabric: Fabric,
    fresh: bool,
) -> Trainee:
    """Put everything in its place for the first step.

    Args:
        recipe: All settings.
        network: What `build_network` built.
        pictures: The training images as they are, or their features, for a start from the data.
        fabric: Device, precision and processes, launched.
        fresh: No checkpoint will overwrite the weights, so that they have to be right.

    Raises:
        BadSetting: If a setting does not fit the processes.
        BadData: If images cannot be read.
    """
    embedder, objective = network
    embedder.backbone = sync_batchnorm(embedder.backbone, fabric, frozen=recipe.freeze_batchnorm)  # type: ignore[assignment]
    embedder.to(fabric.device).to(memory_format=torch.channels_last)
    objective.to(fabric.device)
    if fresh:
        _start_head(embedder, pictures, recipe)
        _start_codebook(embedder, pictures, recipe)
    average = average_weights(embedder, recipe.ema_decay) if recipe.ema_decay else None
    forward, optimizer = fabric.setup(embedder, build_optimizer(embedder, objective, recipe))
    return Trainee(fabric, embedder, forward, objective, optimizer, average)


def _start_head(embedder: Embedder, pictures: Pictures | FeatureSet, recipe: Recipe) -> None:
    """Set the head by its closed form on the training images as the served model sees them."""
    if recipe.head_init == "random":
        return
    mapped = isinstance(pictures, FeatureSet)
    viewed = pictures if isinstance(pictures, FeatureSet) else Stream(pictures.rows, viewing_decoder(recipe))
    pool = pooled_function(embedder, embedder.codebook.device, mapped=mapped)
    features = torch.from_numpy(embed_pictures(pool, viewed, label="Features for head"))  # (N, C)
    head = closed_form_head(
        features,
        torch.from_numpy(class_numbers(viewed.rows, pictures.classes)),
        form=recipe.head_init,
        dimension=recipe.dimension,
        shrinkage=recipe.head_shrinkage,
        power=recipe.head_power,
        centre=recipe.head_centre,
        length=recipe.head_length,
    )
    with torch.no_grad():
        embedder.head.weight.copy_(head[:, :, None, None])


def _start_codebook(embedder: Embedder, pictures: Pictures | FeatureSet, recipe: Recipe) -> None:
    """Start the prototypes from local features of some training images, once the head is started."""
    if recipe.codebook_init == "random" or not recipe.learns_prototypes:
        return
    chosen = draw_sample(pictures.rows, most=_SAMPLE, seed=recipe.seed)
    mapped = isinstance(pictures, FeatureSet)
    viewed = (
        pictures.only(chosen) if isinstance(pictures, FeatureSet) else Stream(chosen, viewing_decoder(recipe))
    )
    locate = locations_function(embedder, embedder.codebook.device, mapped=mapped)
    found = embed_pictures(locate, viewed, label="Features for prototypes")  # (b, n, d)
    codebook = start_codebook(
        torch.from_numpy(found),
        recipe.prototypes,
        form=recipe.codebook_init,
        assign_on=recipe.assign_on,
        seed=recipe.seed,
    )
    with torch.no_grad():
        embedder.codebook.copy_(codebook)
