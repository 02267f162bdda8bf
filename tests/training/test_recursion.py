"""The recursion and the sums by class against direct fits to all batches; the printed weights fail."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import oracles
from tests.training.small import draw_batch
from training.method.recursion import Fit, Past, fit_batch, merge, start, update, weight

M, D = 6, 4


def stream() -> list[tuple[Tensor, Tensor]]:
    """Batches of unequal sizes, some smaller than m and some larger."""
    return [draw_batch(size, M, D, seed=size) for size in (3, 9, 6, 4, 12)]


def direct(batches: list[tuple[Tensor, Tensor]], decay: float, ridge: float) -> oracles.Floats:
    """argmin Σ_k α^(K−k) ‖VZ_k − Y_k‖² + β‖V‖², by one `lstsq` over all batches."""
    last = len(batches) - 1
    weighted = [(decay ** (last - k), z.numpy(), y.numpy()) for k, (z, y) in enumerate(batches)]
    return oracles.weighted_ridge(weighted, ridge)


def combine(first: Fit, second: Fit, w: Tensor) -> Tensor:
    """V = V₁Wᵀ + V₂(I − W)ᵀ."""
    return first.prototypes @ w.T + second.prototypes @ (torch.eye(M, dtype=w.dtype) - w).T


@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("ridge", [0.05, 1.0])
def test_the_recursion_is_the_direct_solution_after_every_batch(decay: float, ridge: float) -> None:
    fit = start(M, D, ridge=ridge, like=stream()[0][0])
    for k, (z, y) in enumerate(stream()):
        fit = update(fit, z, y, decay=decay, ridge=ridge)
        np.testing.assert_allclose(fit.prototypes, direct(stream()[: k + 1], decay, ridge), atol=1e-10)


def test_two_batches_merge_into_the_direct_solution() -> None:
    (z1, y1), (z2, y2) = stream()[:2]
    merged = merge(fit_batch(z1, y1, ridge=0.05), fit_batch(z2, y2, ridge=0.05))
    np.testing.assert_allclose(merged.prototypes, direct(stream()[:2], 1, 0.1), atol=1e-10)
    torch.testing.assert_close(merged.gram, z1.T @ z1 + z2.T @ z2 + 0.1 * torch.eye(M, dtype=z1.dtype))


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_the_weight_has_both_forms_of_the_method(decay: float) -> None:
    first, second = (fit_batch(z, y) for z, y in stream()[:2])
    r1, r2 = torch.linalg.inv(first.gram), torch.linalg.inv(second.gram)
    w = weight(first, second, decay=decay)
    torch.testing.assert_close(w, decay * r2 @ torch.linalg.inv(r1 + decay * r2))
    torch.testing.assert_close(combine(first, second, w), merge(first, second, decay=decay).prototypes)


def test_the_printed_two_batch_weight_is_not_the_direct_solution() -> None:
    """Correction 2: R₁⁻² stands where R₂⁻¹ belongs, whichever of its two places is meant."""
    first, second = (fit_batch(z, y) for z, y in stream()[:2])
    r1, r2 = torch.linalg.inv(first.gram), torch.linalg.inv(second.gram)
    inverse = torch.linalg.inv
    exact = merge(first, second).prototypes
    torch.testing.assert_close(combine(first, second, r2 @ inverse(r1 + r2)), exact)
    for printed in (r1 @ r1 @ inverse(r1 + r2), r2 @ inverse(r1 + r1 @ r1), r1 @ r1 @ inverse(r1 + r1 @ r1)):
        assert (combine(first, second, printed) - exact).abs().max() > 0.05


def test_the_printed_recursive_weight_is_not_the_direct_solution() -> None:
    """Correction 1: without α in front the weight is not that of any weighting of the batches' errors."""
    decay, ridge = 0.6, 0.05
    past = update(start(M, D, ridge=ridge, like=stream()[0][0]), *stream()[0], decay=decay, ridge=ridge)
    new = fit_batch(*stream()[1], ridge=(1 - decay) * ridge)
    exact = direct(stream()[:2], decay, ridge)
    r_past, r_new = torch.linalg.inv(past.gram), torch.linalg.inv(new.gram)
    printed = r_new @ torch.linalg.inv(r_past + decay * r_new)
    np.testing.assert_allclose(combine(past, new, decay * printed), exact, atol=1e-9)
    assert np.abs(combine(past, new, printed).numpy() - exact).max() > 0.05


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=4),
    st.sets(st.integers(0, 4)),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_the_sums_leave_out_own_classes(steps: list[list[int]], own: set[int], decay: float) -> None:
    past, draw = Past(5, 3, 2, decay=decay), np.random.default_rng(0)
    gram, moment = np.zeros((3, 3)), np.zeros((3, 2))
    for labels in steps:
        z, y = draw.random((len(labels), 3)), draw.standard_normal((len(labels), 2))
        past.push(torch.tensor(z).float(), torch.tensor(y).float(), torch.tensor(labels))
        for i, label in enumerate(labels):
            if label not in own:
                gram += np.outer(z[i], z[i])
                moment += np.outer(z[i], y[i])
        gram, moment = decay * gram, decay * moment
    found = past.without(torch.tensor(sorted(own), dtype=torch.int64))
    np.testing.assert_allclose(found[0].numpy(), gram, atol=1e-5)
    np.testing.assert_allclose(found[1].numpy(), moment, atol=1e-5)
