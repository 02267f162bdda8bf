"""Prototypes fitted to a stream of batches: the paper's recursion set right, and the sums by class in use.

A ridge fit to many batches is a weighted mean of fits to each, with matrices as weights. The paper's weights
hold two slips; the forms here are the right ones (`docs/method.md` derives them), and equal the direct fit.
A training keeps `Past` instead, for a half of a batch must not be expressed by a fit to its own classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting
from training.method.prototypes import fit_prototypes, full_precision, solve_positive

__all__ = ["Fit", "Past", "fit_batch", "merge", "start", "update", "weight"]

_MOST_BYTES = 2 * 2**30  # of the sums of `Past`, which every checkpoint holds


@dataclass(frozen=True, slots=True)
class Fit:
    """Prototypes V (d, m) fitted to the batches so far, and how firmly: R = Z Zᵀ + ridge · I (m, m)."""

    prototypes: Tensor
    gram: Tensor


@full_precision
def fit_batch(histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05) -> Fit:
    """Fit one batch, histograms (B, m) and embeddings (B, d), alone (eq. 2.8)."""
    return Fit(fit_prototypes(histograms, embeddings, ridge=ridge), _gram(histograms, ridge))


@full_precision
def weight(first: Fit, second: Fit, *, decay: float = 1.0) -> Tensor:
    """Weight W (m, m) of the first fit in V = V₁Wᵀ + V₂(I − W)ᵀ, the merge of two.

    W = (αR₁ + R₂)⁻¹ αR₁ = αR₂⁻¹ (R₁⁻¹ + αR₂⁻¹)⁻¹; with α = 1 this is the two-batch form.
    """
    return solve_positive(decay * first.gram + second.gram, decay * first.gram)


@full_precision
def merge(first: Fit, second: Fit, *, decay: float = 1.0) -> Fit:
    """Merge two fits into the fit to both batches, the first one's squared error counting `decay` times."""
    share = weight(first, second, decay=decay).T  # Wᵀ (m, m)
    prototypes = second.prototypes + (first.prototypes - second.prototypes) @ share  # (d, m)
    return Fit(prototypes, decay * first.gram + second.gram)


def start(count: int, dimension: int, *, ridge: float = 0.05, like: Tensor | None = None) -> Fit:
    """Begin the recursion before any batch: V₀ = 0 and R₀ = βI, of dtype and device of `like`."""
    like = torch.empty(0) if like is None else like
    return Fit(like.new_zeros(dimension, count), _gram(like.new_zeros(0, count), ridge))


@full_precision
def update(
    past: Fit, histograms: Tensor, embeddings: Tensor, *, decay: float = 0.99, ridge: float = 0.05
) -> Fit:
    """Take one more batch, histograms (B, m) and embeddings (B, d), into the recursion.

    After K batches from `start` the prototypes are V = argmin Σ_k α^(K−k) ‖VZ_k − Y_k‖² + β‖V‖², β the same
    at each step. The new R is αR_K + R with R = ZZᵀ + (1−α)βI. The right-hand side uses RV = ZYᵀ instead of a
    fit to the batch alone, which does not exist for α = 1.
    """
    total = decay * past.gram + _gram(histograms, (1 - decay) * ridge)  # αR_K + R
    moment = decay * past.gram @ past.prototypes.T + histograms.T @ embeddings  # αR_K Vᵀ + R V_newᵀ (m, d)
    return Fit(solve_positive(total, moment).T, total)


class Past(nn.Module):
    """ZZᵀ and ZYᵀ of each of C classes over all steps so far, times α for each step since; buffers."""

    def __init__(self, classes: int, prototypes: int, dimension: int, *, decay: float) -> None:
        super().__init__()
        size = 4 * classes * prototypes * (prototypes + dimension)
        if size > _MOST_BYTES:
            raise BadSetting(
                f"the sums of xml_prototypes recursion for {classes:,} classes, {prototypes} prototypes and"
                f" {dimension} dimensions would take {size / 2**30:.1f} GiB, and {_MOST_BYTES / 2**30:.0f}"
                " are the most: set prototypes or dimension lower, or xml_prototypes to batch"
            )
        self._decay = decay
        self._sums: Tensor
        self.register_buffer("_sums", torch.zeros(classes, prototypes, prototypes + dimension))

    @full_precision
    def without(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum ZZᵀ (m, m) and ZYᵀ (m, d) over all classes but those of `labels`, int64 (k,)."""
        # added up, for what is left of a difference of large sums would be rounding
        kept = self._sums.new_ones(len(self._sums)).index_fill(0, labels, 0)  # (C,)
        total = (kept @ self._sums.flatten(1)).view(self._sums.shape[1:])  # (m, m + d)
        return total[:, : len(total)], total[:, len(total) :]

    @torch.no_grad()
    @full_precision
    def push(self, histograms: Tensor, targets: Tensor, labels: Tensor) -> None:
        """Take in a batch, Zᵀ (B, m), Yᵀ (B, d) and labels (B,), and let all fade by α until the next."""
        kinds, members = torch.unique(labels, return_inverse=True)
        sorted_out = functional.one_hot(members, len(kinds)).T[:, :, None] * histograms  # (P, B, m)
        self._sums[kinds] += sorted_out.mT @ torch.cat((histograms, targets), dim=1)  # (P, m, m + d)
        self._sums *= self._decay


def _gram(histograms: Tensor, ridge: float) -> Tensor:
    identity = torch.eye(histograms.shape[1], dtype=histograms.dtype, device=histograms.device)
    return histograms.T @ histograms + ridge * identity
