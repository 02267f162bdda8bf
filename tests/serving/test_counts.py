"""Counts of fields and values, items that fulfil a filter, and samples, each beside a loop over the items."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidArgument
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.search import columns
from serving.gallery.search.columns import Columns, TextTable
from serving.gallery.search.counts import FieldCount, ValueCount, count_fields, count_values
from serving.gallery.search.filter import LABEL, Equal, Exists, Filter, Not, Range, kind_of
from tests.serving.test_filter import ITEMS, columns_of, elements, holds, number
from tests.serving.vectors import AXES, created, units

Told = list[tuple[str, dict[str, Any]]]
"""Label and metadata of items."""

KINDS = ["boolean", "number", "string"]


def fields_by_loop(items: Told) -> list[FieldCount]:
    found = []
    for field in sorted({LABEL, *(name for _, metadata in items for name in metadata)}):
        held = [each for each in (elements(*item, field) for item in items) if each]
        values = [value for each in held for value in each if kind_of(value) in KINDS]
        numbers = [float(value) for value in values if kind_of(value) == "number"]
        if held:
            kinds = tuple(sorted({kind_of(value) for value in values}))
            ends = min(numbers, default=None), max(numbers, default=None)
            found.append(FieldCount(field, kinds, len(held), *ends))
    return found


def begins(text: str, prefix: str) -> bool:
    begun = {""}
    for letter in prefix:
        begun = {start + each for start in begun for each in (letter, letter.lower(), letter.upper())}
    return text.startswith(tuple(begun))


def values_by_loop(items: Told, field: str, prefix: str) -> list[ValueCount]:
    had = Counter[tuple[int, Any]]()
    for item in items:
        values = [each for each in elements(*item, field) if kind_of(each) in KINDS]
        if prefix:
            values = [each for each in values if isinstance(each, str) and begins(each, prefix)]
        had.update({(KINDS.index(kind_of(each)), number(each)) for each in values})
    ranked = sorted(had.items(), key=lambda each: (-each[1], each[0]))
    return [ValueCount(value, count) for (_, value), count in ranked]


def told(counted: list[ValueCount]) -> list[tuple[str, ValueCount]]:
    """To Python, True and 1 are the same."""
    return [(kind_of(each.value), each) for each in counted]


@settings(max_examples=200)
@given(
    items=ITEMS,
    cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    dead=st.sets(st.integers(0, 11)),
    limit=st.integers(1, 4),
    prefix=st.sampled_from(["a", "A", "ab", "1", "é"]) | st.text(min_size=1, max_size=2),
    searched=st.sampled_from([0, 200]),
)
def test_counts_are_those_of_a_loop(
    items: Told, cuts: tuple[int, int], dead: set[int], limit: int, prefix: str, searched: int
) -> None:
    bounds = [0, *sorted(cuts), 12]
    parts = [
        (
            columns_of(items[start:end]),
            np.array([i in dead for i in range(start, min(end, len(items)))], bool),
        )
        for start, end in pairwise(bounds)
    ]
    live = [item for i, item in enumerate(items) if i not in dead]
    expected = fields_by_loop(live)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_SEARCHED", searched)  # new strings are looked up one by one, or in all
        assert count_fields(parts, 100) == expected
        for field in [*(each.name for each in expected), "no such field"]:
            for begun in ("", prefix):
                all_values = values_by_loop(live, field, begun)
                found, distinct = count_values(parts, field, begun, limit)
                assert told(found) == told(all_values[:limit])
                assert distinct == len(all_values)


def test_of_many_fields_the_fullest_are_told_by_name() -> None:
    items: Told = [("", {"rare": 1, "b": [1, 2]}), ("", {"b": 1, "a": 2}), ("", {"a": 3})]
    part = columns_of(items), np.zeros(3, bool)
    assert [each.name for each in count_fields([part], 2)] == ["a", "b"]
    assert count_fields([part], 0) == []
    assert count_fields([(Columns.of([], []), np.zeros(0, bool))], 9) == []


@given(texts=st.sets(st.text("aAbBßSsİié", max_size=4)), prefix=st.text("aAbßSİié", max_size=4))
def test_strings_are_found_by_their_beginning_in_any_case(texts: set[str], prefix: str) -> None:
    table = TextTable.of(sorted(texts))
    found = [text for run in table.beginning(prefix) for text in list(table)[run]]
    assert found == sorted(text for text in texts if begins(text, prefix))


KEYS = [f"k{i}" for i in range(12)]
WRITES = st.lists(
    st.tuples(
        st.just("upsert"),
        st.dictionaries(
            st.sampled_from(KEYS),
            st.tuples(
                st.sampled_from(["", "x", "y"]),
                st.fixed_dictionaries(
                    {},
                    optional={
                        "price": st.integers(0, 3),
                        "tags": st.lists(st.sampled_from("abA"), max_size=3),
                    },
                ),
            ),
            min_size=1,
        ),
    )
    | st.tuples(st.just("delete"), st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    | st.just(("rebuild", None)),
    max_size=8,
)
SOUGHT: list[Filter] = [Equal(LABEL, "x"), Range("price", least=1), Not(Exists("tags")), Equal("tags", "a")]


@settings(max_examples=30, deadline=None)
@given(writes=WRITES, size=st.integers(1, 5), seed=st.integers(0, 2**64 - 1))
def test_after_any_writes_all_agree_with_a_loop(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, Any]], size: int, seed: int
) -> None:
    gallery = created(tmp_path_factory.mktemp("writes") / "g")
    known = dict[str, tuple[int, str, Mapping[str, Any]]]()
    try:
        for what, given_ in writes:
            if what == "upsert":
                items = [
                    GalleryItem(key, AXES[0], label, "", texts) for key, (label, texts) in given_.items()
                ]
                versions = gallery.upsert(items)
                known |= {it.key: (at, it.label, it.metadata) for it, at in zip(items, versions, strict=True)}
            elif what == "delete":
                gallery.delete(given_)
                known = {key: each for key, each in known.items() if key not in given_}
            else:
                gallery.rebuild()
        live: Told = [(label, dict(metadata)) for _, label, metadata in known.values()]
        assert gallery.fields() == fields_by_loop(live)
        for field in (LABEL, "price", "tags"):
            all_values = values_by_loop(live, field, "")
            found, distinct = gallery.values(field, limit=size)
            assert (found, distinct) == (all_values[:size], len(all_values))
            assert gallery.values(field, prefix="A")[0] == values_by_loop(live, field, "A")
        for sought in SOUGHT:
            fit = {key for key, (_, label, metadata) in known.items() if holds(label, metadata, sought)}
            right = sorted((known[key][0], key) for key in fit)
            try:
                pages, after = list[GalleryItem](), 0
                while page := list(islice(gallery.matching(sought, after=after), size)):
                    pages, after = pages + page, page[-1].version
            except InvalidArgument:  # no item holds such a value
                assert not right
                continue
            assert [(item.version, item.key) for item in pages] == right
            drawn = [item.key for item in gallery.sample(size, filter=sought, seed=seed)]
            assert len({*drawn}) == len(drawn) == min(size, len(right))
            assert {*drawn} <= fit
            gallery.rebuild()
            if seed:
                assert [item.key for item in gallery.sample(size, filter=sought, seed=seed)] == drawn
    finally:
        gallery.close()


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    gallery = created(tmp_path / "g", 16, thumbnail_side=16)
    gallery.upsert([GalleryItem(f"k{i:02}", row, "xy"[i % 2]) for i, row in enumerate(units(30))])
    gallery.rebuild()
    gallery.delete([f"k{i:02}" for i in range(5)])
    gallery.upsert([GalleryItem("new", units(1)[0], "x")])
    return gallery


def test_all_items_are_drawn_equally_often(gallery: Gallery) -> None:
    drawn = Counter(item.key for seed in range(1, 2_001) for item in gallery.sample(5, seed=seed))
    expected = 2_000 * 5 / 26
    # The sum of squares is of a chi-squared law of 25 degrees: above 60 once in 10,000 times.
    assert sum((drawn[key] - expected) ** 2 / expected for key in drawn) < 60
    assert len(drawn) == 26
    firsts = Counter(next(gallery.sample(5, seed=seed)).key for seed in range(1, 2_001))
    assert sum((firsts[key] - 2_000 / 26) ** 2 / (2_000 / 26) for key in drawn) < 60


def test_a_sample_without_a_seed_is_another_each_time(gallery: Gallery) -> None:
    assert len({tuple(item.key for item in gallery.sample(9)) for _ in range(5)}) > 1
    assert len(list(gallery.sample(99))) == 26
    assert [item.label for item in gallery.sample(3, filter=Equal(LABEL, "x"))] == ["x"] * 3


def test_what_is_read_is_of_the_state_when_it_began(gallery: Gallery) -> None:
    found = gallery.matching(Exists(LABEL))
    first = next(found)
    gallery.delete([item.key for item in gallery.list(limit=99)])
    assert len([first, *found]) == 26
    assert list(gallery.matching(Exists(LABEL))) == []
