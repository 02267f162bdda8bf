"""The cross-batch loss (XML): each half of a batch is expressed by prototypes fitted to the other half."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from serving.errors import BadSetting
from training.method.past import Past
from training.method.precision import full_precision
from training.method.prototypes import RidgeOn, cross_reconstruct, fit_moments, fit_prototypes

__all__ = ["FitOn", "cross_batch_loss", "express", "fit_targets", "split_classes"]

FitOn = Literal["raw", "unit"]

_AT_ONCE = 4
"""Up to this many images a prototype, both halves are expressed at once: fewer, larger operations."""


def split_classes(labels: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Split a batch at random into two sets of disjoint classes, by label and never by row.

    The split depends on the set of labels and the generator alone: processes that gathered one batch, in
    whatever order, and hold generators of one seed, split it alike. An odd class count puts one class more
    in the second set, and one class leaves the first empty.

    Args:
        labels: Integer (B,).
        generator: A generator on the CPU; torch's global one when None.

    Returns:
        Two masks, bool (B,), each the negation of the other.
    """
    classes, members = torch.unique(labels, return_inverse=True)
    order = torch.randperm(len(classes), generator=generator)
    in_first = torch.zeros(len(classes), dtype=torch.bool)
    in_first[order[: len(classes) // 2]] = True
    first = in_first.to(labels.device)[members]
    return first, ~first


@full_precision
def cross_batch_loss(
    histograms: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    ridge: float = 0.05,
    ridge_on: RidgeOn = "absolute",
    generator: torch.Generator | None = None,
    fit_on: FitOn = "raw",
    past: Past | None = None,
    kinds: Tensor | None = None,
) -> Tensor:
    """Loss of each half of a batch as the other half's prototypes express it (eq. 2.10 and 2.11).

    Args:
        histograms: Zᵀ, float (B, m).
        embeddings: Yᵀ, raw GAP features, float (B, d).
        labels: Integer (B,).
        loss: ℓ, the pairwise or proxy loss that the embeddings are trained with.
        ridge: ϵ of the fit, above zero.
        ridge_on: Take ϵ as it is, or relative to trace(ZZᵀ)/m of what is fitted.
        generator: Draws the halves, on the CPU; torch's global one when None.
        fit_on: Fit the prototypes to raw or to unit embeddings.
        past: Earlier batches, by class: each half is then expressed by prototypes fitted to the other half
            and to the past of all classes but its own (beyond the paper).
        kinds: What the halves are split by, integer (B,), and `past` is kept by: classes of one kind stay
            together. The labels themselves when None.

    Returns:
        L_XML, a scalar; gradients run through both fits, not into the past. With one class it is zero, and
        so is its gradient.

    Raises:
        BadSetting: When `ridge` is not above zero or a choice is unknown.
    """
    kinds = labels if kinds is None else kinds
    targets = fit_targets(embeddings, fit_on)
    first, second = split_classes(kinds, generator)
    if not first.any():
        return (histograms * 0).sum() + (embeddings * 0).sum()  # a zero that backward() accepts
    expressed = express(histograms, targets, kinds, first, ridge=ridge, ridge_on=ridge_on, past=past)
    return loss(expressed[first], labels[first]) + loss(expressed[second], labels[second])  # (2.11)


def fit_targets(embeddings: Tensor, fit_on: FitOn) -> Tensor:
    """Give what prototypes are fitted to, float (B, d): embeddings as they are, or at unit length.

    Raises:
        BadSetting: When `fit_on` is unknown.
    """
    if fit_on not in get_args(FitOn):
        raise BadSetting(f"fit_on is {fit_on!r}, but it must be one of {', '.join(get_args(FitOn))}")
    return functional.normalize(embeddings, dim=1) if fit_on == "unit" else embeddings


@full_precision
def express(
    histograms: Tensor,
    targets: Tensor,
    kinds: Tensor,
    first: Tensor,
    *,
    ridge: float,
    ridge_on: RidgeOn = "absolute",
    past: Past | None = None,
) -> Tensor:
    """Express each half by what is fitted to the other, Ŷ₁ = V₂Z₁ and Ŷ₂ = V₁Z₂ (eq. 2.10).

    Args:
        histograms: Zᵀ, float (B, m).
        targets: Yᵀ that the prototypes are fitted to, float (B, d).
        kinds: What `first` splits, integer (B,).
        first: Which images are of the first half, bool (B,).
        ridge: ϵ of the fit, above zero.
        ridge_on: Take ϵ as it is, or relative to trace(ZZᵀ)/m of what is fitted.
        past: Earlier batches, of which each half's own kinds are left out.

    Returns:
        Ŷᵀ, float (B, d), in the order of the batch.

    Raises:
        BadSetting: When `ridge` is not above zero or `ridge_on` is unknown.
    """
    if past is None and len(histograms) <= _AT_ONCE * histograms.shape[1]:
        return cross_reconstruct(histograms, targets, first, ridge=ridge, ridge_on=ridge_on)

    def fit(half: Tensor) -> Tensor:
        z, y = histograms[half], targets[half]
        if past is None:
            return fit_prototypes(z, y, ridge=ridge, ridge_on=ridge_on)  # (d, m)   (2.8)
        gram, moment = past.without(kinds[~half])  # of what these prototypes are to express
        return fit_moments(gram + z.T @ z, moment + z.T @ y, ridge=ridge, ridge_on=ridge_on)

    v1, v2 = fit(first), fit(~first)
    return torch.where(first[:, None], histograms @ v2.T, histograms @ v1.T)  # (B, m) x (m, d) -> (B, d)
