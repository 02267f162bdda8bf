"""The memory against a plain list, over its end and over a save and a load."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.errors import BadSetting
from training.losses.loss import build_loss
from training.losses.memory import Memory

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


def test_it_starts_empty() -> None:
    embeddings, labels = Memory(D, 5).contents()
    assert (embeddings.shape, embeddings.dtype) == ((0, D), torch.float32)
    assert (labels.shape, labels.dtype) == ((0,), torch.int64)


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


def test_what_is_held_has_no_history() -> None:
    embeddings, labels = batch(3, 0)
    memory = Memory(D, 5)
    memory.push(embeddings.requires_grad_() * 2, labels)
    assert not memory.contents()[0].requires_grad
    assert list(memory.parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_embeddings_of_any_precision_are_held_in_float32(dtype: torch.dtype) -> None:
    embeddings, labels = batch(3, 0)
    memory = Memory(D, 5)
    memory.push(embeddings.to(dtype), labels)
    assert torch.equal(memory.contents()[0], embeddings.to(dtype).float())


@pytest.mark.parametrize("name", ["contrastive", "triplet", "multi_similarity"])
def test_a_push_may_come_before_the_backward_pass(name: str) -> None:
    memory = Memory(D, 4)
    memory.push(batch(4, 0)[0], torch.tensor([0, 1, 0, 1]))
    embeddings, labels = batch(4, 1)[0].requires_grad_(), torch.tensor([0, 0, 1, 1])
    value = build_loss(
        name, classes=2, dimension=D, **({"miner": "all"} if name == "triplet" else {})
    ).against(embeddings, labels, *memory.contents())
    memory.push(embeddings, labels)
    torch.autograd.backward(value)
    assert embeddings.grad is not None
    assert embeddings.grad.abs().sum() > 0


def test_a_memory_without_room_is_refused() -> None:
    with pytest.raises(BadSetting, match="a memory of 0 embeddings can hold none"):
        Memory(D, 0)
