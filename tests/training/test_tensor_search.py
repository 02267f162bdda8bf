"""The searches by torch against the loop: uneven tiles, panels and chunks, ties and copies."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
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


@pytest.fixture(params=[True, False], ids=["bfloat16", "no bfloat16"])
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU that is said to have bfloat16, or not; sets of any size are worth it where it has."""
    monkeypatch.setattr(tensor_search, "_has_bfloat16", lambda: request.param)
    monkeypatch.setattr(tensor_search, "_WORTH", 0)
    return bool(request.param)


def check(search: PairSearch | RowSearch, vectors: torch.Tensor, depth: int) -> None:
    found = search.nearest(torch.arange(len(vectors)), depth)
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), oracles.neighbours(vectors.double().numpy(), depth))


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(("count", "depth"), [(2, 1), (64, 3), (65, 64), (200, 1), (450, 5)])
def test_neighbours_are_the_loop(count: int, depth: int) -> None:
    vectors = unit(np.random.default_rng(count).normal(size=(count, 5)))
    check(PairSearch(vectors, depth=depth), vectors, depth)
    check(RowSearch(vectors), vectors, depth)


@pytest.mark.usefixtures("bfloat16")
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(2, 300), st.integers(1, 90), st.integers(1, 20))
def test_equal_vectors_tie_and_rank_by_index(seed: int, count: int, places: int, depth: int) -> None:
    """From all images in one place to nearly every one in its own."""
    rng = np.random.default_rng(seed)
    vectors, depth = unit(rng.normal(size=(places, 4))[rng.integers(0, places, count)]), min(depth, count - 1)
    check(PairSearch(vectors, depth=depth), vectors, depth)


@pytest.mark.usefixtures("bfloat16")
def test_copies_tie_exactly_whatever_their_product_rounds_to(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def rounding_by_position(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        product(a, b, out=out)
        return out.add_(1e-6 * (torch.arange(b.shape[1]) % 5))

    monkeypatch.setattr(torch, "mm", rounding_by_position)
    rng = np.random.default_rng(3)
    vectors = unit(rng.normal(size=(7, 129))[rng.integers(0, 7, 333)], torch.float32)
    check(PairSearch(vectors, depth=5), vectors, 5)


@pytest.mark.parametrize(("kept", "floor"), [(3, -2), (6, -2), (40, -2), (40, 0.99), (40, 1.1)])
@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 0.01), (torch.float64, 1e-3)])
@pytest.mark.usefixtures("bfloat16")
def test_neighbours_nearer_together_than_bfloat16_tells(
    kept: int, floor: float, dtype: torch.dtype, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten images close about each of 40 places, however short their lists, or empty."""
    monkeypatch.setattr(tensor_search, "_shortlist", lambda *given: (kept, floor))
    rng = np.random.default_rng(kept)
    places = rng.normal(size=(40, 24))[rng.integers(0, 40, 400)]
    vectors = unit(places + spread * rng.normal(size=places.shape), dtype)
    for some in (vectors, vectors[torch.from_numpy(rng.integers(0, 400, 300))]):
        found = PairSearch(some, depth=3).nearest(torch.arange(len(some)), 3)
        expected = torch.from_numpy(oracles.neighbours(some.double().numpy(), 3))
        cosines = some.double() @ some.double().T
        within = max(4 * torch.finfo(dtype).eps, 2e-9)  # of the products, and of the loop
        assert torch.allclose(cosines.gather(1, found), cosines.gather(1, expected), rtol=0, atol=within)


@pytest.mark.usefixtures("bfloat16")
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(3, 300), st.integers(1, 20), st.floats(1e-4, 1))
def test_a_shortlist_finds_what_the_loop_finds(seed: int, count: int, depth: int, spread: float) -> None:
    """Classes of any width, of one image too."""
    rng, depth = np.random.default_rng(seed), min(depth, count - 1)
    names = rng.integers(0, 1 + count // 3, count)
    vectors = unit(rng.normal(size=(count, 8))[names] + spread * rng.normal(size=(count, 8)))
    check(PairSearch(vectors, depth=depth), vectors, depth)
    found = retrieval_metrics(vectors, names, at=(1, 2)) if len(set(names)) < count else None
    if found:
        expected = oracles.map_at_r(vectors.numpy(), names)
        assert found.map_at_r == pytest.approx(expected, abs=1e-9)


def test_a_product_is_never_off_by_more_than_its_bound() -> None:
    """Of vectors whose parts lie half way between two of bfloat16, which is the worst."""
    rng = np.random.default_rng(4)
    parts = rng.choice([1 + 2**-8, -1 - 2**-8, 2 + 2**-7, 0.25 + 2**-10], size=(300, 96))
    vectors = unit(parts, torch.float32)
    for some in (vectors, unit(rng.normal(size=(300, 96)), torch.float32)):
        rough = (some.bfloat16() @ some.bfloat16().T).double()
        exact, slack = some.double() @ some.double().T, tensor_search._slack(some).double()
        assert (exact <= tensor_search._most(rough, slack[:, None])).all()
        assert (-exact <= tensor_search._most(-rough, slack[:, None])).all()
        assert (slack < 0.01).all()


def test_only_few_images_of_a_shortlist_are_searched_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_search, "_has_bfloat16", lambda: True)
    monkeypatch.setattr(tensor_search, "_WORTH", 8)
    vectors = unit(np.random.default_rng(5).normal(size=(3000, 64)), torch.float32)
    search = PairSearch(vectors, depth=3)
    with patch.object(torch, "mm", side_effect=torch.mm) as product:
        search.nearest(torch.arange(3000), 3)
    assert sum(len(call.args[0]) for call in product.call_args_list) < 100


def test_a_set_too_close_for_bfloat16_is_searched_without() -> None:
    rng = np.random.default_rng(6)
    vectors = unit(rng.normal(size=64) + 1e-3 * rng.normal(size=(1500, 64)), torch.float32)
    with (
        patch.object(tensor_search, "_has_bfloat16", lambda: True),
        patch.object(torch, "mm", side_effect=torch.mm) as product,
    ):
        PairSearch(vectors, depth=1)
    assert {call.args[0].dtype for call in product.call_args_list} == {torch.float32}


def test_few_neighbours_in_a_large_gallery() -> None:
    """Where the largest of each chunk are looked at first; every third reference is there twice."""
    rng = np.random.default_rng(6)
    gallery = unit(rng.normal(size=(1300, 4)))
    gallery[0:1299:3] = gallery[1:1299:3]
    queries = unit(rng.normal(size=(40, 4)))
    found = RowSearch(queries, gallery).nearest(torch.arange(40), 3)
    expected = np.argsort(-(queries @ gallery.T).numpy(), axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.usefixtures("bfloat16")
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
