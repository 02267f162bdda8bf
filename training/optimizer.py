"""What moves the weights: AdamW over groups with their own rates, the schedule, the moving average."""

import math

from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.embedder import Embedder
from training.recipe import Recipe

__all__ = ["average_weights", "build_optimizer", "freeze_batchnorm", "rate_factor"]


_Tensors = tuple[Tensor, ...] | list[Tensor]


def build_optimizer(embedder: Embedder, loss: nn.Module, recipe: Recipe) -> AdamW:
    """Group the weights by their learning rate, stored as `peak` of each group.

    Weights of one dimension (BatchNorm, biases), prototypes and a loss's proxies are not decayed.
    """
    backbone = [parameter for parameter in embedder.backbone.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in backbone if parameter.ndim > 1],
            "lr": recipe.learning_rate,
            "weight_decay": recipe.weight_decay,
        },
        {"params": [parameter for parameter in backbone if parameter.ndim <= 1], "lr": recipe.learning_rate},
        {
            "params": list(embedder.head.parameters()),
            "lr": recipe.head_learning_rate,
            "weight_decay": recipe.weight_decay,
        },
        {
            "params": [embedder.prototypes, *loss.parameters()],
            "lr": recipe.prototype_learning_rate,
        },
    ]
    for group in groups:
        group["peak"] = group["lr"]
    # fused: one pass over the weights, a third of the time of the loop on a CPU
    return AdamW([group for group in groups if group["params"]], weight_decay=0.0, fused=True)


def rate_factor(step: int, steps: int, recipe: Recipe) -> float:
    """Give the share of the peak learning rate at `step` of `steps`, counted from 0.

    A line up to 1 over the warm-up, then half a cosine down to 0, or 1 throughout.
    """
    warmup = round(recipe.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def average_weights(embedder: Embedder, decay: float) -> AveragedModel:
    """Give the moving average of all weights and buffers; `update_parameters` takes the next step in.

    The decay starts low, min(decay, (1 + t) / (10 + t)) at step t, so that the start is soon forgotten.
    """

    def update(averages: _Tensors, currents: _Tensors, step: Tensor | int) -> None:
        now = min(decay, (1 + int(step)) / (10 + int(step)))
        get_ema_multi_avg_fn(now)(averages, currents, step)  # type: ignore[no-untyped-call]

    return AveragedModel(embedder, multi_avg_fn=update, use_buffers=True)


def freeze_batchnorm(module: nn.Module, *, whole: bool) -> None:
    """Let BatchNorm use the statistics that it holds, and keep them; its scale and shift still train.

    Args:
        module: In training mode.
        whole: Every BatchNorm; else only those whose stage is frozen.
    """
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (whole or not layer.weight.requires_grad):
            layer.eval()
