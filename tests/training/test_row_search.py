"""Which rows are copies, against a double loop: permutations, equal sums, zeros of both signs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.evaluation.row_search import find_copies

rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0]), min_size=width, max_size=width),
        max_size=30,
    ).map(lambda drawn: (width, drawn))
)


def _bits(vector: torch.Tensor) -> bytes:
    return vector.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None)
@given(drawn=rows)
def test_copies_are_the_double_loop(dtype: torch.dtype, drawn: tuple[int, list[list[float]]]) -> None:
    width, values = drawn
    _check(torch.tensor(values, dtype=dtype).view(-1, width))


def test_rows_of_one_sum_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randint(0, 3, (60, 2), generator=torch.Generator().manual_seed(1)).float()
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros(2, dtype=torch.int64))  # the weights
    _check(vectors)


def test_copies_of_a_permuted_row_are_found() -> None:
    copies, originals = find_copies(torch.tensor([[1.0, 0], [0, 1], [0, 1]]))
    assert (copies.tolist(), originals.tolist()) == ([2], [1])


def _check(vectors: torch.Tensor) -> None:
    expected = []
    for i in range(len(vectors)):
        first = next(j for j in range(len(vectors)) if _bits(vectors[j]) == _bits(vectors[i]))
        if first < i:
            expected.append((i, first))
    copies, originals = find_copies(vectors)
    assert list(zip(copies.tolist(), originals.tolist(), strict=True)) == expected
