"""A search of one state: index, fresh part, filter, labels and deletions against a loop over all items."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.index.builder import IndexBuilder
from serving.gallery.index.index import EXACT, Index, IndexMetadata
from serving.gallery.search import segment as segment_module
from serving.gallery.search.columns import Columns
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range
from serving.gallery.search.segment import GrowingSegment, SealedSegment
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.store.transaction import Block, State
from tests.serving.vectors import created, units

D = 8
COUNT, NEWER = 600, 80
TYPES = [EXACT, "HNSW8", "HNSW8,SQ8,RFlat", "PQ4x4fs,RFlat", "IVF8,PQ4x4fs,RFlat"]


# A third of the vectors come again and again, so that there are ties within and across the two parts.
VECTORS = np.concatenate([units(400, D), np.tile(units(7, D, seed=1), (40, 1))])
VECTORS = VECTORS[np.random.default_rng(2).permutation(len(VECTORS))]
LABELS = [["", "a", "b", "c", f"only {i}"][i % 5] for i in range(len(VECTORS))]
METADATA = [{"n": i, "tag": [f"t{i % 3}", f"u{i % 50}"], "even": i % 2 == 0} for i in range(len(VECTORS))]
SEQS = np.arange(len(VECTORS)) * 2 + 1
TEXTS = [json.dumps(metadata) for metadata in METADATA]


@cache
def published(type_: str) -> SealedSegment:
    """Return the first `COUNT` items as an index of a type, and their columns."""
    with TemporaryDirectory() as folder:
        draft = IndexBuilder(D, threads=1)
        draft.add(SEQS[:COUNT], VECTORS[:COUNT])
        draft.become(type_)
        checksum = draft.save(Path(folder) / "index")
        index = Index(Path(folder) / "index", checksum=checksum, dimension=D, facts=IndexMetadata(type=type_))
        columns = Columns.of(LABELS[:COUNT], TEXTS[:COUNT])
        columns = Columns.load(Path(folder) / "columns", columns.save(Path(folder) / "columns"))
        return SealedSegment.of(index, columns)


def snapshot_of(type_: str | None, dead: NDArray[np.bool_]) -> Snapshot:
    """Return a state with these items deleted; without a type all are in the fresh part."""
    sealed = published(type_) if type_ else SealedSegment.empty(D)
    count = len(sealed.dead)
    state = State(1, 1, "", "", count, 0, 0, "{}", "exact", 1.0, "", "", 0, 0)
    blocks = [
        Block(SEQS[part], VECTORS[part], LABELS[part], TEXTS[part])
        for part in (slice(count, count + 30), slice(count + 30, count + 31), slice(count + 31, None))
    ]
    growing = GrowingSegment.empty(D, sealed.columns.texts)
    for block in blocks:
        growing = growing.advanced([block], SEQS[dead], Path("gallery"))
    return Snapshot(state, 1, replace(sealed, dead=dead[:count]), growing)


EVERY = Columns.of(LABELS, TEXTS)  # tested against a loop of its own


def groups(places: list[int]) -> list[str | int]:
    return [LABELS[at] or at for at in places]


def loop(
    query: NDArray[np.float32], k: int, allowed: list[int], least: float = -1.0, by_label: bool = False
) -> list[tuple[int, float]]:
    """Return all that may be among the k best, by the definition: best first, ties by seq."""
    scores = (VECTORS * query.astype(np.float64)).sum(axis=1).astype(np.float32).tolist()
    order = sorted((at for at in allowed if scores[at] >= least), key=lambda at: -scores[at])
    counted = [scores[at] for at in order]
    if by_label:
        best: dict[str | int, float] = {}
        for at, group in zip(order, groups(order), strict=True):
            best.setdefault(group, scores[at])
        order = [at for at, group in zip(order, groups(order), strict=True) if scores[at] == best[group]]
        counted = sorted(best.values(), reverse=True)
    if len(counted) > k:
        order = [at for at in order if scores[at] >= counted[k - 1]]
    return sorted(((int(SEQS[at]), scores[at]) for at in order), key=by_score)


def by_score(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]


FILTERS = st.none() | st.sampled_from(
    [
        Equal("tag", "u7"),
        Equal("even", True),
        Range("n", least=590, below=605),
        Not(Range("n", above=5)),
        AnyOf((Equal("$label", "a"), Equal("$label", "only 44"), Equal("n", 3))),
        AllOf((Equal("tag", "t1"), Not(Equal("even", False)))),
        AnyOf(()),
        In("n", tuple(range(0, 680, 9))),
        Exists("$label"),
    ]
)
DEAD = st.tuples(st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]), st.integers(0, 5)).map(
    lambda drawn: np.random.default_rng(drawn[1]).random(len(VECTORS)) < drawn[0]
)


WAYS = {"by cost": (8, 4, 2), "fetched": (1, 10**9, 0), "one by one": (10**9, 0, 0)}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the ways to an answer, whichever would be the cheaper one for so few items."""
    for name, value in zip(("_LARGE", "_GATHERED", "_VISITED"), WAYS[request.param], strict=True):
        monkeypatch.setattr(segment_module, name, value)
    return str(request.param)


