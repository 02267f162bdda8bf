"""The index that is chosen: it reaches the recall that is wanted, on data of any kind and dimension."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.gallery.index import choice as module
from serving.gallery.index.builder import GivenUp, IndexBuilder
from serving.gallery.index.choice import GroundTruth, build_index, measure_again, measured, tuned
from serving.gallery.index.factory import is_small
from serving.gallery.index.index import set_parameters
from serving.gallery.index.metadata import EXACT, IndexMetadata


def clustered(count: int, dimension: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((60, dimension))
    rows = centres[rng.integers(60, size=count)] + 0.5 * rng.standard_normal((count, dimension))
    units: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return units


def isotropic(count: int, dimension: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(1).standard_normal((count, dimension))
    units: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return units


def built(
    rows: NDArray[np.float32], wanted: str = "auto", recall: float = 0.95
) -> tuple[IndexBuilder, IndexMetadata]:
    draft = IndexBuilder.of(rows, threads=1)
    return draft, build_index(draft, wanted=wanted, wanted_recall=recall, advance=lambda *_: None)


def true_recall(
    draft: IndexBuilder, facts: IndexMetadata, rows: NDArray[np.float32], queries: NDArray[np.float32]
) -> float:
    """The share of the ten nearest that an index finds, counted one by one."""
    set_parameters(draft.index, facts.parameters)
    found = 0
    for query in queries:
        best = set(np.argsort(-(rows @ query))[:10].tolist())
        _, positions = draft.search(query[None], 26)
        found += len(best & set(positions[0, :10].tolist()))
    return found / (10 * len(queries))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few vectors be many."""
    monkeypatch.setattr("serving.gallery.index.factory._SMALL", 1 << 15)
    monkeypatch.setattr("serving.gallery.index.choice._SAMPLE", 1500)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("kind", "dimension"), [(clustered, 32), (clustered, 7), (isotropic, 24)])
def test_automatic_choice_reaches_the_recall(
    kind: Callable[[int, int], NDArray[np.float32]], dimension: int
) -> None:
    everything = kind(4200, dimension)
    rows, queries = everything[:4000], everything[4000:]
    draft, facts = built(rows)
    assert facts.recall >= 0.95
    assert true_recall(draft, facts, rows, queries) >= 0.93
    assert (facts.automatic, facts.count, facts.queries, facts.wanted_recall) == (True, 4000, 200, 0.95)
    assert facts.latency_ms > 0
    assert [trial.type for trial in facts.trials] == [
        "exact",
        f"PQ{(dimension // 2 if dimension % 2 == 0 else dimension)}x4fs,RFlat",
        "HNSW16,SQ8,RFlat",
    ]
    assert np.array_equal(draft.matrix, rows)


@pytest.mark.usefixtures("eager")
def test_type_that_misses_the_recall_on_the_whole_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    types = ["PQ2x4,RFlat", "PQ16x4fs,RFlat", "exact"]
    monkeypatch.setattr(module, "_tried", lambda *_, **__: (types, []))
    monkeypatch.setattr("serving.gallery.index.choice._FACTORS", (1,))
    rows = isotropic(1000, 32)
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
    rows = clustered(2000, 16)
    _, facts = built(rows, "IVF32,PQ8x4fs")
    assert (facts.type, facts.wanted, facts.note) == ("IVF32,PQ8x4fs,RFlat", "IVF32,PQ8x4fs", "")
    assert facts.parameters.keys() == {"nprobe", "k_factor_rf"}
    assert facts.recall >= 0.95
    monkeypatch.setattr("serving.gallery.index.choice._FACTORS", (1, 2))
    _, weak = built(isotropic(2000, 64), "PCA2,Flat", recall=0.99)
    assert weak.type == "PCA2,Flat,RFlat"
    assert weak.recall < 0.99


def test_type_that_cannot_be_trained_yet_is_exact_until_then() -> None:
    _, facts = built(clustered(100, 16), "IVF256,Flat")
    assert (facts.type, facts.wanted, facts.recall) == ("exact", "IVF256,Flat", 1.0)
    assert "cannot be trained on 100 vectors" in facts.note


def test_equal_vectors_are_found_whichever_they_are() -> None:
    rows = np.repeat(clustered(30, 8), 40, axis=0)
    _, facts = built(rows, "PQ4x4fs")
    assert facts.recall > 0.99


