"""The index: which types it can have, which is chosen, and that this reaches the recall that is wanted."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.errors import InvalidArgument
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.index import choice as module
from serving.gallery.index.builder import GivenUp, IndexBuilder
from serving.gallery.index.choice import (
    INDEX_TYPES,
    GroundTruth,
    build_index,
    check_type,
    full_type,
    is_small,
    measured,
    tuned,
)
from serving.gallery.index.index import IndexDamaged, IndexMetadata, Trial
from serving.gallery.search.filter import Equal, In, Not, Range
from tests.serving.vectors import clustered, created, normalized, units

Built = tuple[IndexBuilder, IndexMetadata]


def built(rows: NDArray[np.float32], wanted: str = "auto", recall: float = 0.95) -> Built:
    builder = IndexBuilder.of(rows, threads=1)
    return builder, build_index(builder, wanted=wanted, wanted_recall=recall, advance=lambda *_: None)


def true_recall(builder: IndexBuilder, rows: NDArray[np.float32], queries: NDArray[np.float32]) -> float:
    """The share of the ten nearest that an index finds, counted one by one."""
    found = 0
    for query in queries:
        best = set(np.argsort(-(rows @ query))[:10].tolist())
        _, positions = builder.search(query[None], 26)
        found += len(best & set(positions[0, :10].tolist()))
    return found / (10 * len(queries))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few vectors be many."""
    monkeypatch.setattr("serving.gallery.index.choice._SMALL", 1 << 15)
    monkeypatch.setattr("serving.gallery.index.choice._SAMPLE", 1500)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("kind", "dim", "codes"), [(clustered, 32, 16), (clustered, 7, 7), (units, 24, 12)])
def test_automatic_choice_reaches_the_recall(
    kind: Callable[[int, int], NDArray[np.float32]], dim: int, codes: int
) -> None:
    everything = kind(4200, dim)
    rows, queries = everything[:4000], everything[4000:]
    builder, facts = built(rows)
    assert facts.recall >= 0.95
    assert true_recall(builder, rows, queries) >= 0.93
    assert (facts.wanted, facts.count, facts.queries, facts.wanted_recall) == ("auto", 4000, 500, 0.95)
    assert facts.latency_ms > 0
    assert [each.type for each in facts.trials] == ["exact", f"PQ{codes}x4fs,RFlat", "HNSW16,SQ8,RFlat"]
    assert np.array_equal(builder.matrix, rows)


@pytest.mark.usefixtures("eager")
def test_type_that_misses_the_recall_on_the_whole_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    types = ["PQ2x4,RFlat", "PQ16x4fs,RFlat", "exact"]
    monkeypatch.setattr(module, "_tried", lambda *_, **__: (types, []))
    monkeypatch.setattr(module, "_FACTORS", (1,))
    rows = units(1000, 32)
    assert built(rows, recall=1.0)[1].type == "exact"
    assert built(rows, recall=0.8)[1].type == "PQ16x4fs,RFlat"


def test_few_vectors_stay_exact() -> None:
    for count in (1, 2, 11, 300):
        _, facts = built(clustered(count, 16))
        assert (facts.type, facts.recall, facts.parameters, facts.trials) == ("exact", 1.0, {}, ())
    assert is_small(65_000, 1)
    assert is_small(8000, 512)
    assert not is_small(9000, 512)
    assert not is_small(70_000, 1)


def test_given_type_is_built_as_given_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    _, facts = built(clustered(2000, 16), "IVF32,PQ8x4fs")
    assert (facts.type, facts.wanted, facts.note) == ("IVF32,PQ8x4fs,RFlat", "IVF32,PQ8x4fs", "")
    assert facts.parameters.keys() == {"nprobe", "k_factor_rf"}
    assert facts.recall >= 0.95
    monkeypatch.setattr(module, "_FACTORS", (1, 2))
    _, weak = built(units(2000, 64), "PCA2,Flat", recall=0.99)
    assert weak.type == "PCA2,Flat,RFlat"
    assert weak.recall < 0.99


