"""The benchmark of searches, in short: a match without rivals, and rivals that are made up."""

import csv
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import search
from benchmarks.contenders import match
from benchmarks.contenders.embeddings import draw, nearest, recall, shards, split
from benchmarks.contenders.match import Contestant, Match, Row, Rules
from benchmarks.contenders.process import Failed
from benchmarks.contenders.table import ratios, tables
from tests.serving.vectors import units


def test_a_match_measures_gallery_and_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--count 2000 --dimension 16 --kinds HNSW16,SQ8,RFlat --server --rivals --cores 0"
    words += f" --queries 40 --rounds 1 --seconds 0.02 --csv {tmp_path / 'found.csv'} --work {tmp_path}"
    search.main(words.split())
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shown = capsys.readouterr().out
    parts = ["all items", *(f"filter lets {percent} % through" for percent in (1, 10, 50)), "after changes"]
    for title, wanted in (("", parts), (" by gRPC", parts[:4])):
        own = [row for row in rows if row["contestant"] == f"crossbatch HNSW16,SQ8,RFlat{title}"]
        assert [row["part"] for row in own] == wanted
        assert f"| {own[0]['contestant']} |" in shown
        for row in own:
            assert (row["items"], row["dimension"]) == ("2000", "16")
            assert float(row["recall"]) > 0.9
            assert float(row["p99_ms_64"]) >= float(row["p50_ms_64"]) > 0
    assert rows[0]["built"] == "HNSW16,SQ8,RFlat"
    assert float(rows[0]["disk_mb"]) > 2000 * 16 * 4 / 1e6


def test_embeddings_are_drawn_alike_each_time_and_split_without_loss(tmp_path: Path) -> None:
    draw(tmp_path / "first.npy", 300, 24)
    draw(tmp_path / "again.npy", 300, 24)
    first = np.load(tmp_path / "first.npy")
    np.testing.assert_array_equal(first, np.load(tmp_path / "again.npy"))
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-6)
    np.save(tmp_path / "longer.npy", 3 * first)
    split(tmp_path / "longer.npy", tmp_path / "items.npy", tmp_path / "queries.npy", held_out=20)
    items, queries = np.load(tmp_path / "items.npy"), np.load(tmp_path / "queries.npy")
    assert (len(items), len(queries)) == (280, 20)
    both = np.concatenate([items, queries])
    np.testing.assert_allclose(both[np.lexsort(both.T)], first[np.lexsort(first.T)], atol=1e-6)


def test_recall_counts_what_exact_search_among_the_allowed_finds() -> None:
    vectors, queries = units(500, 8), units(9, 8, seed=1)
    allowed = shards(500) < 30
    wanted = nearest(vectors, queries, allowed, k=10)
    every = [np.argsort(-(vectors @ query)).tolist() for query in queries]
    order = [[i for i in row if allowed[i]] for row in every]
    assert recall([row[:10] for row in order], vectors, queries, wanted) == 1
    assert recall([row[1:11] for row in order], vectors, queries, wanted) == pytest.approx(0.9)
    assert recall([row[:1] * 10 for row in order], vectors, queries, wanted) == pytest.approx(0.1)
    among_others = [[i for i in row if not allowed[i]][:10] for row in every]
    assert recall(among_others, vectors, queries, wanted) == 0
    vectors = np.eye(4, dtype=np.float32)[[0, 0, 0, 1]]  # of which three score alike
    wanted = nearest(vectors, vectors[:1], np.ones(4, np.bool_), k=2)
    found = [recall([pair], vectors, vectors[:1], wanted) for pair in ([0, 1], [2, 1], [0, 2], [0, 3])]
    assert found == [1, 1, 1, 0.5]


