"""The histogram operator against its double loop, and its degenerate cases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.errors import BadSetting
from tests import oracles
from training.method.histogram import histogram
from training.recipes.recipe import AssignOn

WAYS: list[AssignOn] = ["unit", "raw", "ball"]


def locations_and_codebook() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    locations = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    return locations, 2 * torch.randn(6, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("assign_on", WAYS)
@pytest.mark.parametrize("scale", [0.5, 10.0])
def test_histogram_is_the_double_loop(assign_on: AssignOn, scale: float) -> None:
    locations, codebook = locations_and_codebook()
    z = histogram(locations, codebook, assignment_scale=scale, assign_on=assign_on)
    expected = oracles.histogram(locations.numpy(), codebook.numpy(), scale, assign_on)
    np.testing.assert_allclose(z.numpy(), expected, atol=1e-12)
    assert z.dtype == torch.float64


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_histogram_rows_are_shares(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    locations = (10 * torch.randn(2, 3, 4, generator=generator)).to(dtype)
    z = histogram(locations, torch.randn(5, 4, generator=generator).to(dtype), assign_on="raw")
    assert z.dtype == torch.float32
    assert (z >= 0).all()
    torch.testing.assert_close(z.sum(dim=1), torch.ones(2))


def test_histogram_of_black_and_one_prototype() -> None:
    black = histogram(torch.zeros(1, 2, 4, requires_grad=True), torch.randn(3, 4))
    torch.testing.assert_close(black, torch.full((1, 3), 1 / 3))
    torch.autograd.backward(black.sum())
    torch.testing.assert_close(histogram(torch.randn(2, 3, 4), torch.randn(1, 4)), torch.ones(2, 1))


def test_histogram_names_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 4\) and \(3, 5\)"):
        histogram(torch.zeros(1, 2, 4), torch.zeros(3, 5))


def test_the_histogram_leaves_autocast() -> None:
    locations, codebook = (t.bfloat16() for t in locations_and_codebook())
    expected = histogram(locations.float(), codebook.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(histogram(locations, codebook), expected)


@pytest.mark.parametrize("assign_on", WAYS)
def test_gradient_of_the_histogram(assign_on: AssignOn) -> None:
    torch.manual_seed(0)
    locations = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    codebook = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, nu: histogram(x, nu, assignment_scale=3.0, assign_on=assign_on), (locations, codebook)
    )


def test_black_locations_have_a_gradient_of_numbers() -> None:
    locations = torch.zeros(2, 3, 4, requires_grad=True)
    histogram(locations, torch.randn(5, 4))[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert locations.grad is not None
    assert torch.isfinite(locations.grad).all()


def test_an_unknown_way_to_assign_is_named() -> None:
    with pytest.raises(BadSetting, match="assign_on is 'cosine', but it must be one of unit, raw, ball"):
        histogram(torch.zeros(1, 2, 4), torch.zeros(3, 4), assign_on="cosine")  # type: ignore[arg-type]