@pytest.mark.parametrize("type_", [None, *TYPES])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dead=DEAD,
    filter=FILTERS,
    k=st.sampled_from([1, 3, 10, 90, 2048]),
    least=st.sampled_from([-np.inf, 0.3, 0.9]),
    by_label=st.booleans(),
    excluded=st.lists(st.integers(0, len(VECTORS) - 1), max_size=4, unique=True),
    queries=st.lists(st.integers(0, len(VECTORS) - 1), min_size=1, max_size=3),
)
def test_search_is_what_a_loop_finds(
    way: str,
    type_: str | None,
    dead: NDArray[np.bool_],
    filter: Filter | None,
    k: int,
    least: float,
    by_label: bool,
    excluded: list[int],
    queries: list[int],
) -> None:
    snapshot = snapshot_of(type_, dead)
    held = EVERY.mask(filter or AllOf(())) & ~dead
    held[excluded] = False
    allowed = np.flatnonzero(held).tolist()
    asked: dict[str, Any] = {"minimum_score": least, "filter": filter, "by_label": by_label}
    found = snapshot.search(VECTORS[queries], k, excluded=SEQS[excluded].tolist(), **asked)
    assert len(found) == len(queries)
    for query, hits in zip(VECTORS[queries], found, strict=True):
        expected = loop(query, k, allowed, least, by_label)
        assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
        if type_ in (None, EXACT) or way == "one by one":
            assert sorted(hits, key=by_score) == expected
            continue
        every = dict(loop(query, len(VECTORS), allowed))
        assert all(every[seq] == score >= least for seq, score in hits)  # exact scores, of allowed items
        assert len({seq for seq, _ in hits}) == len(hits)
        if least == -np.inf:  # or else what it takes for the k best may be below
            places = [int(seq) // 2 for seq, _ in hits]
            wanted = min(k, len(set(groups(allowed))) if by_label else len(allowed))
            assert len(set(groups(places)) if by_label else places) >= wanted


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("far", [False, True])
def test_k_is_filled_though_the_500_nearest_are_deleted(type_: str, far: bool) -> None:
    order = np.argsort(-(VECTORS[:COUNT] @ VECTORS[0]))
    dead = np.zeros(len(VECTORS), np.bool_)
    dead[order[:500]] = True
    dead[COUNT:] = far
    (hits,) = snapshot_of(type_, dead).search(VECTORS[:1], 10, minimum_score=-np.inf)
    assert hits[:10] == loop(VECTORS[0], 10, np.flatnonzero(~dead).tolist())[:10]


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    with closing(created(tmp_path / "shop", D)) as made:
        yield made


def items(start: int, end: int) -> list[GalleryItem]:
    return [GalleryItem(f"k{i:03}", VECTORS[i], LABELS[i], metadata=METADATA[i]) for i in range(start, end)]


def test_a_filter_outlives_the_last_item_that_has_its_field(gallery: Gallery) -> None:
    gallery.upsert([*items(0, 9), GalleryItem("sale", VECTORS[9], metadata={"on_sale": True})])
    gallery.rebuild()
    ((hit,),) = gallery.search(VECTORS[:1], 3, filter=Equal("on_sale", True))
    assert hit.key == "sale"
    gallery.delete(["sale"])
    for _ in ("deleted", "and forgotten"):
        for nothing in (Equal("on_sale", True), Exists("on_sale")):
            assert gallery.search(VECTORS[:1], 3, filter=nothing) == [[]]
        assert len(gallery.search(VECTORS[:1], 10, filter=Not(Exists("on_sale")))[0]) == 9
        gallery.rebuild()
    assert {each.name: each.kinds for each in gallery.fields()} == {
        "$label": ("string",), "even": ("boolean",), "n": ("number",), "tag": ("string",)
    }  # fmt: skip


def test_one_query_is_scored_with_fresh_items_by_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, asked = units(40), list[int]()

    def noted(query: Any, matrix: Any, positions: Any) -> Any:
        asked.append(len(positions))
        return matrix[positions] @ query

    monkeypatch.setattr(segment_module, "inner_products", noted)
    none = np.zeros(40, np.bool_)
    growing = replace(
        GrowingSegment.empty(rows.shape[1], SealedSegment.empty(rows.shape[1]).columns.texts),
        vectors=rows, seqs=np.arange(40), dead=none, labels=np.full(40, -1),
    )  # fmt: skip
    np.testing.assert_allclose(growing.scores(rows[:1], none), rows[:1] @ rows.T, rtol=1e-6)
    assert asked == [40]
