"""What a training step moves: the embedder, its objective, their optimiser and its schedule, the average."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, RAdam, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from serving.errors import BadData, BadSetting
from training.data.feature_cache import FeatureSet
from training.data.pictures import Pictures, Stream, class_numbers, embed_pictures, viewing_decoder
from training.data.sampler import draw_sample
from training.loop.processes import batchnorms, sync_batchnorm
from training.losses.objective import Objective
from training.method.histogram import start_codebook
from training.network.embedder import Embedder, array_function, build_embedder, pooled_function
from training.recipes.recipe import Recipe

__all__ = [
    "Trainee", "average_weights", "build_network", "build_optimizer", "clip", "closed_form_head",
    "freeze_batchnorm", "freeze_weights", "rate_factor", "start_trainee", "xml_weight",
]  # fmt: skip

Images = Pictures | FeatureSet  # that train
_SAMPLE = 400  # most images whose local features start the prototypes


@dataclass(frozen=True, slots=True)
class Trainee:
    """What a training step moves."""

    fabric: Fabric
    embedder: Embedder
    forward: nn.Module  # the embedder as Fabric wraps it, in the recipe's precision and for several processes
    objective: Objective
    optimizer: Optimizer
    average: AveragedModel | None

    @property
    def eval_model(self) -> Embedder:
        """The weights that are measured and kept: the moving average, where there is one."""
        return self.average.module if self.average else self.embedder  # type: ignore[return-value]

    @property
    def modules(self) -> nn.ModuleDict:
        """What a checkpoint holds besides the optimiser, by name."""
        found: dict[str, nn.Module] = {"model": self.embedder, "objective": self.objective}
        return nn.ModuleDict(found | ({"average": self.average} if self.average else {}))


def build_network(recipe: Recipe, *, classes: int, fresh: bool) -> tuple[Embedder, Objective]:
    """Build what learns, as a `fresh` training starts it: what a setting can spoil fails here."""
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
    recipe: Recipe, network: tuple[Embedder, Objective], pictures: Images, *, fabric: Fabric, fresh: bool
) -> Trainee:
    """Ready what `build_network` built for the first step, on the device of the launched `fabric`.

    A `fresh` head and codebook may start from the training images, or from their features.
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


@torch.no_grad()
def _start_head(embedder: Embedder, pictures: Images, recipe: Recipe) -> None:
    """Set the head by its closed form on the training images as the served model sees them."""
    if recipe.head_init == "random":
        return
    viewed = pictures if isinstance(pictures, FeatureSet) else Stream(pictures.rows, viewing_decoder(recipe))
    pool = pooled_function(embedder, embedder.codebook.device, mapped=isinstance(pictures, FeatureSet))
    features = torch.from_numpy(embed_pictures(pool, viewed, label="Features for head"))  # (N, C)
    labels = torch.from_numpy(class_numbers(viewed.rows, pictures.classes))
    head = closed_form_head(features, labels, recipe)
    embedder.head.weight.copy_(head[:, :, None, None])


