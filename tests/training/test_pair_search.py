"""The search in pairs against the loop: uneven tiles, panels and chunks, ties and copies."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from training.evaluation import pair_search
from training.evaluation.metrics import retrieval_metrics
from training.evaluation.pair_search import PairSearch
from training.evaluation.row_search import RowSearch
from training.evaluation.tensor_search import _open


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_search, "_ROWS", 128)
    monkeypatch.setattr(pair_search, "_COLUMNS", 192)


def unit(vectors: oracles.Floats, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(vectors).to(dtype), dim=1)


def check(vectors: torch.Tensor, depth: int) -> None:
    found = PairSearch(vectors, depth=depth).nearest(torch.arange(len(vectors)), depth)
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), oracles.neighbours(vectors.double().numpy(), depth))


@pytest.mark.parametrize(("count", "depth"), [(2, 1), (64, 3), (65, 64), (200, 1), (450, 5), (700, 13)])
def test_neighbours_are_the_loop(count: int, depth: int) -> None:
    check(unit(np.random.default_rng(count).normal(size=(count, 5))), depth)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 300), st.integers(1, 90), st.integers(1, 20))
def test_equal_vectors_tie_and_rank_by_index(seed: int, count: int, places: int, depth: int) -> None:
    """From all images in one place, so that there is no other group, to nearly every one in its own."""
    rng = np.random.default_rng(seed)
    vectors = unit(rng.normal(size=(places, 4))[rng.integers(0, places, count)])
    check(vectors, min(depth, count - 1))


def test_copies_tie_exactly_whatever_their_product_rounds_to(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def rounding_by_position(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        product(a, b, out=out)
        return out.add_(1e-6 * (torch.arange(b.shape[1]) % 5))

    monkeypatch.setattr(torch, "mm", rounding_by_position)
    rng = np.random.default_rng(3)
    check(unit(rng.normal(size=(7, 129))[rng.integers(0, 7, 333)], torch.float32), 5)


def test_equal_similarities_of_unequal_vectors_rank_by_index() -> None:
    """Right angles: every similarity is -1, 0 or 1, and most ranks are shared."""
    corners = np.concatenate((np.eye(80), -np.eye(80)))
    check(unit(corners[np.random.default_rng(0).permutation(160)]), 7)


def test_members_of_equally_near_groups_rank_by_index() -> None:
    """Copies of five corners in any order: those of one group do not stand together."""
    check(unit(np.eye(5)[np.random.default_rng(4).integers(0, 5, 150)]), 60)


def test_references_that_get_ever_nearer_are_all_taken() -> None:
    """On a line of falling angles each image is better than all before it."""
    angle = np.cumsum(np.linspace(1e-2, 1e-3, 300))
    check(unit(np.stack((np.cos(angle), np.sin(angle)), axis=1)), 4)


def test_float32_agrees_with_the_search_by_rows() -> None:
    vectors = unit(np.random.default_rng(1).normal(size=(900, 16)), torch.float32)
    rows = torch.tensor([899, 0, 5, 5, 300])
    assert torch.equal(PairSearch(vectors, depth=9).nearest(rows, 4), RowSearch(vectors).nearest(rows, 4))


def test_few_neighbours_of_a_set_in_itself_are_searched_in_pairs() -> None:
    vectors = np.random.default_rng(0).normal(size=(640, 4))
    assert isinstance(_open(vectors, None, 10), PairSearch)
    assert isinstance(_open(vectors, None, 11), RowSearch)
    assert isinstance(_open(vectors, vectors, 10), RowSearch)


def test_each_pair_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    product, areas = torch.mm, []

    def count(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        areas.append(len(a) * b.shape[1])
        return product(a, b, out=out)

    monkeypatch.setattr(torch, "mm", count)
    vectors = np.random.default_rng(2).normal(size=(1500, 4))
    retrieval_metrics(vectors, np.arange(1500) % 700, at=(1,))
    assert max(areas) <= 128 * 192
    assert 0.5 * 1500**2 < sum(areas) < 0.55 * 1500**2
