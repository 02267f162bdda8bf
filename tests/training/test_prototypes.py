"""The ridge fit of prototypes to a batch against their oracles."""

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import oracles
from tests.training.small import draw_batch
from training.method.prototypes import cross_reconstruct, fit_dual, fit_primal, fit_prototypes
from training.recipes.recipe import RidgeOn

SIZES = [(3, 8), (8, 3), (5, 5), (1, 4), (4, 1)]  # (B, m): m > B, B > m, equal, and one of each
WAYS: list[RidgeOn] = ["absolute", "trace"]


@pytest.mark.parametrize("fit", [fit_primal, fit_dual, fit_prototypes])
@pytest.mark.parametrize(("count", "prototypes"), SIZES)
@pytest.mark.parametrize("ridge_on", WAYS)
def test_both_forms_are_the_augmented_least_squares(
    fit: Callable[..., Tensor], count: int, prototypes: int, ridge_on: RidgeOn
) -> None:
    z, y = draw_batch(count, prototypes)
    # a ridge on the trace is a share of the mean eigenvalue, and so moves with the scale of Z
    penalty = 0.2 * (
        sum(float(value) ** 2 for value in z.flatten()) / prototypes if ridge_on == "trace" else 1
    )
    v = fit(z, y, ridge=0.2, ridge_on=ridge_on)
    np.testing.assert_allclose(v.numpy(), oracles.ridge(z.numpy(), y.numpy(), penalty), atol=1e-10)


@pytest.mark.parametrize(("count", "prototypes"), [(128, 64), (32, 128)])
def test_float32_is_accurate_at_the_sizes_of_training_by_the_smaller_system(
    count: int, prototypes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factorise = Mock(side_effect=torch.linalg.cholesky_ex)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", factorise)
    z, y = draw_batch(count, prototypes, dimension=64, dtype=torch.float32)
    v = fit_prototypes(z, y)
    assert v.dtype == torch.float32
    assert [len(call.args[0]) for call in factorise.call_args_list] == [min(count, prototypes)]
    expected = oracles.ridge(z.double().numpy(), y.double().numpy(), 0.05)
    np.testing.assert_allclose(v.numpy(), expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("count", "prototypes"), [(3, 8), (8, 3)])
def test_a_feature_that_is_not_a_number_shows_in_the_result(count: int, prototypes: int) -> None:
    z, y = draw_batch(count, prototypes)
    z[0, 0] = torch.nan
    assert fit_prototypes(z, y).isnan().all()


@pytest.mark.parametrize("ridge_on", WAYS)
@pytest.mark.parametrize(("count", "prototypes"), [(6, 12), (9, 3)])
def test_each_half_is_expressed_by_the_others_fit(count: int, prototypes: int, ridge_on: RidgeOn) -> None:
    z, y = draw_batch(count, prototypes)
    z[0] = torch.eye(prototypes, dtype=torch.float64)[0]  # so that the traces differ
    first = torch.arange(count) < count // 3
    found = cross_reconstruct(z, y, first, ridge=0.2, ridge_on=ridge_on)
    for mine in (first, ~first):
        fitted = fit_prototypes(z[~mine], y[~mine], ridge=0.2, ridge_on=ridge_on)
        torch.testing.assert_close(found[mine], z[mine] @ fitted.T)


@pytest.mark.parametrize("ridge_on", WAYS)
def test_the_gradient_runs_through_the_fits_and_the_trace(ridge_on: RidgeOn) -> None:
    first = torch.tensor([True, True, False, False, False])
    for fit in (fit_primal, fit_dual, lambda z, y, **more: cross_reconstruct(z, y, first, **more)):
        inputs = tuple(each.requires_grad_() for each in draw_batch(5, 3, dimension=2))
        assert torch.autograd.gradcheck(lambda z, y, fit=fit: fit(z, y, ridge=0.1, ridge_on=ridge_on), inputs)
