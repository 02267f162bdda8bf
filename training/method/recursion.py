"""The recursion that fits prototypes to a stream of batches, one batch at a time.

A ridge fit to many batches is a weighted mean of fits to each, with matrices as weights. The paper's weights
hold two slips; the forms here are the right ones (`docs/method.md` derives them), and equal the direct fit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from serving.errors import BadSetting
from training.method.precision import full_precision
from training.method.prototypes import fit_prototypes, solve_positive

__all__ = ["Fit", "fit_batch", "merge", "start", "update", "weight"]


@dataclass(frozen=True, slots=True)
class Fit:
    """Prototypes fitted to the batches so far, and how firmly.

    Attributes:
        prototypes: V, float (d, m).
        gram: R = Z Zᵀ + ridge · I, float (m, m).
    """

    prototypes: Tensor
    gram: Tensor


@full_precision
def fit_batch(histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05) -> Fit:
    """Fit one batch: V of eq. 2.8 and R = Z Zᵀ + ridge · I.

    Returns:
        The fit to histograms (B, m) and embeddings (B, d) alone.

    Raises:
        BadSetting: When `ridge` is not above zero.
        ValueError: When the shapes do not fit.
    """
    prototypes = fit_prototypes(histograms, embeddings, ridge=ridge)
    return Fit(prototypes, _gram(histograms, ridge))


@full_precision
def weight(first: Fit, second: Fit, *, decay: float = 1.0) -> Tensor:
    """Weight of the first fit in the merge of two, W = (αR₁ + R₂)⁻¹ αR₁ = αR₂⁻¹ (R₁⁻¹ + αR₂⁻¹)⁻¹.

    With α = 1 this is the two-batch form R₂⁻¹ (R₁⁻¹ + R₂⁻¹)⁻¹.

    Returns:
        W, float (m, m), to be used as V = V₁Wᵀ + V₂(I − W)ᵀ.

    Raises:
        BadSetting: When `decay` is outside (0, 1].
    """
    _check_decay(decay)
    return solve_positive(decay * first.gram + second.gram, decay * first.gram)


@full_precision
def merge(first: Fit, second: Fit, *, decay: float = 1.0) -> Fit:
    """Merge two fits into the fit to both batches, the first one's squared error counting `decay` times.

    Returns:
        The fit with R = αR₁ + R₂ and V = V₁Wᵀ + V₂(I − W)ᵀ.

    Raises:
        BadSetting: When `decay` is outside (0, 1].
    """
    share = weight(first, second, decay=decay).T  # Wᵀ (m, m)
    prototypes = second.prototypes + (first.prototypes - second.prototypes) @ share  # (d, m)
    return Fit(prototypes, decay * first.gram + second.gram)


def start(count: int, dimension: int, *, ridge: float = 0.05, like: Tensor | None = None) -> Fit:
    """Begin the recursion before any batch: V₀ = 0 and R₀ = βI.

    Args:
        count: m, number of prototypes.
        dimension: d.
        ridge: β, the ridge that the recursion keeps however many batches it sees; above zero.
        like: Take dtype and device from this tensor; float32 on the CPU otherwise.

    Returns:
        A fit to no batch at all.

    Raises:
        BadSetting: When `ridge` is not above zero.
    """
    if not ridge > 0:
        raise BadSetting(f"ridge is {ridge}, but it must be above zero: the paper uses 0.05")
    like = torch.empty(()) if like is None else like
    identity = torch.eye(count, dtype=like.dtype, device=like.device)
    return Fit(like.new_zeros(dimension, count), ridge * identity)


@full_precision
def update(
    past: Fit, histograms: Tensor, embeddings: Tensor, *, decay: float = 0.99, ridge: float = 0.05
) -> Fit:
    """Take one more batch into the recursion.

    After K batches from `start` the prototypes are V = argmin Σ_k α^(K−k) ‖VZ_k − Y_k‖² + β‖V‖². The new R is
    αR_K + R with R = ZZᵀ + (1−α)βI. The right-hand side uses RV = ZYᵀ instead of a fit to the batch alone,
    which does not exist for α = 1.

    Args:
        past: The fit so far.
        histograms: Zᵀ of the new batch, float (B, m).
        embeddings: Yᵀ of the new batch, float (B, d).
        decay: α in (0, 1], how much an older batch counts from one step to the next.
        ridge: β, the same as at `start`.

    Returns:
        The fit with the new batch in it, same shapes.

    Raises:
        BadSetting: When `decay` is outside (0, 1].
    """
    _check_decay(decay)
    total = decay * past.gram + _gram(histograms, (1 - decay) * ridge)  # αR_K + R
    moment = decay * past.gram @ past.prototypes.T + histograms.T @ embeddings  # αR_K Vᵀ + R V_newᵀ (m, d)
    return Fit(solve_positive(total, moment).T, total)


def _gram(histograms: Tensor, ridge: float) -> Tensor:
    identity = torch.eye(histograms.shape[1], dtype=histograms.dtype, device=histograms.device)
    return histograms.T @ histograms + ridge * identity


def _check_decay(decay: float) -> None:
    if not 0 < decay <= 1:
        raise BadSetting(f"decay is {decay}, but it must be above 0 and at most 1")
