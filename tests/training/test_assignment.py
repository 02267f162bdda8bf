"""Definition 1 against its loop, and Lemma 1 as a property that needs the nearest prototype."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from serving.errors import BadSetting
from tests import oracles
from training.method.assignment import Metric, assign, covering_radius, exact_histogram

METRICS: list[Metric] = ["euclidean", "inner", "cosine"]
NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)


def error(locations: Tensor, prototypes: Tensor, metric: Metric) -> Tensor:
    """‖Σ z_i ν_i − y‖ of each image, (B,)."""
    z = exact_histogram(locations, prototypes, metric=metric)
    return (z @ prototypes - locations.mean(dim=1)).square().sum(dim=1).sqrt()


@pytest.mark.parametrize("metric", METRICS)
def test_assignment_is_the_loop(metric: Metric) -> None:
    generator = torch.Generator().manual_seed(0)
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


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_the_metrics_agree_for_prototypes_of_one_norm(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    locations = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    prototypes = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    prototypes = 3 * prototypes / prototypes.norm(dim=1, keepdim=True)
    nearest = assign(locations, prototypes, metric="euclidean")
    assert torch.equal(nearest, assign(locations, prototypes, metric="inner"))
    assert torch.equal(nearest, assign(locations, prototypes, metric="cosine"))


@pytest.mark.parametrize("metric", METRICS)
def test_equals_go_to_the_lowest_number(metric: Metric) -> None:
    prototypes = torch.ones(3, 2)
    assert assign(torch.ones(1, 4, 2), prototypes, metric=metric).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("metric", METRICS)
def test_histograms_count_the_locations(metric: Metric) -> None:
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    locations = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [0.1, 4.0], [5.0, 0.0]]])
    z = exact_histogram(locations, prototypes, metric=metric)
    assert z.tolist() == [[0.5, 0.5, 0.0]]
    assert z.dtype == torch.float32


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(BadSetting, match="euclidean, inner, cosine"):
        assign(torch.ones(1, 1, 2), torch.ones(1, 2), metric="manhattan")  # type: ignore[arg-type]


def test_the_square_of_the_error_is_bounded_by_the_square_of_the_radius_alone() -> None:
    """The paper's proof bounds it by the radius itself."""
    location, prototypes = torch.zeros(1, 1, 1), torch.tensor([[2.0]])
    radius = covering_radius(location, prototypes)
    error = (exact_histogram(location, prototypes) @ prototypes).norm()
    assert error**2 > radius
    assert error <= radius