class MadeUp:
    """Finds as many of the 10 nearest as its setting says, which it can be set to from 2 to 10."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.setting = name, 0

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        if self.name == do:
            raise Failed(f"{do}: out of luck")
        if do == "open":
            self.setting = 5
            return {"ladder": [] if self.name == "tuned" else [2, 4, 6, 8, 10]}
        if do == "set":
            self.setting = options["value"]
        if do == "answer":
            return {"found": [list(range(self.setting))] * 3}
        if do == "memory":
            return {"anonymous_bytes": 2e6, "mapped_bytes": 1e6}
        if do == "build":
            return {"load_seconds": 1.0, "index_seconds": 2.0, "disk_bytes": 3e6, "about": "well made"}
        return {"queries_per_second": 100.0 * self.setting, "p50_ms": 1.0, "p99_ms": 2.0, "seconds": 1.0}


def contestant(title: str, sort: str = "store") -> Contestant:
    return Contestant(title, sort, title, title, "python", False, False)


Play = Callable[[list[Contestant], float], list[Row]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """A match in which items 0 to 9 are the nearest to every query."""
    np.save(tmp_path / "items.npy", np.array([[1, 0]] * 10 + [[0, 1]] * 20, np.float32))
    np.save(tmp_path / "queries.npy", np.array([[1, 0]] * 3, np.float32))
    monkeypatch.setattr(match, "Process", lambda *given, **_: nullcontext(MadeUp(*given)))

    def play(some: list[Contestant], wanted: float) -> list[Row]:
        rules = Rules(recall=wanted, rounds=3, seconds=0.1, cores=1, patience=1, highest=9, brief=True)
        files = tmp_path / "items.npy", tmp_path / "queries.npy"
        return Match(tmp_path, *files, fresh=5, rules=rules, tell=lambda _: None).play(some)

    return play


def test_a_rival_is_set_to_the_least_that_reaches_the_recall(play: Play) -> None:
    for row in play([contestant("one"), contestant("other")], 0.7):
        assert (row.plain["setting"], row.plain["recall"]) == (8, 0.8)  # which 8 reaches first
    (one,) = play([contestant("one")], 1.1)
    assert (one.plain["setting"], one.plain["recall"]) == (8, 0.8)  # the highest allowed, where none does


@pytest.mark.parametrize(("wanted", "setting"), [(0.9, 6), (0.3, 4)])
def test_rivals_need_no_more_than_the_first_or_is_wanted(play: Play, wanted: float, setting: int) -> None:
    first, rival = play([contestant("tuned"), contestant("rival")], wanted)
    assert (first.plain["setting"], first.plain["recall"]) == (None, 0.5)
    assert rival.plain["setting"] == setting


@pytest.mark.parametrize("step", ["build", "open", "set", "answer", "memory", "time"])
def test_one_that_fails_has_a_row_that_says_why_and_stops_nobody(play: Play, step: str) -> None:
    rows = play([contestant(step), contestant("well")], 0.5)
    assert [row.failed for row in rows] == [f"{step}: out of luck", ""]
    assert rows[1].plain["1"]["queries_per_second"] == 600
    shown = tables(rows)
    assert f"failed: {step}: out of luck" in shown
    assert "| well (store) | 0.6000 | 1.00 | 2.00 | 600 | 600 | ef 6 |" in shown


def test_the_bound_is_told_against_the_faster_store() -> None:
    def row(title: str, sort: str, rate: float) -> Row:
        figures = {"queries_per_second": rate, "p50_ms": 1.0, "p99_ms": 1.0}
        return Row(contestant(title, sort), plain={"recall": 1.0, "1": figures, "64": figures})

    rows = [row("ours", "crossbatch", 900), row("ours by gRPC", "server", 600)]
    rows += [row("fast", "library", 9000), row("slow", "store", 100), row("quick", "store", 300)]
    by_grpc, _, direct, _ = ratios(rows).splitlines()  # of each a batch of 1, and one of 64
    assert by_grpc == "- ours by gRPC, batch of 1: 2.00 times quick"
    assert direct == "- ours, batch of 1: 3.00 times quick"
    assert ratios(rows[:3]) == ""
