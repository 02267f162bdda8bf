"""What moves the weights: an optimiser over groups with their own rates, what stays frozen, the average."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, RAdam, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.network.embedder import Embedder
from training.recipes.recipe import Recipe

__all__ = ["average_weights", "build_optimizer", "clip", "freeze_batchnorm", "freeze_weights"]

_Tensors = tuple[Tensor, ...] | list[Tensor]


def build_optimizer(embedder: Embedder, objective: nn.Module, recipe: Recipe) -> Optimizer:
    """Group the weights by their learning rate, stored as `peak` of each group.

    Weights of one dimension (BatchNorm, biases, a pooling's exponent), prototypes and what a loss learns are
    not decayed.
    """
    backbone = [parameter for parameter in embedder.backbone.parameters() if parameter.requires_grad]
    special = {id(parameter) for parameter in (*embedder.backbone.parameters(), embedder.codebook)}
    head = [parameter for parameter in embedder.parameters() if id(parameter) not in special]
    groups: list[dict[str, Any]] = [
        {"params": part, "lr": rate, "weight_decay": decay}
        for weights, rate in ((backbone, recipe.learning_rate), (head, recipe.head_learning_rate))
        for part, decay in (
            ([parameter for parameter in weights if parameter.ndim > 1], recipe.weight_decay),
            ([parameter for parameter in weights if parameter.ndim <= 1], 0.0),
        )
    ]
    if embedder.codebook.requires_grad:
        groups.append({"params": [embedder.codebook], "lr": recipe.prototype_learning_rate})
    groups.append({"params": list(objective.parameters()), "lr": recipe.loss_learning_rate})
    groups = [group for group in groups if group["params"]]
    for group in groups:
        group["peak"] = group["lr"]
    # fused: one pass over the weights, a third of the time of the loop on a CPU; fp16's scaler cannot clip it
    fused = recipe.precision != "16-mixed"
    made: dict[str, Callable[[], Optimizer]] = {
        "adamw": lambda: AdamW(groups, weight_decay=0.0, fused=fused),
        "adam": lambda: Adam(groups, fused=fused),
        "radam": lambda: RAdam(groups),
        "rmsprop": lambda: RMSprop(groups, momentum=recipe.momentum),
    }
    return made[recipe.optimizer]()


def clip(optimizer: Optimizer, *, norm: float, value: float) -> Tensor:
    """Shorten the whole gradient to the length `norm`, then cut its components to `value`; 0 leaves them.

    Returns:
        The gradient's length before, a scalar.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    length: Tensor = nn.utils.clip_grad_norm_(parameters, norm or math.inf)
    if value:
        nn.utils.clip_grad_value_(parameters, value)
    return length


def average_weights(embedder: Embedder, decay: float) -> AveragedModel:
    """Give the moving average of all weights and buffers; `update_parameters` takes the next step in.

    The decay starts low, min(decay, (1 + t) / (10 + t)) at step t, so that the start is soon forgotten.
    """

    def update(averages: _Tensors, currents: _Tensors, step: Tensor | int) -> None:
        now = min(decay, (1 + int(step)) / (10 + int(step)))
        get_ema_multi_avg_fn(now)(averages, currents, step)  # type: ignore[no-untyped-call]

    return AveragedModel(embedder, multi_avg_fn=update, use_buffers=True)


def freeze_weights(embedder: Embedder, recipe: Recipe) -> None:
    """Stop the training of the backbone's first stages, of BatchNorm's weights, and of idle prototypes."""
    embedder.backbone.freeze(recipe.freeze_stages)
    if recipe.caches_features:
        embedder.backbone.requires_grad_(False)
    if recipe.freeze_batchnorm_weights:
        for layer in _batchnorms(embedder):
            layer.requires_grad_(False)
    if not recipe.learns_prototypes:  # nothing asks for them, and several processes wait for every gradient
        embedder.codebook.requires_grad_(False)


def freeze_batchnorm(module: nn.Module, *, whole: bool) -> None:
    """Let BatchNorm use the statistics that it holds, and keep them; its scale and shift still train.

    Args:
        module: In training mode.
        whole: Every BatchNorm; else only those whose stage is frozen.
    """
    for layer in _batchnorms(module):
        if whole or (layer.weight is not None and not layer.weight.requires_grad):
            layer.eval()


def _batchnorms(module: nn.Module) -> Iterable[nn.modules.batchnorm._BatchNorm]:
    return (layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
