"""Retrieval metrics against the loop, their invariants, and the data sets that break others."""

import sys
import warnings
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.metrics import compare, rows, table
from serving.errors import BadData
from tests import oracles
from training.evaluation import metrics
from training.evaluation.metrics import RetrievalMetrics, exact_search, retrieval_metrics, unit_rows
from training.evaluation.tensor_search import RowSearch

AT = (1, 2, 4, 8, 50)
labelled = st.integers(0, 10_000).flatmap(
    lambda seed: st.lists(st.integers(0, 4), min_size=3, max_size=18).map(lambda labels: (seed, labels))
)


def cloud(seed: int, count: int, dimension: int = 3) -> oracles.Floats:
    return np.random.default_rng(seed).normal(size=(count, dimension))


def tuple_of(found: RetrievalMetrics) -> oracles.Figures:
    return found.recall_at, found.map_at_r, found.r_precision, found.excluded


def check(found: RetrievalMetrics, expected: oracles.Figures) -> None:
    for ours, theirs in zip(tuple_of(found), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


@settings(deadline=None, max_examples=200)
@given(
    labelled, st.integers(0, 99), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 3, 1024])
)
def test_metrics_are_the_loop(
    drawn: tuple[int, list[int]], other: int, apart: bool, grouped: bool, corners: bool, block: int
) -> None:
    """In the set itself and in a gallery beside rows that are neither, and without a query's own group.

    With corners most ranks are shared, at the last place too, and copies of a query are in other classes: the
    first that is found is not always the query itself.
    """
    seed, labels = drawn
    rng, count = np.random.default_rng(other), len(labels)
    names = np.concatenate((labels, rng.integers(0, 5, 9)))
    embeddings, groups = cloud(seed, count + 9), rng.integers(0, 6, count + 9)
    if corners:
        embeddings = np.eye(3)[rng.integers(0, 3, count + 9)]
    asked, held = np.arange(count + 9), np.arange(count + 9)
    roles = None
    if apart:
        roles = ["query"] * count + ["gallery"] * 7 + ["train"] * 2
        asked, held = np.arange(count), np.arange(count, count + 7)
    gallery = (embeddings[held], names[held]) if apart else (None, None)
    apart_groups = (groups[asked], groups[held] if apart else None) if grouped else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no query
        expected = oracles.retrieval(embeddings[asked], names[asked], AT, *gallery, *apart_groups)
    given: dict[str, Any] = {"at": AT, "roles": roles, "groups": groups if grouped else None}
    if expected[3] == len(asked):
        with pytest.raises(BadData, match="has a reference of its label"):
            retrieval_metrics(embeddings, names + 2**40, **given)  # names beyond float32
    else:
        with patch.object(metrics, "_BLOCK", block):
            found = retrieval_metrics(embeddings, names + 2**40, **given)
        check(found, expected)
        assert (found.queries + found.excluded, found.gallery) == (len(asked), 7 if apart else 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("apart", [False, True])
def test_numpy_finds_what_torch_finds(dtype: type, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies among them, several blocks, and more neighbours asked for than there are."""
    rng = np.random.default_rng(3)
    embeddings: Any = cloud(1, 300, 8).astype(dtype)[rng.integers(0, 300, 501)]
    names = rng.integers(0, 60, 501)
    given: dict[str, Any] = {"roles": ["query", "query", "gallery"] * 167} if apart else {}
    expected = retrieval_metrics(embeddings, names, at=(1, 5, 1000), **given)
    monkeypatch.setitem(sys.modules, "training.evaluation.tensor_search", None)
    monkeypatch.setattr(metrics, "_NUMPY_BYTES", 100_000)
    check(retrieval_metrics(embeddings, names, at=(1, 5, 1000), **given), tuple_of(expected))


class Rounding(np.ndarray):
    """Vectors whose products are rounded by the place of a column."""

    def __matmul__(self, other: Any) -> Any:
        product = np.asarray(self) @ other
        return product + 1e-6 * (np.arange(product.shape[1]) % 5)


def test_copies_tie_exactly_in_numpy_too() -> None:
    base = cloud(5, 7, 129)[np.random.default_rng(1).integers(0, 7, 333)]
    unit = unit_rows(base)
    nearest = exact_search(unit.view(Rounding), unit, np.arange(333), np.arange(333))
    np.testing.assert_array_equal(nearest(np.arange(333), 332), oracles.neighbours(base, 332))


@pytest.mark.parametrize("sizes", [(1200, 300), (4,) * 325])
def test_classes_of_any_size_are_ranked_to_their_end(sizes: tuple[int, ...]) -> None:
    """In pytorch-metric-learning#240, #290 and #362 ranks were cut short, at 1023 for one."""
    names, count = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    embeddings = cloud(0, count).astype(np.float32) + np.array([0.5, 0, 0], np.float32) * names[:, None]
    found = retrieval_metrics(embeddings, names, at=(1, 3))
    unit = embeddings / np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    match = names[np.argsort(-similarity, axis=1, kind="stable")] == names[:, None]
    precision = np.cumsum(match, axis=1) / np.arange(1, count + 1)
    wanted = np.bincount(names)[names] - 1
    average = [(precision[q] * match[q])[: wanted[q]].sum() / wanted[q] for q in range(count)]
    assert found.map_at_r == pytest.approx(np.mean(average), abs=1e-5)  # float32 ranks against float64 ones
    assert found.recall_at[3] == pytest.approx(match[:, :3].any(axis=1).mean(), abs=1e-2)


def test_memory_is_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grew with N² or R ran out in pytorch-metric-learning#353 and #566."""
    names, embeddings = np.array([0] * 60 + [*range(1, 71)] * 2), cloud(0, 200)
    expected = retrieval_metrics(embeddings, names)
    monkeypatch.setattr(metrics, "_BLOCK_BYTES", 40_000)
    monkeypatch.setattr(metrics, "_BLOCK", 150)
    with patch.object(RowSearch, "nearest", autospec=True, side_effect=RowSearch.nearest) as nearest:
        check(retrieval_metrics(embeddings, names), tuple_of(expected))
    sizes = [(len(rows), depth) for _, rows, depth in (call.args for call in nearest.call_args_list)]
    assert all(rows * (8 * 200 + 64 * depth) <= 40_000 for rows, depth in sizes)
    assert {depth for _, depth in sizes} == {8, 59}  # small classes do not pay for the big one
    assert sum(rows for rows, _ in sizes) == 200


def test_tensors_arrays_and_half_precision_agree_inside_autocast() -> None:
    embeddings = torch.from_numpy(cloud(4, 40)).half()
    names = torch.arange(40) % 8
    expected = retrieval_metrics(embeddings.float(), names)
    array = embeddings.float().numpy()
    array.flags.writeable = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert retrieval_metrics(embeddings, names) == expected
    assert retrieval_metrics(array, names.numpy().astype(np.int32)) == expected


def test_what_cannot_be_measured_is_one_sentence() -> None:
    with pytest.raises(BadData, match="none of the 3 queries has a reference of its label"):
        retrieval_metrics(cloud(0, 3), np.arange(3))
    broken, names = cloud(0, 4), np.zeros(4, dtype=np.int64)
    broken[1, 2] = np.nan
    with pytest.raises(BadData, match="1 of 4 embeddings are not finite"):
        retrieval_metrics(broken, names)
    with pytest.raises(ValueError, match=r"\(4, 3\) and int64 \(3,\)"):
        retrieval_metrics(cloud(0, 4), names[:3])
    with pytest.raises(ValueError, match=r"and float64 \(4,\)"):
        retrieval_metrics(cloud(0, 4), names.astype(np.float64))


def test_the_benchmark_finds_equal_figures_and_accounts_for_memory() -> None:
    """In its shortened form; what it says of speed holds at full size only."""
    found = compare("sop", size=0.02, threads=1, repeats=1)
    ours, theirs = found["crossbatch"], found["pytorch-metric-learning"]
    assert ours["figures"] == pytest.approx(theirs["figures"], abs=1e-6)
    assert 0.2 < ours["figures"]["MAP@R"] < 0.999  # neither nothing nor everything is found
    assert 0 < ours["mebibytes"] < 600
    assert "the figures differ by at most" in table("sop", found)
    told = {row["package"]: row for row in rows("sop", found)}
    assert told["pytorch-metric-learning"]["times"] == 1
    assert told["crossbatch"]["times"] == theirs["seconds"] / ours["seconds"]
    assert told["crossbatch"]["MAP@R"] == ours["figures"]["MAP@R"]


@pytest.mark.parametrize("length", [1e-30, 1e-14, 1e19, 1e30])
def test_figures_do_not_depend_on_how_long_embeddings_are(length: float) -> None:
    torch.manual_seed(0)
    embeddings, labels = torch.randn(40, 8), torch.arange(40) % 5
    found, plain = (retrieval_metrics(rows, labels) for rows in (embeddings * length, embeddings))
    assert found.map_at_r == pytest.approx(plain.map_at_r)


def test_separate_classes_are_found_whatever_the_length_of_an_embedding() -> None:
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(5), 12)
    embeddings = (np.eye(5)[labels] + 0.02 * rng.normal(size=(60, 5))) * rng.uniform(0.1, 50, (60, 1))
    found = metrics.cluster_figures(torch.from_numpy(embeddings).half(), labels + 2**24)
    assert found == pytest.approx({"nmi": 1, "ami": 1})


def test_fewer_distinct_embeddings_than_classes() -> None:
    embeddings = torch.eye(2).repeat(10, 1)
    assert metrics.cluster_figures(embeddings, np.arange(20) % 2) == pytest.approx({"nmi": 1, "ami": 1})
    found = metrics.cluster_figures(embeddings, np.arange(20) % 4)
    assert found["nmi"] == pytest.approx(2 / 3)  # two clusters of two classes each: I = log 2, H = 1.5 log 2
    found = metrics.cluster_figures(cloud(0, 300), np.arange(300) % 30)
    assert found["nmi"] > 0.3  # of chance alone, which is why AMI is told beside it
    assert abs(found["ami"]) < 0.1
