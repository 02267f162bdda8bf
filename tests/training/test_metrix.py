"""Metrix against its loop in float64: the draws, the mixtures, the loss, and the hook half way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import loss_oracles
from tests.training.small import seeded
from training.losses.metrix import Pairs, draw_pairs, mix, mixed_loss, mixing_at

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=10)


def embed(count: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, 4, generator=seeded(seed), dtype=torch.float64)


def drawn(labels: list[int], seed: int = 0) -> tuple[Tensor, Pairs]:
    names = torch.tensor(labels)
    pairs = draw_pairs(names, alpha=2.0, generator=seeded(seed))
    return names, pairs._replace(share=pairs.share.double())


def listed(pairs: Pairs) -> list[tuple[int, int, float]]:
    return list(zip(*(part.tolist() for part in pairs), strict=True))


@given(LABELS, st.integers(0, 999))
def test_each_image_meets_one_of_another_class(labels: list[int], seed: int) -> None:
    names = torch.tensor(labels)
    pairs = draw_pairs(names, alpha=2.0, generator=seeded(seed))
    assert pairs.first.tolist() == (list(range(len(labels))) if len(set(labels)) > 1 else [])
    assert (names[pairs.first] != names[pairs.second]).all()
    assert ((pairs.share >= 0) & (pairs.share <= 1)).all()
    assert [part.dtype for part in pairs] == [torch.int64, torch.int64, torch.float32]
    assert {len(part) for part in pairs} == {len(pairs.first)}


@pytest.mark.parametrize("shape", [(), (4,), (3, 5, 5)])
def test_a_mixture_is_its_rows_by_share(shape: tuple[int, ...]) -> None:
    values = torch.randn(6, *shape, generator=seeded(), dtype=torch.float64)
    _, pairs = drawn([0, 0, 1, 1, 2, 2])
    mixed = mix(values, pairs)
    for row, (first, second, share) in zip(mixed, listed(pairs), strict=True):
        torch.testing.assert_close(row, share * values[first] + (1 - share) * values[second])
    assert mix(values.bfloat16(), pairs).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"alpha": 18.0, "beta": 75.0, "base": 0.77}], ids=["usual", "paper"])
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2], [0, 1], [3, 3, 3], [2]], ids=str)
def test_the_loss_is_the_loop(labels: list[int], options: dict[str, float]) -> None:
    for seed in range(4):
        names, pairs = drawn(labels, seed)
        x = embed(len(labels), seed).requires_grad_()
        mixed = mix(embed(len(labels), seed + 50), pairs).requires_grad_()
        value = mixed_loss(x, names, mixed, pairs, **options)
        expected = loss_oracles.mixed_multi_similarity(
            x.detach().numpy(), names.numpy(), mixed.detach().numpy(), listed(pairs), **options
        )
        assert value.item() == pytest.approx(expected, abs=1e-10)
        for grad in torch.autograd.grad(value, (x, mixed)):
            assert grad.isfinite().all()
            assert grad.any() == (len(set(labels)) > 1)
        assert (value.item() > 0) == (len(set(labels)) > 1)


def test_a_module_puts_out_mixtures_while_mixing() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    x = embed(6)
    _, pairs = drawn([0, 0, 0, 0, 1, 1])
    few = Pairs(*(part[:4] for part in pairs))
    clean = network(x)
    with mixing_at(network[1], few):
        mixed = network(x)
    torch.testing.assert_close(mixed, network[2](mix(network[:2](x), few)))
    assert mixed.shape == (4, 2)
    assert torch.equal(network(x), clean)