def test_queries_lie_beside_vectors_along_the_line_of_two_neighbours() -> None:
    rows = isotropic(40, 8)
    draft = IndexBuilder.of(rows, threads=1)
    exam = GroundTruth.of(draft)
    assert exam.queries.shape == (40, 8)  # one beside each, in their order
    for row, query in zip(rows, exam.queries, strict=True):
        near = np.argsort(-(rows @ row))[1:11]
        reach = np.linalg.norm(rows[near[-1]] - row)
        lines = [rows[first] - rows[second] for first in near for second in near if first != second]
        shifted = [row + 0.6 * reach * line / np.linalg.norm(line) for line in lines]
        cosines = [each @ query / np.linalg.norm(each) for each in shifted]
        assert max(cosines) > 1 - 1e-5
    assert np.allclose(exam.least, np.sort(exam.queries @ rows.T, axis=1)[:, -10], atol=2e-5)
    assert measured(draft, exam, {}) == 1.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_few_vectors_the_queries_are_those(count: int) -> None:
    rows = np.repeat(isotropic(1, 8), count, axis=0)
    exam = GroundTruth.of(IndexBuilder.of(rows, threads=1))
    assert np.allclose(exam.queries, rows, atol=1e-6)


def test_a_graph_is_not_asked_only_for_what_it_was_made_of() -> None:
    everything = isotropic(3200, 24)
    rows, queries = everything[:3000], everything[3000:]
    draft = IndexBuilder.of(rows, threads=1)
    draft.become("HNSW16,SQ8,RFlat")
    exam, parameters = GroundTruth.of(draft), {"efSearch": 16, "k_factor_rf": 2}
    told = measured(draft, exam, parameters)
    assert told < true_recall(draft, IndexMetadata(parameters=parameters), rows, rows[:200]) - 0.02
    assert told < true_recall(draft, IndexMetadata(parameters=parameters), rows, queries) + 0.1


def test_cheapest_parameters_that_reach_are_taken() -> None:
    rows = clustered(3000, 16)
    draft = IndexBuilder.of(rows, threads=1)
    draft.become("IVF64,PQ8x4fs,RFlat")
    exam = GroundTruth.of(draft)
    low, high = tuned(draft, exam, IndexMetadata(wanted_recall=0.6)), tuned(draft, exam, IndexMetadata())
    assert low.parameters["nprobe"] < high.parameters["nprobe"]
    assert low.recall < 0.99 <= high.recall
    assert measured(draft, exam, low.parameters) == low.recall
    known = {"nprobe": 64, "k_factor_rf": 64}
    assert (
        tuned(draft, exam, IndexMetadata(wanted_recall=0.9), first=known).parameters == known
    )  # nothing else is tried


@pytest.mark.usefixtures("eager")
def test_adding_others_measures_again() -> None:
    rows = clustered(2500, 16)
    draft, facts = built(rows[:2000], "IVF32,Flat")
    draft.add(np.arange(2000, 2500), rows[2000:])
    after = measure_again(draft, facts, added=500)
    assert (after.extended, after.count, after.type) == (500, 2000, facts.type)
    assert after.recall >= 0.95


@pytest.mark.parametrize("dimension", [1, 2, 3])
@pytest.mark.usefixtures("eager")
def test_smallest_dimensions(dimension: int) -> None:
    _, facts = built(clustered(1200, dimension))
    assert facts.recall >= 0.95


@pytest.mark.usefixtures("eager")
def test_work_ends_wherever_it_is_told_to() -> None:
    rows = clustered(2000, 8)
    for last in ("try", "train", "add", "measure"):

        def advance(stage: str, *_: int, last: str = last) -> None:
            if stage == last:
                raise GivenUp

        for wanted in ("auto",) if last == "try" else ("PQ4x4fs", "HNSW8,SQ8"):
            with pytest.raises(GivenUp):
                build_index(
                    IndexBuilder.of(rows, threads=1), wanted=wanted, wanted_recall=0.9, advance=advance
                )


@pytest.mark.parametrize("type_", [EXACT, "SQ8,RFlat"])
def test_the_memory_of_a_draft_is_given_back_once_it_is_saved(tmp_path: Path, type_: str) -> None:
    rows = clustered(400, 2048)  # 3 MB

    def save() -> None:
        draft = IndexBuilder.of(rows, threads=1)
        draft.become(type_)
        draft.save(tmp_path / "index.faiss")

    save()
    before = anonymous_bytes()
    for _ in range(10):
        save()
    assert anonymous_bytes() - before < 10e6


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
