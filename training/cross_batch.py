"""The cross-batch loss (XML): each half of a batch is expressed by prototypes fitted to the other half."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from serving.errors import BadSetting
from training.precision import full_precision
from training.prototypes import cross_reconstruct, fit_prototypes
from training.recursion import Fit, update

__all__ = ["FitOn", "cross_batch_loss", "split_classes"]

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
    generator: torch.Generator | None = None,
    fit_on: FitOn = "raw",
    past: Fit | None = None,
    decay: float = 0.99,
) -> Tensor:
    """Loss of each half of a batch as the other half's prototypes express it (eq. 2.10 and 2.11).

    Args:
        histograms: Zᵀ, float (B, m).
        embeddings: Yᵀ, raw GAP features, float (B, d).
        labels: Integer (B,).
        loss: ℓ, the pairwise or proxy loss that the embeddings are trained with.
        ridge: ϵ of the fit, above zero.
        generator: Draws the halves, on the CPU; torch's global one when None.
        fit_on: Fit the prototypes to raw or to unit embeddings.
        past: The recursion over earlier batches, which each half's prototypes then go on from (beyond the
            paper); without it they are fitted to that half alone.
        decay: α of that recursion.

    Returns:
        L_XML, a scalar; gradients run through both fits, not into the past. With one class it is zero, and
        so is its gradient.

    Raises:
        BadSetting: When `ridge` is not above zero or `fit_on` is unknown.
    """
    if fit_on not in get_args(FitOn):
        raise BadSetting(f"fit_on is {fit_on!r}, but it must be one of {', '.join(get_args(FitOn))}")
    first, second = split_classes(labels, generator)
    if not first.any():
        return (histograms * 0).sum() + (embeddings * 0).sum()  # a zero that backward() accepts
    if fit_on == "unit":
        embeddings = functional.normalize(embeddings, dim=1)
    if past is None and len(histograms) <= _AT_ONCE * histograms.shape[1]:
        expressed = cross_reconstruct(histograms, embeddings, first, ridge=ridge)
        expressed1, expressed2 = expressed[first], expressed[second]
    else:

        def fit(half: Tensor) -> Tensor:
            z, y = histograms[half], embeddings[half]
            if past is None:
                return fit_prototypes(z, y, ridge=ridge)  # (d, m)   (2.8)
            return update(past, z, y, decay=decay, ridge=ridge).prototypes

        v1, v2 = fit(first), fit(second)
        expressed1 = histograms[first] @ v2.T  # Ŷ₁ = V₂Z₁, (B₁, m) x (m, d) -> (B₁, d)   (2.10)
        expressed2 = histograms[second] @ v1.T  # Ŷ₂ = V₁Z₂
    return loss(expressed1, labels[first]) + loss(expressed2, labels[second])  # (2.11)
