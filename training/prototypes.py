"""Fitted prototypes: the ridge fit that rebuilds the embeddings of a batch from its histograms.

Letters: B images, d dimensions, m prototypes. Arrays hold one image a row, so that the paper's
Z (m, B) and Y (d, B) are `histograms.T` and `embeddings.T` here.
"""

import torch
from torch import Tensor

from serving.errors import BadSetting
from training.precision import full_precision

__all__ = ["cross_reconstruct", "fit_dual", "fit_primal", "fit_prototypes", "solve_positive"]


def fit_prototypes(histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05) -> Tensor:
    """Fit prototypes to a batch, V = argmin ‖VZ − Y‖² + ϵ‖V‖² (eq. 2.8), by the smaller of the two systems.

    Args:
        histograms: Zᵀ, float (B, m).
        embeddings: Yᵀ, float (B, d).
        ridge: ϵ, above zero.

    Returns:
        Prototypes V as columns, float32 (float64 for float64 input) (d, m); differentiable in both arrays.

    Raises:
        BadSetting: When `ridge` is not above zero.
        ValueError: When the shapes do not fit.
    """
    count, prototypes = histograms.shape
    fit = fit_primal if prototypes <= count else fit_dual
    return fit(histograms, embeddings, ridge=ridge)


@full_precision
def fit_primal(histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05) -> Tensor:
    """Fit prototypes by the m×m system, V = Y Zᵀ (Z Zᵀ + ϵI)⁻¹ (eq. 2.8).

    Returns:
        Prototypes V as columns, float (d, m).

    Raises:
        BadSetting: When `ridge` is not above zero.
        ValueError: When the shapes do not fit.
    """
    _check(histograms, embeddings, ridge)
    gram = histograms.T @ histograms  # Z Zᵀ (m, m)
    return solve_positive(_add_ridge(gram, ridge), histograms.T @ embeddings).T  # (m, d) -> (d, m)


@full_precision
def fit_dual(histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05) -> Tensor:
    """Fit prototypes by the B×B system, V = Y (ZᵀZ + ϵI)⁻¹ Zᵀ (eq. 2.8).

    Returns:
        Prototypes V as columns, float (d, m).

    Raises:
        BadSetting: When `ridge` is not above zero.
        ValueError: When the shapes do not fit.
    """
    _check(histograms, embeddings, ridge)
    gram = histograms @ histograms.T  # Zᵀ Z (B, B)
    return solve_positive(_add_ridge(gram, ridge), embeddings).T @ histograms  # (d, B) x (B, m) -> (d, m)


@full_precision
def cross_reconstruct(
    histograms: Tensor, embeddings: Tensor, first: Tensor, *, ridge: float = 0.05
) -> Tensor:
    """Express each half of a batch by prototypes fitted to the other, Ŷ₁ = V₂Z₁ and Ŷ₂ = V₁Z₂ (eq. 2.10).

    Both halves are fitted by the dual form in one B×B system, which falls apart into theirs: with S_ij = 1
    where i and j are of one half, Ŷ = Y (ZᵀZ ∘ S + ϵI)⁻¹ (ZᵀZ ∘ (1 − S)).

    Args:
        histograms: Zᵀ, float (B, m).
        embeddings: Yᵀ, float (B, d).
        first: Which images are of the first half, bool (B,).
        ridge: ϵ of both fits, above zero.

    Returns:
        Ŷᵀ, float (B, d), in the order of the batch.

    Raises:
        BadSetting: When `ridge` is not above zero.
        ValueError: When the shapes do not fit.
    """
    _check(histograms, embeddings, ridge)
    gram = histograms @ histograms.T  # Zᵀ Z (B, B)
    same = first[:, None] == first  # S
    weights = solve_positive(_add_ridge(gram * same, ridge), embeddings)  # (ZᵀZ ∘ S + ϵI)⁻¹ Yᵀ (B, d)
    return gram.masked_fill(same, 0) @ weights


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve a symmetric positive definite system by Cholesky.

    A matrix that is not positive definite (a feature is NaN, say) gives NaN everywhere: the training loop
    sees that in the loss, and nothing waits for the GPU here. MPS lacks this solver until torch 2.12 or so:
    there the system, which is small, is solved on the CPU.

    Args:
        matrix: Symmetric, float (k, k).
        right: Right-hand sides, float (k, c).

    Returns:
        The solution, float (k, c).
    """
    device = matrix.device
    if device.type == "mps":
        matrix, right = matrix.cpu(), right.cpu()
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor = torch.where(info == 0, factor, torch.nan)
    return torch.cholesky_solve(right, factor).to(device)


def _add_ridge(gram: Tensor, ridge: float) -> Tensor:
    return gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def _check(histograms: Tensor, embeddings: Tensor, ridge: float) -> None:
    if not ridge > 0:
        raise BadSetting(f"ridge is {ridge}, but it must be above zero: the paper uses 0.05")
    if histograms.ndim != 2 or embeddings.ndim != 2 or len(histograms) != len(embeddings):
        raise ValueError(
            f"histograms (B, m) and embeddings (B, d) must share B, but their shapes are"
            f" {tuple(histograms.shape)} and {tuple(embeddings.shape)}"
        )
