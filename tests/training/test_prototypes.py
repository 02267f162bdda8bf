"""The ridge fit of prototypes to a batch against their oracles."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.errors import BadSetting
from tests import oracles
from training.method.prototypes import RidgeOn, cross_reconstruct, fit_dual, fit_primal, fit_prototypes

Fit = Callable[..., Tensor]

SIZES = [(3, 8), (8, 3), (5, 5), (1, 4), (4, 1)]  # (B, m): m > B, B > m, equal, and one of each


def batch(
    count: int, prototypes: int, dimension: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count * 31 + prototypes)
    scores = 3 * torch.randn(count, prototypes, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    return scores.softmax(dim=1).to(dtype), embeddings.to(dtype)


@pytest.mark.parametrize("fit", [fit_primal, fit_dual, fit_prototypes])
@pytest.mark.parametrize(("count", "prototypes"), SIZES)
@pytest.mark.parametrize("ridge", [0.05, 1e-3])
def test_both_forms_are_the_augmented_least_squares(
    fit: Fit, count: int, prototypes: int, ridge: float
) -> None:
    z, y = batch(count, prototypes)
    v = fit(z, y, ridge=ridge)
    assert v.shape == (4, prototypes)
    np.testing.assert_allclose(v.numpy(), oracles.ridge(z.numpy(), y.numpy(), ridge), atol=1e-10)


@pytest.mark.parametrize(("count", "prototypes"), [(128, 64), (32, 128)])
def test_float32_is_accurate_at_the_sizes_of_training(count: int, prototypes: int) -> None:
    z, y = batch(count, prototypes, dimension=64, dtype=torch.float32)
    v = fit_prototypes(z, y)
    assert v.dtype == torch.float32
    expected = oracles.ridge(z.double().numpy(), y.double().numpy(), 0.05)
    np.testing.assert_allclose(v.numpy(), expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("count", "prototypes", "solved"), [(3, 8, 3), (8, 3, 3), (5, 5, 5)])
def test_the_smaller_system_is_solved(
    count: int, prototypes: int, solved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    factorise = torch.linalg.cholesky_ex

    def spy(matrix: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(matrix))
        factor, info = factorise(matrix)
        return factor, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", spy)
    fit_prototypes(*batch(count, prototypes))
    assert sizes == [solved]


@pytest.mark.parametrize(("count", "prototypes"), SIZES)
def test_gradient_of_the_fit(count: int, prototypes: int) -> None:
    z, y = (t.requires_grad_() for t in batch(count, prototypes, dimension=2))
    assert torch.autograd.gradcheck(lambda a, b: fit_prototypes(a, b), (z, y))


@pytest.mark.parametrize(("count", "prototypes"), [(3, 8), (8, 3)])
def test_a_feature_that_is_not_a_number_shows_in_the_result(count: int, prototypes: int) -> None:
    z, y = batch(count, prototypes)
    z[0, 0] = torch.nan
    assert fit_prototypes(z, y).isnan().all()


@pytest.mark.parametrize("ridge", [0.0, -1.0, float("nan")])
def test_a_ridge_that_is_not_above_zero_is_refused(ridge: float) -> None:
    with pytest.raises(BadSetting, match="above zero"):
        fit_prototypes(*batch(3, 2), ridge=ridge)


def test_rows_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(4, 5\)"):
        fit_prototypes(torch.zeros(3, 2), torch.zeros(4, 5))


@pytest.mark.parametrize("fit", [fit_primal, fit_dual, fit_prototypes])
@pytest.mark.parametrize(("count", "prototypes"), SIZES)
def test_a_ridge_on_the_trace_is_a_share_of_the_mean_eigenvalue(
    fit: Fit, count: int, prototypes: int
) -> None:
    z, y = batch(count, prototypes)
    penalty = 0.2 * sum(float(value) ** 2 for value in z.flatten()) / prototypes
    v = fit(z, y, ridge=0.2, ridge_on="trace")
    np.testing.assert_allclose(v.numpy(), oracles.ridge(z.numpy(), y.numpy(), penalty), atol=1e-10)
    torch.testing.assert_close(fit(7 * z, y, ridge=0.2, ridge_on="trace"), v / 7)


@pytest.mark.parametrize("ridge_on", ["absolute", "trace"])
@pytest.mark.parametrize(("count", "prototypes"), [(6, 12), (9, 3)])
def test_each_half_is_expressed_by_the_others_fit(count: int, prototypes: int, ridge_on: RidgeOn) -> None:
    z, y = batch(count, prototypes)
    z[0] = torch.eye(prototypes, dtype=torch.float64)[0]  # so that the traces differ
    first = torch.arange(count) < count // 3
    found = cross_reconstruct(z, y, first, ridge=0.2, ridge_on=ridge_on)
    for mine in (first, ~first):
        fitted = fit_prototypes(z[~mine], y[~mine], ridge=0.2, ridge_on=ridge_on)
        torch.testing.assert_close(found[mine], z[mine] @ fitted.T)


def test_the_gradient_runs_through_the_trace() -> None:
    z, y = (t.requires_grad_() for t in batch(5, 3, dimension=2))
    first = torch.tensor([True, True, False, False, False])
    assert torch.autograd.gradcheck(lambda a, b: fit_prototypes(a, b, ridge_on="trace"), (z, y))
    assert torch.autograd.gradcheck(lambda a, b: cross_reconstruct(a, b, first, ridge_on="trace"), (z, y))
