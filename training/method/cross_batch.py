"""The cross-batch loss (XML): each half of a batch expressed by prototypes of the other; its signs of life.

With features that all fall to the same few prototypes the fit has one direction, every expressed embedding
points along it, and the loss stands still whatever λ is. No curve of the loss shows that, so it is measured.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.method import prototypes
from training.method.prototypes import full_precision
from training.method.recursion import Past
from training.recipes.recipe import FitOn, RidgeOn

__all__ = ["cross_batch_loss", "fit_targets", "gradient_share", "split_classes", "watch_term"]

_AT_ONCE = 4  # up to this many images a prototype, both halves are expressed at once


def split_classes(labels: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Split a batch at random into two sets of disjoint classes, by label and never by row.

    It depends on the set of labels and the generator (on the CPU) alone, so that all processes split alike.
    Gives two masks, bool (B,), each the negation of the other; one class leaves the first empty.
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

    Takes Zᵀ, float (B, m), Yᵀ, raw GAP features, float (B, d), labels, integer (B,), and ℓ, the pairwise or
    proxy loss that the embeddings are trained with. The `ridge` ϵ is taken as it is, or relative to
    trace(ZZᵀ)/m, and prototypes are fitted to raw or to unit embeddings. The `generator` draws the halves, on
    the CPU. `past` are earlier batches, by class, a half's own left out of what expresses it (beyond the
    paper), and `kinds` what halves are split and `past` is kept by, integer (B,), if not the labels.
    Gives L_XML, a scalar; gradients run through both fits, not into the past. With one class both are zero.
    """
    kinds = labels if kinds is None else kinds
    targets = fit_targets(embeddings, fit_on)
    first, second = split_classes(kinds, generator)
    if not first.any():
        return (histograms * 0).sum() + (embeddings * 0).sum()  # a zero that backward() accepts
    expressed = _express(histograms, targets, kinds, first, ridge=ridge, ridge_on=ridge_on, past=past)
    return loss(expressed[first], labels[first]) + loss(expressed[second], labels[second])  # (2.11)


def fit_targets(embeddings: Tensor, fit_on: FitOn) -> Tensor:
    """Give what prototypes are fitted to, float (B, d): embeddings as they are, or at unit length."""
    return functional.normalize(embeddings, dim=1) if fit_on == "unit" else embeddings


def _express(
    histograms: Tensor, targets: Tensor, kinds: Tensor, first: Tensor, *, past: Past | None, **fit_by: Any
) -> Tensor:
    """Express each half by what is fitted to the other, Ŷ₁ = V₂Z₁ and Ŷ₂ = V₁Z₂ (eq. 2.10); Ŷᵀ (B, d)."""
    if past is None and len(histograms) <= _AT_ONCE * histograms.shape[1]:
        return prototypes.cross_reconstruct(histograms, targets, first, **fit_by)

    def fit(half: Tensor) -> Tensor:
        z, y = histograms[half], targets[half]
        if past is None:
            return prototypes.fit_prototypes(z, y, **fit_by)  # (d, m)   (2.8)
        gram, moment = past.without(kinds[~half])  # of what these prototypes are to express
        return prototypes.fit_moments(gram + z.T @ z, moment + z.T @ y, **fit_by)

    v1, v2 = fit(first), fit(~first)
    return torch.where(first[:, None], histograms @ v2.T, histograms @ v1.T)  # (B, m) x (m, d) -> (B, d)


@torch.no_grad()
@full_precision
def watch_term(
    histograms: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    first: Tensor,
    *,
    ridge: float,
    ridge_on: RidgeOn = "absolute",
    fit_on: FitOn = "raw",
    past: Past | None = None,
    kinds: Tensor | None = None,
) -> dict[str, float]:
    """Measure what the term makes of one batch, given as for `cross_batch_loss`, that `past` does not hold.

    Returns:
        Of these what the batch has, all finite: `prototypes_in_use`, exp of the entropy of the mean
        histogram, and `prototypes_an_image`, the mean of that of each, both in [1, m]; `eigenvalues`, how
        many of the ZZᵀ that is fitted exceed the ridge, the mean of both halves; `expressed_cosine`, the mean
        between expressed embeddings of different classes within a half; `rebuilt_cosine`, the mean of ŷ to y.
    """
    if not (histograms.isfinite().all() and embeddings.isfinite().all()):
        return {}  # which the loop tells of
    entropy, entropies = (torch.special.entr(z).sum(dim=-1) for z in (histograms.mean(dim=0), histograms))
    told = {"prototypes_in_use": entropy.exp(), "prototypes_an_image": entropies.exp().mean()}
    kinds = labels if kinds is None else kinds
    if first.any() and not first.all():
        counts = []
        for half in (first, ~first):
            gram = histograms[half].T @ histograms[half]
            if past is not None:
                gram = gram + past.without(kinds[~half])[0]
            level = prototypes.scaled_ridge(ridge, ridge_on, gram.trace(), len(gram))
            # float32 fails to converge where all images have one prototype; and on MPS there is neither
            counts.append((torch.linalg.eigvalsh(gram.cpu().double()) > level.cpu()).sum().double())
        told["eigenvalues"] = torch.stack(counts).mean()
        targets = fit_targets(embeddings, fit_on)
        expressed = _express(histograms, targets, kinds, first, ridge=ridge, ridge_on=ridge_on, past=past)
        unit = functional.normalize(expressed, dim=1)
        apart = (labels[:, None] != labels) & (first[:, None] == first)
        told["expressed_cosine"] = (unit @ unit.T)[apart].mean()  # NaN where each half has one class
        told["rebuilt_cosine"] = functional.cosine_similarity(expressed, targets).mean()
    return {name: float(value) for name, value in told.items() if value.isfinite()}


def gradient_share(dml: Tensor, xml: Tensor, leaves: Sequence[Tensor], *, weight: float) -> float:
    """Give |λ ∂L_XML| / |(1 − λ) ∂L_DML| by tensors taken together; not finite where DML has no gradient."""

    def length(term: Tensor) -> Tensor:
        found = torch.autograd.grad(term, leaves, retain_graph=True, materialize_grads=True)
        combined: Tensor = torch.cat([gradient.flatten() for gradient in found]).norm()
        return combined

    return float(weight * length(xml) / ((1 - weight) * length(dml)))
