"""What a training step moves: the embedder, its loss, their optimiser and moving average, on their device."""

from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from serving.errors import BadSetting
from training.dataset import Pictures, QuarterTurns, Stream, class_numbers, viewing_decoder
from training.embedder import Embedder, build_embedder
from training.embedding import embed_pictures, pooled_function
from training.head_init import closed_form_head
from training.loss import MetricLoss, build_loss
from training.optimizer import average_weights, build_optimizer
from training.recipe import Recipe

__all__ = ["Trainee", "start_trainee"]


@dataclass(frozen=True, slots=True)
class Trainee:
    """What a training step moves."""

    fabric: Fabric
    embedder: Embedder
    forward: nn.Module
    """The embedder as Fabric wraps it, in the recipe's precision."""
    loss: MetricLoss
    optimizer: Optimizer
    average: AveragedModel | None

    @property
    def device(self) -> torch.device:
        """Where it is trained."""
        return self.fabric.device

    @property
    def judged(self) -> Embedder:
        """The weights that are measured and kept: the moving average, where there is one."""
        return self.average.module if self.average else self.embedder  # type: ignore[return-value]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds besides the optimiser, by name."""
        found: dict[str, nn.Module] = {"model": self.embedder, "loss": self.loss}
        return found | ({"average": self.average} if self.average else {})


def start_trainee(
    recipe: Recipe, pictures: Pictures, source: Pictures | QuarterTurns, *, device: str, fresh: bool
) -> Trainee:
    """Build everything as a training starts it, and take the recipe's threads.

    What a setting can spoil fails here, before a new run has a folder.

    Args:
        recipe: All settings.
        pictures: The training images as they are, for a closed-form start.
        source: The same with the classes that are trained.
        device: `auto`, or a device by Lightning's name.
        fresh: No checkpoint will overwrite the weights, so that they have to be right.

    Raises:
        BadSetting: If the device is not there, or a setting does not fit the backbone.
        CrossbatchError: If weights or images cannot be read.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    fabric = _fabric(device, recipe.precision)
    embedder = build_embedder(recipe)
    embedder.backbone.freeze(recipe.freeze_stages)
    embedder.to(fabric.device).to(memory_format=torch.channels_last)
    loss = build_loss(
        recipe.loss, classes=len(source.classes), dimension=recipe.dimension, **recipe.loss_options
    ).to(fabric.device)
    if fresh:
        _start_head(embedder, pictures, recipe)
    average = average_weights(embedder, recipe.ema_decay) if recipe.ema_decay else None
    forward, optimizer = fabric.setup(embedder, build_optimizer(embedder, loss, recipe))
    return Trainee(fabric, embedder, forward, loss, optimizer, average)


def _fabric(device: str, precision: str) -> Fabric:
    if device == "auto":  # never mps, on which no training has been measured
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return Fabric(accelerator=device, devices=1, precision=precision)  # type: ignore[arg-type]
    except Exception as error:  # Lightning has a class of its own for each accelerator that is missing
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise BadSetting(f"--device {device} with precision {precision} cannot be used: {reason}") from error


def _start_head(embedder: Embedder, pictures: Pictures, recipe: Recipe) -> None:
    """Set the head by its closed form on the training images as the served model sees them."""
    if recipe.head_init == "random":
        return
    viewed = Stream(pictures.rows, viewing_decoder(recipe))
    device = embedder.prototypes.device
    features = embed_pictures(pooled_function(embedder, device), viewed, label="Features for head")  # (N, C)
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
