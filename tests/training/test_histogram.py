"""The histogram operator, Definition 1 and the starts of a codebook against their loops; Lemma 1."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from tests import oracles
from tests.training.small import seeded
from training.method import histogram as module
from training.method.histogram import Metric, assign, covering_radius, exact_histogram, histogram
from training.recipes.recipe import AssignOn, Recipe

WAYS: list[AssignOn] = ["unit", "raw", "ball"]
METRICS: list[Metric] = ["euclidean", "inner", "cosine"]
BLOBS = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])


def locations_and_codebook() -> tuple[Tensor, Tensor]:
    generator = seeded(1)
    locations = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    return locations, 2 * torch.randn(6, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("assign_on", WAYS)
@pytest.mark.parametrize("scale", [0.5, 10.0])
def test_histogram_is_the_double_loop(assign_on: AssignOn, scale: float) -> None:
    locations, codebook = locations_and_codebook()
    operator = partial(histogram, assignment_scale=scale, assign_on=assign_on)
    z = operator(locations, codebook)
    expected = oracles.histogram(locations.numpy(), codebook.numpy(), scale, assign_on)
    np.testing.assert_allclose(z.numpy(), expected, atol=1e-12)
    assert z.dtype == torch.float64
    assert torch.autograd.gradcheck(operator, (locations.requires_grad_(), codebook.requires_grad_()))


def test_half_precision_is_widened_to_shares_that_sum_to_one() -> None:
    locations, codebook = (10 * each.bfloat16() for each in locations_and_codebook())
    z = histogram(locations, codebook, assign_on="raw")
    assert z.dtype == torch.float32
    assert (z >= 0).all()
    torch.testing.assert_close(z.sum(dim=1), torch.ones(3))


NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)


def error(locations: Tensor, prototypes: Tensor, metric: Metric) -> Tensor:
    """‖Σ z_i ν_i − y‖ of each image, (B,)."""
    z = exact_histogram(locations, prototypes, metric=metric)
    return (z @ prototypes - locations.mean(dim=1)).square().sum(dim=1).sqrt()


@pytest.mark.parametrize("metric", METRICS)
def test_assignment_is_the_loop(metric: Metric) -> None:
    generator = seeded()
    locations = torch.randn(4, 7, 3, generator=generator, dtype=torch.float64)
    prototypes = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    found = assign(locations, prototypes, metric=metric)
    assert found.dtype == torch.int64
    for image, numbers in zip(locations, found, strict=True):
        assert numbers.tolist() == oracles.assign(image.numpy(), prototypes.numpy(), metric).tolist()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_lemma_1_holds_for_the_nearest_prototype(data: st.DataObject) -> None:
    n, m, d = (data.draw(st.integers(1, 5)) for _ in range(3))
    locations = torch.from_numpy(data.draw(arrays(np.float64, (2, n, d), elements=NUMBERS)))
    prototypes = torch.from_numpy(data.draw(arrays(np.float64, (m, d), elements=NUMBERS)))
    radius = covering_radius(locations, prototypes)
    assert (error(locations, prototypes, "euclidean") <= radius + 1e-9).all()


def test_lemma_1_fails_for_the_inner_product_where_norms_differ() -> None:
    """Correction 4: the long prototype wins every location, however near the other one is."""
    prototypes = torch.tensor([[1.0, 0.0], [10.0, 1.0]], dtype=torch.float64)
    locations = torch.tensor([[[1.0, 0.0], [1.1, 0.0]]], dtype=torch.float64)
    radius = covering_radius(locations, prototypes)
    assert radius.item() == pytest.approx(0.1)
    assert (error(locations, prototypes, "euclidean") <= radius).all()
    assert error(locations, prototypes, "inner").item() > 50 * radius.item()


def test_the_square_of_the_error_is_bounded_by_the_square_of_the_radius_alone() -> None:
    """The paper's proof bounds it by the radius itself."""
    location, prototypes = torch.zeros(1, 1, 1), torch.tensor([[2.0]])
    radius = covering_radius(location, prototypes)
    error = (exact_histogram(location, prototypes) @ prototypes).norm()
    assert error**2 > radius
    assert error <= radius


def _start(locations: Tensor, count: int, form: str, assign_on: str) -> Tensor:
    chosen = {"prototypes": count, "codebook_init": form, "assign_on": assign_on}
    return module.start_codebook(locations, Recipe.model_validate(chosen))


def test_k_centre_takes_the_farthest_again_and_again() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0], [0.0, 5.0]])
    found = _start(points[None], 4, "k_centre", "raw")
    start = found[0].tolist()
    rest = sorted(points.tolist(), key=lambda point: math.dist(point, start))
    assert (found[1].tolist(), sorted(found.tolist())) == (rest[-1], sorted(points.tolist()))


def test_k_means_finds_the_blobs() -> None:
    generator = seeded()
    points = BLOBS.repeat(50, 1) + 0.1 * torch.randn(150, 2, generator=generator)
    found = _start(points[None], 3, "k_means", "raw")
    assert float(torch.cdist(BLOBS, found).amin(dim=1).max()) < 0.1


@pytest.mark.parametrize("form", ["k_means", "k_centre"])
def test_features_are_taken_as_the_histogram_sees_them(form: str) -> None:
    locations = torch.randn(3, 5, 4, generator=seeded(1)) * 4
    unit = _start(locations, 15, form, "unit")
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(15))
    ball = _start(locations, 15, form, "ball")
    assert float(ball.norm(dim=1).max()) <= 1 + 1e-5
    raw = _start(locations, 15, form, "raw")
    assert float(torch.cdist(raw, locations.flatten(0, 1)).amin(dim=1).max()) < 1e-3


@pytest.mark.parametrize("form", ["k_means", "k_centre"])
def test_fewer_features_than_prototypes_repeat(form: str) -> None:
    found = _start(torch.randn(1, 2, 3), 5, form, "raw")
    assert (found.shape, len({tuple(row) for row in found.tolist()})) == ((5, 3), 2)
