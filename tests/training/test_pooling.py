"""Pooling against naive loops in float64, at its limits, and its gradients."""

import math

import pytest
import torch
from torch import Tensor

from training.network.pooling import LEAST, build_pooling, generalised_mean, mean, mean_and_maximum


def _maps(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator)


def _channels(maps: Tensor) -> list[tuple[int, int, list[float]]]:
    """Each image, each channel, and what it has at all places."""
    return [(b, c, maps[b, c].flatten().tolist()) for b in range(len(maps)) for c in range(maps.shape[1])]


def test_mean_and_maximum_against_loops() -> None:
    maps = _maps()
    average, both = mean(maps), mean_and_maximum(maps)
    for b, c, values in _channels(maps):
        assert average[b, c].item() == pytest.approx(sum(values) / 20, abs=1e-12)
        assert both[b, c].item() == pytest.approx(sum(values) / 20 + max(values), abs=1e-12)


@pytest.mark.parametrize("exponent", [3.0, 1.0, 0.5, 6.5, -2.0])
def test_generalised_mean_against_a_loop(exponent: float) -> None:
    maps = _maps()
    found = generalised_mean(maps, exponent)
    for b, c, values in _channels(maps):
        powers = [max(value, LEAST) ** exponent for value in values]
        assert found[b, c].item() == pytest.approx((sum(powers) / 20) ** (1 / exponent), rel=1e-9)


def test_generalised_mean_goes_from_the_mean_to_the_maximum() -> None:
    maps = _maps().abs()
    torch.testing.assert_close(generalised_mean(maps, 1.0), mean(maps))
    torch.testing.assert_close(generalised_mean(maps, 5e3), maps.amax(dim=(2, 3)), rtol=1e-3, atol=0)


def test_generalised_mean_of_one_place_and_of_nothing_positive() -> None:
    one = torch.rand(2, 3, 1, 1) + 0.1
    torch.testing.assert_close(generalised_mean(one, 3.0), one[:, :, 0, 0])
    for dark in (torch.zeros(1, 2, 3, 3), -torch.ones(1, 2, 3, 3)):
        torch.testing.assert_close(generalised_mean(dark, 3.0), torch.full((1, 2), LEAST))


def test_generalised_mean_of_large_features_is_finite() -> None:
    maps = torch.tensor([1e30, 2e30]).view(1, 1, 1, 2)  # their cubes are not float32
    assert generalised_mean(maps, 3.0).item() == pytest.approx(1e30 * math.cbrt(4.5), rel=1e-5)
    assert generalised_mean(maps.to(torch.bfloat16), 3.0).dtype == torch.float32


def test_generalised_mean_learns_features_and_exponent() -> None:
    maps = _maps().abs().add(0.1).requires_grad_()
    exponent = torch.tensor([2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(generalised_mean, (maps, exponent))


def test_poolings_by_name() -> None:
    maps = _maps().float()
    assert torch.equal(build_pooling("gap")(maps), mean(maps))
    assert torch.equal(build_pooling("gap_gmp")(maps), mean_and_maximum(maps))
    pool = build_pooling("gem")
    torch.testing.assert_close(pool(maps).detach(), generalised_mean(maps, 3.0))
    assert {name: value.tolist() for name, value in pool.named_parameters()} == {"exponent": [3.0]}
    assert not [*build_pooling("gap").parameters(), *build_pooling("gap_gmp").parameters()]
