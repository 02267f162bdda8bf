"""The searches by torch against the loop: uneven tiles, panels and chunks, ties and copies."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from training.evaluation import tensor_search
from training.evaluation.metrics import find_originals, retrieval_metrics
from training.evaluation.tensor_search import PairSearch, RowSearch


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_search, "_ROWS", 128)
        patch.setattr(tensor_search, "_COLUMNS", 192)
        yield


def unit(vectors: oracles.Floats, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(vectors).to(dtype), dim=1)


def check(search: PairSearch | RowSearch, vectors: torch.Tensor, depth: int) -> None:
    found = search.nearest(torch.arange(len(vectors)), depth)
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), oracles.neighbours(vectors.double().numpy(), depth))


@pytest.mark.parametrize(("count", "depth"), [(2, 1), (64, 3), (65, 64), (200, 1), (450, 5)])
def test_neighbours_are_the_loop(count: int, depth: int) -> None:
    vectors = unit(np.random.default_rng(count).normal(size=(count, 5)))
    check(PairSearch(vectors, depth=depth), vectors, depth)
    check(RowSearch(vectors), vectors, depth)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 300), st.integers(1, 90), st.integers(1, 20))
def test_equal_vectors_tie_and_rank_by_index(seed: int, count: int, places: int, depth: int) -> None:
    """From all images in one place to nearly every one in its own."""
    rng = np.random.default_rng(seed)
    vectors, depth = unit(rng.normal(size=(places, 4))[rng.integers(0, places, count)]), min(depth, count - 1)
    check(PairSearch(vectors, depth=depth), vectors, depth)


def test_copies_tie_exactly_whatever_their_product_rounds_to(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def rounding_by_position(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        product(a, b, out=out)
        return out.add_(1e-6 * (torch.arange(b.shape[1]) % 5))

    monkeypatch.setattr(torch, "mm", rounding_by_position)
    rng = np.random.default_rng(3)
    vectors = unit(rng.normal(size=(7, 129))[rng.integers(0, 7, 333)], torch.float32)
    check(PairSearch(vectors, depth=5), vectors, 5)


def test_few_neighbours_in_a_large_gallery() -> None:
    """Where the largest of each chunk are looked at first; every third reference is there twice."""
    rng = np.random.default_rng(6)
    gallery = unit(rng.normal(size=(1300, 4)))
    gallery[0:1299:3] = gallery[1:1299:3]
    queries = unit(rng.normal(size=(40, 4)))
    found = RowSearch(queries, gallery).nearest(torch.arange(40), 3)
    expected = np.argsort(-(queries @ gallery.T).numpy(), axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(found.numpy(), expected)


def test_equal_similarities_of_unequal_vectors_rank_by_index() -> None:
    """Right angles: every similarity is -1, 0 or 1, and most ranks are shared."""
    corners = np.concatenate((np.eye(80), -np.eye(80)))
    vectors = unit(corners[np.random.default_rng(0).permutation(160)])
    check(PairSearch(vectors, depth=7), vectors, 7)
    check(RowSearch(vectors), vectors, 7)


def test_each_pair_is_multiplied_once_for_few_neighbours() -> None:
    vectors = np.random.default_rng(2).normal(size=(1500, 4))

    def areas(classes: int) -> list[int]:
        with patch.object(torch, "mm", side_effect=torch.mm) as product:
            retrieval_metrics(vectors, np.arange(1500) % classes, at=(1,))
        return [len(call.args[0]) * call.args[1].shape[1] for call in product.call_args_list]

    assert max(areas(700)) <= 128 * 192
    assert 0.5 * 1500**2 < sum(areas(700)) < 0.55 * 1500**2
    assert sum(areas(50)) == 1500**2


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, 0.5]), min_size=2, max_size=2), max_size=30))
def test_originals_are_the_double_loop(drawn: list[list[float]]) -> None:
    vectors = np.array(drawn).reshape(-1, 2)
    bits = [vector.tobytes() for vector in vectors]
    assert find_originals(vectors).tolist() == [bits.index(own) for own in bits]
