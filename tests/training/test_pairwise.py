"""Losses on pairs against other embeddings, by their loops; the memory of such others."""

import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import loss_oracles
from training.losses.loss import LOSSES, build_loss
from training.losses.objective import Memory

LOOPS: dict[str, Callable[..., float]] = {
    "contrastive": loss_oracles.contrastive_against,
    "triplet": loss_oracles.triplet,
    "multi_similarity": loss_oracles.multi_similarity,
}
# Labels of a batch and of what it is compared with.
CASES = {
    "usual": ([0, 0, 1, 2, 2], [0, 1, 1, 2, 3, 3, 0]),
    "one pair of each kind": ([0], [0, 1]),
    "one positive pair": ([0], [0]),
    "one negative pair": ([0], [1]),
    "nothing to compare with": ([0, 1], []),
    "no class in common": ([0, 0, 1], [2, 3]),
}


def embed(count: int, seed: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", LOOPS)
def test_against_references_a_loss_is_its_loop(name: str, case: tuple[list[int], list[int]]) -> None:
    labels, reference_labels = (torch.tensor(names, dtype=torch.int64) for names in case)
    function = build_loss(name, classes=4, dimension=4)
    seen = 0.0
    for seed in range(8):
        x, references = embed(len(labels), seed).requires_grad_(), embed(len(reference_labels), 100 + seed)
        value = function.against(x, labels, references, reference_labels)
        expected = LOOPS[name](
            x.detach().numpy(), labels.numpy(), references.numpy(), reference_labels.numpy()
        )
        assert value.item() == pytest.approx(expected, abs=1e-10)
        torch.autograd.backward(value)
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert (x.grad.abs().sum() > 0) == (expected > 0)
        seen += expected
    assert seen > 0 or case != CASES["usual"]


@pytest.mark.parametrize("name", LOOPS)
def test_references_of_the_batchs_very_labels_are_others_all_the_same(name: str) -> None:
    x, labels = embed(5, 0), torch.tensor(CASES["usual"][0])
    options = {"epsilon": 3.0} if name == "multi_similarity" else {}  # its miner then takes every pair
    function = build_loss(name, classes=4, dimension=4, **options)
    for references in (embed(5, 1), x):
        value = function.against(x, labels, references, labels)
        torch.testing.assert_close(value, function.against(x, labels, references.clone(), labels.clone()))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_says_whether_it_compares_pairs(name: str) -> None:
    function = build_loss(name, classes=4, dimension=4)
    assert function.on_pairs == (name in LOOPS)


D = 3


def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=generator), torch.randint(2**40, (count,), generator=generator)


def held(memory: Memory) -> list[tuple[int, list[float]]]:
    embeddings, labels = memory.contents()
    return sorted(zip(labels.tolist(), embeddings.tolist(), strict=True))


@settings(max_examples=60)
@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=8))
def test_it_holds_the_newest(size: int, batches: list[int]) -> None:
    memory = Memory(D, size)
    everything: list[tuple[int, list[float]]] = []
    for seed, count in enumerate(batches):
        embeddings, labels = batch(count, seed)
        memory.push(embeddings, labels)
        everything += zip(labels.tolist(), embeddings.tolist(), strict=True)
        assert held(memory) == sorted(everything[-size:])
        assert int(memory.filled) == min(len(everything), size)
        assert int(memory.position) == len(everything) % size


@pytest.mark.parametrize("pushed", [(2,), (3, 3), (4, 4, 4), (11,)])
def test_a_checkpoint_restores_it_bit_by_bit(pushed: tuple[int, ...]) -> None:
    memory, restored = Memory(D, 5), Memory(D, 5)
    for seed, count in enumerate(pushed):
        memory.push(*batch(count, seed))
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for step in range(4):  # and it goes on alike
        state, other = memory.state_dict(), restored.state_dict()
        assert sorted(state) == ["embeddings", "filled", "labels", "position"]
        assert all(torch.equal(state[name], other[name]) for name in state)
        assert all(torch.equal(a, b) for a, b in zip(memory.contents(), restored.contents(), strict=True))
        memory.push(*batch(3, 50 + step))
        restored.push(*batch(3, 50 + step))
