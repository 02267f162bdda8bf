"""Fitted prototypes: the ridge fit that rebuilds the embeddings of a batch from its histograms.

Letters: B images, d dimensions, m prototypes. Arrays hold one image a row, so that the paper's
Z (m, B) and Y (d, B) are `histograms.T` and `embeddings.T` here. The ridge ϵ is above zero; with `ridge_on`
`trace` it is relative to the mean eigenvalue, trace(ZZᵀ)/m, through which gradients run too.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from training.recipes.recipe import RidgeOn

__all__ = [
    "cross_reconstruct", "fit_dual", "fit_moments", "fit_primal", "fit_prototypes",
    "full_precision", "scaled_ridge", "solve_positive",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` outside autocast, with its half-precision tensor arguments widened to float32.

    Solves and losses lose their meaning in 8 bits of mantissa. float64 stays float64.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in ("cpu", "cuda", "mps"):
                # Entered only where autocast is on: the exporter would otherwise record a region for nothing.
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*map(_widen, args), **{name: _widen(each) for name, each in kwargs.items()})

    return wrapper


def _widen(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def fit_prototypes(
    histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05, ridge_on: RidgeOn = "absolute"
) -> Tensor:
    """Fit prototypes to a batch, V = argmin ‖VZ − Y‖² + ϵ‖V‖² (eq. 2.8), by the smaller of the two systems.

    Histograms Zᵀ (B, m) and embeddings Yᵀ (B, d) give V as columns, (d, m), at least float32.
    """
    images, prototypes = histograms.shape
    fit = fit_primal if prototypes <= images else fit_dual
    return fit(histograms, embeddings, ridge=ridge, ridge_on=ridge_on)


@full_precision
def fit_primal(
    histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05, ridge_on: RidgeOn = "absolute"
) -> Tensor:
    """Fit prototypes by the m×m system, V = Y Zᵀ (Z Zᵀ + ϵI)⁻¹ (eq. 2.8), as columns (d, m)."""
    gram = histograms.T @ histograms  # Z Zᵀ (m, m)
    return fit_moments(gram, histograms.T @ embeddings, ridge=ridge, ridge_on=ridge_on)


def fit_moments(gram: Tensor, moment: Tensor, *, ridge: float, ridge_on: RidgeOn) -> Tensor:
    """Fit prototypes (d, m) to the sums that stand for images, Z Zᵀ (m, m) and Z Yᵀ (m, d) (eq. 2.8)."""
    scale = scaled_ridge(ridge, ridge_on, gram.trace(), len(gram))
    return solve_positive(_add_ridge(gram, scale), moment).T  # (m, d) -> (d, m)


@full_precision
def fit_dual(
    histograms: Tensor, embeddings: Tensor, *, ridge: float = 0.05, ridge_on: RidgeOn = "absolute"
) -> Tensor:
    """Fit prototypes by the B×B system, V = Y (ZᵀZ + ϵI)⁻¹ Zᵀ (eq. 2.8), as columns (d, m)."""
    gram = histograms @ histograms.T  # Zᵀ Z (B, B), of the same trace as Z Zᵀ
    scale = scaled_ridge(ridge, ridge_on, gram.trace(), histograms.shape[1])
    return solve_positive(_add_ridge(gram, scale), embeddings).T @ histograms  # (d, B) x (B, m) -> (d, m)


@full_precision
def cross_reconstruct(
    histograms: Tensor, embeddings: Tensor, first: Tensor, *, ridge: float, ridge_on: RidgeOn = "absolute"
) -> Tensor:
    """Express each half of a batch by prototypes fitted to the other, Ŷ₁ = V₂Z₁ and Ŷ₂ = V₁Z₂ (eq. 2.10).

    Both are fitted by the dual form in one B×B system, with S_ij = 1 where i and j are of one half:
    Ŷ = Y (ZᵀZ ∘ S + ϵI)⁻¹ (ZᵀZ ∘ (1 − S)). `first` (B,) tells the first half. Gives Ŷᵀ, float (B, d).
    """
    gram = histograms @ histograms.T  # Zᵀ Z (B, B)
    same = first[:, None] == first  # S
    traces = same.to(gram.dtype) @ gram.diagonal()  # (B,), of each image's own half
    scale = scaled_ridge(ridge, ridge_on, traces, histograms.shape[1])
    weights = solve_positive(_add_ridge(gram * same, scale), embeddings)  # (ZᵀZ ∘ S + ϵI)⁻¹ Yᵀ (B, d)
    return gram.masked_fill(same, 0) @ weights


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve a symmetric positive definite system (k, k) for right-hand sides (k, c) by Cholesky.

    A matrix that is not positive definite gives NaN, which the training loop sees in the loss: nothing waits
    for the GPU here. MPS lacks this solver until torch 2.12 or so: there the CPU solves.
    """
    device = matrix.device
    if device.type == "mps":
        matrix, right = matrix.cpu(), right.cpu()
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor = torch.where(info == 0, factor, torch.nan)
    return torch.cholesky_solve(right, factor).to(device)


def scaled_ridge(ridge: float, ridge_on: RidgeOn, trace: Tensor, prototypes: int) -> Tensor:
    """Give ϵ as it is, or times trace(ZZᵀ)/m, in the shape of `trace`."""
    return trace * (ridge / prototypes) if ridge_on == "trace" else torch.full_like(trace, ridge)


def _add_ridge(gram: Tensor, ridge: Tensor) -> Tensor:
    return gram + torch.diag(ridge.expand(len(gram)))