@pytest.mark.parametrize(
    ("wanted", "note"),
    [("IVF256,Flat", "cannot be trained on 100 vectors"), ("IVF8,RQ2x4", "cannot be the type of")],
)
def test_type_that_cannot_be_built_is_exact(wanted: str, note: str) -> None:
    """Few vectors, which may become more; or a type that an earlier version of ours took."""
    _, facts = built(clustered(100, 16), wanted)
    assert (facts.type, facts.wanted, facts.recall) == ("exact", wanted, 1.0)
    assert note in facts.note


def test_queries_lie_beside_vectors_along_the_line_of_two_neighbours() -> None:
    rows = units(40, 8)
    builder = IndexBuilder.of(rows, threads=1)
    truth = GroundTruth.of(builder)
    assert truth.queries.shape == (40, 8)  # one beside each, in their order
    for row, query in zip(rows, truth.queries, strict=True):
        near = np.argsort(-(rows @ row))[1:11]
        reach = np.linalg.norm(rows[near[-1]] - row)
        lines = [rows[first] - rows[second] for first in near for second in near if first != second]
        shifted = [row + 0.6 * reach * line / np.linalg.norm(line) for line in lines]
        cosines = [each @ query / np.linalg.norm(each) for each in shifted]
        assert max(cosines) > 1 - 1e-5
    assert np.allclose(truth.least, np.sort(truth.queries @ rows.T, axis=1)[:, -10], atol=2e-5)
    assert measured(builder, truth, {}) == 1.0


def test_a_graph_is_not_asked_only_for_what_it_was_made_of() -> None:
    everything = units(3200, 24)
    rows, queries = everything[:3000], everything[3000:]
    builder = IndexBuilder.of(rows, threads=1)
    builder.become("HNSW16,SQ8,RFlat")
    told = measured(builder, GroundTruth.of(builder), {"efSearch": 16, "k_factor_rf": 2})
    assert told < true_recall(builder, rows, rows[:200]) - 0.02
    assert told < true_recall(builder, rows, queries) + 0.1


