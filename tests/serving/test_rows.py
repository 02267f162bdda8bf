"""Rows of hits that are kept in memory: never another state's, never of more bytes than allowed."""

import sys
import tracemalloc
from collections.abc import Iterator, Set
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import BadArtifact
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.item import ItemChange
from serving.gallery.search.snapshot import RowCache
from serving.gallery.store.transaction import Texts
from tests.serving.vectors import AXES, created, sql


class Table:
    """Stands for a reader of a table in which the item of seq n has n in each of its texts."""

    path = Path("gallery.sqlite")

    def __init__(self, padding: int = 0) -> None:
        self.padding = "x" * padding
        self.asked: list[set[int]] = []

    def texts(self, seqs: Set[int]) -> dict[int, Texts]:
        self.asked.append({*seqs})
        return {n: (f"k{n}", f"l{n}", f"u{n}", f'{{"n": {n}, "x": "{self.padding}"}}') for n in seqs}


def find(cache: RowCache, seqs: Set[int], table: Any) -> dict[int, Any]:
    return cache.find(seqs, table)


@settings(max_examples=50)
@given(st.lists(st.sets(st.integers(0, 40), max_size=12), max_size=30), st.sampled_from([0, 3000, 1 << 20]))
def test_every_row_is_that_of_its_seq_however_little_is_kept(asked: list[set[int]], most: int) -> None:
    cache = RowCache(most)
    for seqs in asked:
        rows = find(cache, seqs, Table())
        assert rows == {n: (f"k{n}", f"l{n}", f"u{n}", {"n": n, "x": ""}) for n in seqs}


def test_what_was_found_is_not_read_again() -> None:
    cache, table = RowCache(), Table()
    find(cache, {1, 2}, table)
    find(cache, {1, 2, 3}, table)
    find(cache, {1, 3}, table)
    assert table.asked == [{1, 2}, {3}]


def test_what_is_asked_for_again_and_again_stays_while_others_go() -> None:
    cache, table = RowCache(20_000), Table()
    for n in range(1, 1000):
        find(cache, {0, n}, table)
    assert sum(0 in seqs for seqs in table.asked) == 1
    find(cache, {1}, table)
    assert table.asked[-1] == {1}


@pytest.mark.parametrize("padding", [0, 1000, 50_000])
def test_no_more_memory_is_taken_than_allowed(padding: int) -> None:
    most, cache, table = 2_000_000, RowCache(2_000_000), Table(padding)
    tracemalloc.start()
    try:
        for start in range(0, 16 * most // (400 + padding), 10):
            find(cache, {*range(start, start + 10)}, table)
        table.asked.clear()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = sys.getsizeof(table.padding) + 1000
    assert most / 3 < taken < most + largest


@pytest.fixture
def gallery(memory: Path) -> Iterator[Gallery]:
    with closing(created(memory / "shoes")) as made:
        made.upsert([GalleryItem("a", AXES[0], "old", "u", {"price": 1}), GalleryItem("b", AXES[1])])
        made.rebuild()
        assert shown(made) == [("a", "old", "u", {"price": 1}), ("b", "", "", {})]  # and kept from now on
        yield made


def shown(gallery: Gallery) -> list[tuple[str, str, str, Any]]:
    (hits,) = gallery.search(AXES[:1], 10)
    return [(hit.key, hit.label, hit.uri, hit.metadata) for hit in hits]


def test_what_another_writes_is_shown_though_the_row_before_was_kept(gallery: Gallery) -> None:
    with closing(Gallery.open(gallery.path)) as other:
        other.update([ItemChange("a", {"price": 2}, label="new", uri="v")])
        assert shown(gallery)[0] == ("a", "new", "v", {"price": 2})
        other.delete(["a"])
        assert shown(gallery) == [("b", "", "", {})]
        other.upsert([GalleryItem("a", AXES[0], "again")])
        assert shown(gallery)[0] == ("a", "again", "", {})
        other.rebuild()
        assert shown(gallery)[0] == ("a", "again", "", {})


def test_what_a_caller_does_to_a_hit_is_in_no_later_one(gallery: Gallery) -> None:
    (hits,) = gallery.search(AXES[:1], 1)
    held: Any = hits[0].metadata
    held["price"] = 99
    assert shown(gallery)[0] == ("a", "old", "u", {"price": 1})


def test_an_older_state_put_in_place_shows_its_own_rows(gallery: Gallery) -> None:
    """Then a seq is given a second time, to another item."""
    gallery.upsert([GalleryItem("c", AXES[2], "lost")])
    assert ("c", "lost", "", {}) in shown(gallery)
    sql(
        gallery.path,
        "DELETE FROM items WHERE key = 'c'",
        "UPDATE sqlite_sequence SET seq = seq - 1 WHERE name = 'items'",
        "UPDATE state SET change = change - 1",
    )
    assert [key for key, *_ in shown(gallery)] == ["a", "b"]
    gallery.upsert([GalleryItem("d", AXES[2], "found")])
    assert ("d", "found", "", {}) in shown(gallery)


@pytest.mark.parametrize("metadata", ["'{'", "'[]'", "'{},{}'", "''", "x'7b7d'"])
def test_a_row_that_makes_no_sense_is_damage_each_time(gallery: Gallery, metadata: str) -> None:
    gallery.upsert([GalleryItem("c", AXES[2])])
    gallery.rebuild()
    sql(gallery.path, f"UPDATE items SET metadata = {metadata} WHERE key = 'c'")
    with closing(Gallery.open(gallery.path)) as opened:
        for _ in range(2):
            with pytest.raises(BadArtifact, match=r"an item that its index names"):
                opened.search(AXES[:1], 10)
