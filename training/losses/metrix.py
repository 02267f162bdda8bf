"""Metrix: mixed examples of two classes, with labels mixed alike, as references of each image.

Venkataramanan et al., "It Takes Two to Tango: Mixup for Deep Metric Learning", ICLR 2022.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from training.method.prototypes import full_precision
from training.network.backbone import Backbone
from training.recipes.recipe import Recipe

__all__ = ["Pairs", "draw_pairs", "embed_mixed", "mix", "mixed_loss", "mixing_at"]


class Pairs(NamedTuple):
    """Which rows of a batch are mixed, and how: share of the first and 1 - share of the second."""

    first: Tensor  # int64 (M,)
    second: Tensor  # int64 (M,), of another class than the first
    share: Tensor  # float32 (M,), in [0, 1]


def draw_pairs(labels: Tensor, *, alpha: float, generator: torch.Generator) -> Pairs:
    """Draw for each image of a batch a partner of another class, its share by Beta(alpha, alpha).

    There are none where the batch has one class; the generator is on the CPU, for the same pairs anywhere.
    """
    others = (labels[:, None] != labels).float().cpu()  # (B, B)
    first = torch.arange(len(labels)) if others.any() else torch.arange(0)
    second = torch.multinomial(others, 1, generator=generator)[:, 0] if len(first) else first
    # torch has no Beta that takes a generator, so a draw from this one seeds NumPy's.
    seed = int(torch.randint(2**62, (), generator=generator))
    share = np.random.default_rng(seed).beta(alpha, alpha, size=len(first))
    return Pairs(*(part.to(labels.device) for part in (first, second, torch.from_numpy(share).float())))


def mix(values: Tensor, pairs: Pairs) -> Tensor:
    """Mix rows of a batch (B, ...) to (M, ...): share * values[first] + (1 - share) * values[second]."""
    share = pairs.share.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
    return torch.lerp(values[pairs.second], values[pairs.first], share)


@full_precision
def mixed_loss(
    embeddings: Tensor,
    labels: Tensor,
    mixed: Tensor,
    pairs: Pairs,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
) -> Tensor:
    """Multi-similarity loss of clean images against mixed ones, with labels between 0 and 1.

    With s(a, v) the cosine of anchor a and mixture v of a class c at share t and a class c' at 1 - t, and

        y(a, v) = t [c = class of a] + (1 - t) [c' = class of a]

    the loss is the paper's generic one (its functions tau, sigma and rho those of multi-similarity), a sum
    over all labels at once in place of one over positives and one over negatives:

        1/B sum over a of  1/alpha log(1 + sum over v of    y(a, v)  exp(-alpha (s(a, v) - base)))
                         + 1/beta  log(1 + sum over v of (1 - y(a, v)) exp( beta (s(a, v) - base)))

    With labels of 0 and 1 this is the multi-similarity loss itself, without a miner. What the paper leaves
    open: all anchors, the clean images alone, share one set of mixtures.

    Embeddings (B, d), of clean images, and `mixed` (M, d) are raw; without a mixture it is zero.
    """
    cosines = functional.normalize(embeddings) @ functional.normalize(mixed).T  # s, (B, M)
    share = pairs.share.to(cosines.dtype)
    of_first = labels[:, None] == labels[pairs.first]  # (B, M)
    of_second = labels[:, None] == labels[pairs.second]
    positive = share * of_first + (1 - share) * of_second  # y
    negative = share * ~of_first + (1 - share) * ~of_second  # 1 - y, and exactly 0 where y is 1
    pull = positive.log() - alpha * (cosines - base)  # a weight of 0 is -inf here, and drops out below
    push = negative.log() + beta * (cosines - base)
    return (_log_one_plus(pull) / alpha + _log_one_plus(push) / beta).mean()


def mixing_at(module: nn.Module, pairs: Pairs) -> RemovableHandle:
    """While open, `module` puts out the mixtures of what it computes, so that what follows sees M rows."""
    return module.register_forward_hook(lambda _module, _inputs, output: mix(output, pairs))


def embed_mixed(
    images: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    recipe: Recipe,
    embed: Callable[[Tensor], Any],
    backbone: Backbone,
    generator: torch.Generator,
) -> tuple[Tensor, Pairs] | None:
    """Embed mixed examples, raw (M, d), at the level that the recipe says or that is drawn for this step.

    Takes what `embed` takes, `images` float32 (B, 3, S, S), the raw embeddings (B, d) that it gave for them,
    and labels, int64 (B,). None where the recipe mixes nothing, or the batch is of one class.
    """
    level = recipe.mixing
    if level == "none":
        return None
    if level == "all":
        level = ("input", "feature", "embedding")[int(torch.randint(3, (), generator=generator))]
    pairs = draw_pairs(labels, alpha=recipe.mixing_alpha, generator=generator)
    if len(pairs.first) == 0:  # one class
        return None
    if level == "embedding":
        return mix(functional.normalize(embeddings, dim=1), pairs), pairs
    if level == "input":
        return embed(mix(images, pairs)).embeddings, pairs
    with mixing_at(backbone.middle, pairs):
        return embed(images).embeddings, pairs


def _log_one_plus(exponents: Tensor) -> Tensor:
    """log(1 + sum_j exp(x_ij)) of each row, without overflow; (B, M) -> (B,)."""
    return torch.cat([exponents.new_zeros(len(exponents), 1), exponents], dim=1).logsumexp(dim=1)