def test_pca_of_all_dimensions_keeps_inner_products() -> None:
    rows = normalized(units(2000, 16) + 2 * np.eye(16)[0])  # far from all having a mean of zero
    builder = IndexBuilder.of(rows, threads=1)
    builder.become("PCA16,Flat,RFlat")
    scores, _ = builder.index.base_index.search(rows[:20], 30)
    assert np.allclose(scores, -np.sort(-(rows[:20] @ rows.T), axis=1)[:, :30], atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_fewer_dimensions_are_tried_and_taken_where_they_hold_what_tells_vectors_apart() -> None:
    random = np.random.default_rng(0)
    basis, noise = random.standard_normal((12, 256)) / 16, random.standard_normal((2200, 256)) / 16
    rows = normalized(clustered(2200, 12) @ basis + 0.05 * noise)
    builder, facts = built(rows[:2000], "PCA64,HNSW32,SQ8,RFlat")
    assert min(facts.recall, true_recall(builder, rows[:2000], rows[2000:])) >= 0.94
    _, facts = built(units(2000, 256))
    assert "PCA64,HNSW32,SQ8,RFlat" in [each.type for each in facts.trials]
    assert not facts.type.startswith("PCA")  # what is alike in all directions is not compressed


def test_cheapest_parameters_that_reach_are_taken() -> None:
    builder = IndexBuilder.of(clustered(3000, 16), threads=1)
    builder.become("IVF64,PQ8x4fs,RFlat")
    truth = GroundTruth.of(builder)
    low, high = (tuned(builder, truth, IndexMetadata(wanted_recall=recall)) for recall in (0.6, 0.99))
    assert low.parameters["nprobe"] < high.parameters["nprobe"]
    assert low.recall < 0.99 <= high.recall
    assert measured(builder, truth, low.parameters) == low.recall


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("last", ["try", "train", "add", "measure"])
def test_work_ends_wherever_it_is_told_to(last: str) -> None:
    def advance(stage: str, *_: int) -> None:
        if stage == last:
            raise GivenUp

    builder = IndexBuilder.of(clustered(2000, 8), threads=1)
    wanted = "auto" if last == "try" else "PQ4x4fs"
    with pytest.raises(GivenUp):
        build_index(builder, wanted=wanted, wanted_recall=0.9, advance=advance)


DIMENSION, CLUSTERS, EACH = 64, 120, 30


def drawn(centres: NDArray[np.float64], seed: int) -> NDArray[np.float32]:
    """Vectors close about centres, of which the next ones are far away: the hard case beyond EACH."""
    return normalized(centres + 0.25 * np.random.default_rng(seed).standard_normal(centres.shape))


CENTRES = np.random.default_rng(0).standard_normal((CLUSTERS, DIMENSION))
VECTORS = drawn(np.repeat(CENTRES, EACH, axis=0), 1)
QUERIES = drawn(CENTRES[:40], 2)


@pytest.fixture(scope="module", params=["HNSW16,SQ8,RFlat", "IVF32,PQ16x4fs,RFlat"])
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    path = tmp_path_factory.mktemp("galleries") / "a"
    with closing(created(path, DIMENSION, index=request.param, recall=0.95)) as gallery:
        gallery.upsert(
            GalleryItem(f"{i}", row, f"{i // EACH}", metadata={"half": i % 2, "class": i // EACH})
            for i, row in enumerate(VECTORS)
        )
        gallery.rebuild()
        yield gallery


def share(found: list[list[int]], scores: NDArray[np.float32], k: int) -> float:
    """Return which part of the k largest scores (Q, n) was found."""
    nearest = np.argsort(-scores, axis=1)[:, :k].tolist()
    return float(np.mean([len({*a} & {*b}) / k for a, b in zip(found, nearest, strict=True)]))


@pytest.mark.parametrize("k", [10, 30, 60, 100])
@pytest.mark.parametrize("half", [False, True])
def test_as_many_are_found_of_more(gallery: Gallery, k: int, half: bool) -> None:
    scores = QUERIES @ VECTORS.T
    if half:
        scores[:, 1::2] = -2
    found = gallery.search(QUERIES, k, filter=Equal("half", 0) if half else None)
    assert share([[int(hit.key) for hit in hits] for hits in found], scores, k) > 0.93


@pytest.mark.parametrize("type_", ["HNSW16,SQ8,RFlat", "PCA24,HNSW16,SQ8,RFlat", "HNSW16,Flat"])
def test_as_many_are_found_of_those_that_pass_a_filter(
    memory: Path, monkeypatch: pytest.MonkeyPatch, type_: str
) -> None:
    monkeypatch.setattr("serving.gallery.search.segment._VISITED", 0)  # however few: not one by one
    monkeypatch.setattr("serving.gallery.search.segment._LARGE", 1)
    everything = units(4200, 24)  # alike in all directions: the hard case
    rows, queries = everything[:4000], everything[4000:]
    with closing(created(memory / "a", 24, index=type_, recall=0.99)) as gallery:
        tenth = [7 * i % 10 for i in range(len(rows))]
        items = (GalleryItem(f"{i}", row, metadata={"n": tenth[i]}) for i, row in enumerate(rows))
        gallery.upsert(items)
        gallery.rebuild()
        for passing in (1, 2, 4):
            found = gallery.search(queries, 10, filter=Range("n", below=passing))
            scores = np.where(np.array(tenth) < passing, queries @ rows.T, -2)
            assert share([[int(hit.key) for hit in hits] for hits in found], scores, 10) > 0.93


@pytest.mark.parametrize("others", [1, 45, 62])
def test_as_many_are_found_where_none_of_the_nearest_pass(gallery: Gallery, others: int) -> None:
    """Nearly all, most and less than half of the items pass, and none of the clusters about the query."""
    classes, found, wanted = np.repeat(np.arange(CLUSTERS), EACH), [], QUERIES @ VECTORS.T
    for scores, query, own in zip(wanted, QUERIES, np.argsort(-(QUERIES @ CENTRES.T), axis=1), strict=True):
        without = own[:others].tolist()
        scores[np.isin(classes, without)] = -2
        (hits,) = gallery.search(query[None], 10, filter=Not(In("class", tuple(without))))
        found.append([int(hit.key) for hit in hits])
    assert share(found, wanted, 10) > 0.93


def test_as_many_labels_are_found(gallery: Gallery) -> None:
    best = (QUERIES @ VECTORS.T).reshape(len(QUERIES), CLUSTERS, EACH).max(axis=2)
    found = gallery.search(QUERIES, 10, group_by_label=True)
    assert share([[int(hit.label) for hit in hits] for hits in found], best, 10) > 0.93


GOOD = {
    "exact": "exact",
    "Flat": "exact",
    "PQ8x4fs": "PQ8x4fs,RFlat",
    "HNSW16,SQ8": "HNSW16,SQ8,RFlat",
    "HNSW16,Flat": "HNSW16,Flat",
    "IVF16,Flat": "IVF16,Flat,RFlat",
    "IVF16_HNSW8,PQ8x4fs,RFlat": "IVF16_HNSW8,PQ8x4fs,RFlat",
    "PQ4,Refine(SQ8)": "PQ4,Refine(SQ8),RFlat",
    "PQ4,Refine(Flat)": "PQ4,Refine(Flat)",
    "OPQ4_8,PQ4": "OPQ4_8,PQ4,RFlat",
    "PCA8,SQ8": "PCA8,SQ8,RFlat",
    "SQbf16": "SQbf16,RFlat",
}
NONE = ["", "x" * 101, "IVF16,Flat\n", "Flät", "PQ٤", "bogus", "RFlat", "IDMap,Flat", "PQ8x24"]
NONE += ["LSQ8x8", "SQ8,Refine(IVF4,Flat)"]  # the one trains for hours, and FAISS dies of the other
BAD = dict.fromkeys(NONE, "expected HNSW with") | {
    "PQ5": "multiple",
    "IVF16,PQ5x4fs": "multiple",
    "PQ0": "PQ0 in it is not within 1 to",
    "HNSW0,Flat": "HNSW0 in it is not within 2 to 512",
    "HNSW1": "HNSW1",
    "IVF4_HNSW1,Flat": "HNSW1",
    "HNSW100000,Flat": "HNSW100000",
    "IVF0,Flat": "IVF0",
    "IVF1000000,Flat": "IVF1000000",
    "PCA17,Flat": "PCA17 in it is not within 1 to 16",
    "OPQ4_17,PQ4": "_17 in it is not within 1 to 16",
}


@pytest.mark.parametrize("wanted", GOOD)
def test_exact_vectors_are_added_where_they_are_missing(wanted: str) -> None:
    assert full_type(wanted, dimension=16) == GOOD[wanted]
    assert full_type(GOOD[wanted], dimension=16) == GOOD[wanted]
    assert check_type(wanted, dimension=16) == wanted
    assert check_type("auto", dimension=16) == "auto"


@pytest.mark.parametrize("wanted", BAD)
def test_what_cannot_work_is_refused_with_the_reason(wanted: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be the type of this gallery's index") as caught:
        check_type(wanted, dimension=16)
    text = str(caught.value)
    assert BAD[wanted] in text
    assert "\n" not in text
    assert "/project/" not in text


@settings(max_examples=40)
@given(st.text("IVFPQHNSWRx,_()0128fslat\n\0é", max_size=12))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        assert check_type(text, dimension=12) == text
    except InvalidArgument as error:
        assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=25)
@given(dimension=st.integers(1, 600), count=st.sampled_from([1500, 300_000]))
def test_the_types_that_are_chosen_from_fit_any_dimension(dimension: int, count: int) -> None:
    for each in INDEX_TYPES:
        type_ = each.factory_string(dimension, count)
        assert full_type(type_, dimension=dimension) == type_


def test_metadata_that_is_written_is_read() -> None:
    trials = (Trial("exact", 1.0, 2.0, 0.0), Trial("HNSW16,SQ8,RFlat", 0.99, 0.2, 1.5))
    numbers: dict[str, Any] = {"wanted_recall": 0.98, "recall": 0.991, "queries": 200, "latency_ms": 0.25}
    numbers |= {"count": 1000, "build_seconds": 3.5, "extended": 7, "parameters": {"efSearch": 64}}
    metadata = IndexMetadata(type="HNSW16,SQ8,RFlat", trials=trials, note="why", **numbers)
    assert IndexMetadata.from_json(metadata.to_json()) == metadata
    assert IndexMetadata.from_json("{}") == IndexMetadata()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "[" * 10_000, '{"other": 1}', '{"type": 1}', '{"count": "1"}', '{"trials": [1]}']
    + [json.dumps({field.name: None}) for field in dataclasses.fields(IndexMetadata)],
)
def test_any_other_metadata_is_damage(text: str) -> None:
    with pytest.raises(IndexDamaged, match="cannot be read"):
        IndexMetadata.from_json(text)