def closed_form_head(features: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Find the head W, float32 (d, C), that keeps the d principal axes of features (N, C), whitened or not.

    The head has no bias, so nothing can be centred: a share of the mean's direction is projected out instead.
    With P = I - centre * mu mu' / |mu|^2 and S the scatter of the features P f (`whiten`: about their mean,
    `whiten_within`: about the means of their classes), T = P (S + shrinkage * mean(diag S) I)^-power, or
    T = P for `pca`. The rows of W are the d leading eigenvectors of the second moment of T'f, times T': inner
    products of embeddings are the best approximation, of rank d, of those of T'f.
    All sums run in float64; the mean length of the rows of `features @ W.T` is the recipe's `head_length`.
    """
    form, dimension, centre = recipe.head_init, recipe.dimension, recipe.head_centre
    rows = features.double()
    channels = rows.shape[1]
    if dimension > channels:
        raise BadSetting(
            f"head_init {form} gives at most the backbone's {channels} dimensions: lower dimension to that"
        )
    mean = rows.mean(dim=0)  # mu, (C,)
    transform: Tensor = torch.eye(channels, dtype=torch.float64, device=rows.device)
    if centre > 0 and mean.any():
        transform = transform - centre * torch.outer(mean, mean) / (mean @ mean)  # P
    if form != "pca":
        scatter = _scatter(rows @ transform, labels if form == "whiten_within" else torch.zeros_like(labels))
        transform = transform @ _negative_power(scatter, recipe.head_shrinkage, recipe.head_power)  # T
    seen = rows @ transform  # (N, C)
    _, axes = torch.linalg.eigh(seen.T @ seen)  # eigenvalues ascend
    head: Tensor = transform @ axes[:, -dimension:].flip(1)  # (C, d), the leading axis first
    scale = recipe.head_length / (rows @ head).norm(dim=1).mean().clamp_min(1e-12)
    weights: Tensor = (head * scale).T
    return weights.contiguous().float()


def _scatter(rows: Tensor, labels: Tensor) -> Tensor:
    """Covariance (C, C) of rows (N, C) about the mean of their own class."""
    _, members = labels.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = members.bincount().to(rows.dtype)
    means = torch.zeros(len(counts), rows.shape[1], dtype=rows.dtype, device=rows.device)
    means.index_add_(0, members, rows).div_(counts[:, None])
    centred = rows - means[members]
    return centred.T @ centred / len(rows)


def _negative_power(scatter: Tensor, shrinkage: float, power: float) -> Tensor:
    """Give (S + shrinkage * mean(diag S) I)^-power of a positive semidefinite S."""
    values, vectors = torch.linalg.eigh(scatter)
    values = values.clamp_min(0)
    if not values.mean() > 0:
        raise BadData("features do not vary within classes: set head_init to pca, or give more images")
    powers: Tensor = (values + shrinkage * values.mean()) ** -power
    return torch.einsum("ik,k,jk->ij", vectors, powers, vectors)


@torch.no_grad()
def _start_codebook(embedder: Embedder, pictures: Images, recipe: Recipe) -> None:
    """Start the prototypes from local features of some training images, once the head is started."""
    if recipe.codebook_init == "random" or not recipe.learns_prototypes:
        return
    chosen = draw_sample(pictures.rows, most=_SAMPLE, seed=recipe.seed)
    device, mapped = embedder.codebook.device, isinstance(pictures, FeatureSet)
    viewed = (
        pictures.only(chosen) if isinstance(pictures, FeatureSet) else Stream(chosen, viewing_decoder(recipe))
    )
    locate = array_function(embedder, device, mapped, lambda given: embedder(given, mapped=mapped).locations)
    found = embed_pictures(locate, viewed, label="Features for prototypes")  # (b, n, d)
    embedder.codebook.copy_(start_codebook(torch.from_numpy(found), recipe))


def build_optimizer(embedder: Embedder, objective: nn.Module, recipe: Recipe) -> Optimizer:
    """Group the weights by their learning rate, stored as `peak` of each group.

    Weights of one dimension (BatchNorm, biases, a pooling's exponent), prototypes and what a loss learns are
    not decayed.
    """
    backbone = [parameter for parameter in embedder.backbone.parameters() if parameter.requires_grad]
    special = {id(parameter) for parameter in (*embedder.backbone.parameters(), embedder.codebook)}
    head = [parameter for parameter in embedder.parameters() if id(parameter) not in special]
    groups: list[dict[str, Any]] = [
        {"params": [each for each in weights if (each.ndim > 1) is decays], "lr": rate, "weight_decay": decay}
        for weights, rate in ((backbone, recipe.learning_rate), (head, recipe.head_learning_rate))
        for decays, decay in ((True, recipe.weight_decay), (False, 0.0))
    ]
    if embedder.codebook.requires_grad:
        groups.append({"params": [embedder.codebook], "lr": recipe.prototype_learning_rate})
    groups.append({"params": list(objective.parameters()), "lr": recipe.loss_learning_rate})
    groups = [group | {"peak": group["lr"]} for group in groups if group["params"]]
    # fused: one pass over the weights, a third of the time of the loop on a CPU; fp16's scaler cannot clip it
    fused = recipe.precision != "16-mixed"
    made: dict[str, Callable[[], Optimizer]] = {
        "adamw": lambda: AdamW(groups, weight_decay=0.0, fused=fused),
        "adam": lambda: Adam(groups, fused=fused),
        "radam": lambda: RAdam(groups),
        "rmsprop": lambda: RMSprop(groups, momentum=recipe.momentum),
    }
    return made[recipe.optimizer]()


def clip(optimizer: Optimizer, codebook: Tensor, *, norm: float, value: float) -> Tensor:
    """Shorten the gradient to the length `norm`, then cut its components to `value`; 0 leaves them.

    The codebook's is shortened apart, so that what moves it alone cannot shorten an embedding's step. Gives
    the whole gradient's length before, a scalar.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    length: Tensor = nn.utils.get_total_norm(each.grad for each in parameters if each.grad is not None)
    if norm:
        rest = [parameter for parameter in parameters if parameter is not codebook]
        nn.utils.clip_grad_norm_(rest, norm)
        nn.utils.clip_grad_norm_(codebook, norm)
    if value:
        nn.utils.clip_grad_value_(parameters, value)
    return length


def average_weights(embedder: Embedder, decay: float) -> AveragedModel:
    """Give the moving average of all weights and buffers; `update_parameters` takes the next step in.

    The decay starts low, min(decay, (1 + t) / (10 + t)) at step t, so that the start is soon forgotten.
    """

    def update(averages: Any, currents: Any, step: Tensor | int) -> None:
        now = min(decay, (1 + int(step)) / (10 + int(step)))
        get_ema_multi_avg_fn(now)(averages, currents, step)  # type: ignore[no-untyped-call]

    return AveragedModel(embedder, multi_avg_fn=update, use_buffers=True)


def freeze_weights(embedder: Embedder, recipe: Recipe) -> None:
    """Stop the training of the backbone's first stages, of BatchNorm's weights, and of idle prototypes."""
    embedder.backbone.freeze(recipe.freeze_stages)
    if recipe.caches_features:
        embedder.backbone.requires_grad_(False)
    if recipe.freeze_batchnorm_weights:
        for layer in batchnorms(embedder):
            layer.requires_grad_(False)
    if not recipe.learns_prototypes:  # nothing asks for them, and several processes wait for every gradient
        embedder.codebook.requires_grad_(False)


def freeze_batchnorm(module: nn.Module, *, whole: bool) -> None:
    """Let BatchNorm, the `whole` of it or that of frozen stages, keep its statistics; its weights train."""
    for layer in batchnorms(module):
        if whole or (isinstance(layer.weight, Tensor) and not layer.weight.requires_grad):
            layer.eval()


def rate_factor(step: int, steps: int, recipe: Recipe, *, per_epoch: int = 1) -> float:
    """Give the share of the peak learning rate at `step` of `steps`, from 0: a warm-up, then a schedule."""
    warmup = round(recipe.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "drops":
        return recipe.drop_factor ** bisect_right(sorted(recipe.drop_epochs), step // per_epoch)
    return _half_cosine((step - warmup) / (steps - warmup))


def xml_weight(step: int, steps: int, recipe: Recipe) -> float:
    """Give lambda at `step` of `steps`, counted from 0: a warm-up, then a schedule."""
    warmup = round(recipe.xml_warmup * steps)
    if step < warmup:
        return recipe.xml_weight * (step + 1) / (warmup + 1)
    gone = (step - warmup) / (steps - warmup)
    falling = {"constant": 1.0, "linear": 1 - gone, "cosine": _half_cosine(gone)}
    return recipe.xml_weight * falling[recipe.xml_schedule]


def _half_cosine(gone: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * gone))
