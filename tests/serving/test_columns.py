"""Columns against a loop over dictionaries; their file whole, mapped, or refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gallery.disk import file_checksum
from serving.gallery.index.index import IndexDamaged
from serving.gallery.search.columns import Columns
from serving.gallery.search.filter import (
    LABEL,
    AllOf,
    AnyOf,
    Equal,
    Exists,
    Filter,
    In,
    Not,
    Range,
    check_filter,
    kind_of,
)

# Few of each, so that fields meet values; each kind has a value that another could be taken for.
NAMES = st.sampled_from(["a", "b", "", "$or", "é", "\U0001f426"]) | st.text(max_size=2)
SCALARS = (
    st.sampled_from([True, False, 0, 1, -0.0, 1.0, 0.5, 2**53, 2**53 + 1, 10**300])
    | st.sampled_from(["", "a", "ab", "b", "1", "\uffff", "\U00010000"])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
)
JSON = st.recursive(
    st.none() | SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
ITEMS = st.lists(st.tuples(st.text(max_size=2), st.dictionaries(NAMES, JSON, max_size=4)), max_size=12)


def ranges(bounds: st.SearchStrategy[Any]) -> st.SearchStrategy[Filter]:
    return st.builds(Range, FIELDS, *([st.none() | bounds] * 4)).filter(
        lambda made: any(bound is not None for bound in (made.above, made.least, made.below, made.most))
    )


FIELDS = NAMES | st.just(LABEL)
NUMBERS = SCALARS.filter(lambda value: kind_of(value) == "number")
FILTERS: st.SearchStrategy[Filter] = st.recursive(
    st.builds(Equal, FIELDS, SCALARS)
    | st.builds(In, FIELDS, st.lists(SCALARS, max_size=3).map(tuple))
    | ranges(NUMBERS)
    | ranges(SCALARS.filter(lambda value: kind_of(value) == "string"))
    | st.builds(Exists, FIELDS),
    lambda inner: (
        st.builds(AllOf, st.lists(inner, max_size=3).map(tuple))
        | st.builds(AnyOf, st.lists(inner, max_size=3).map(tuple))
        | st.builds(Not, inner)
    ),
    max_leaves=6,
)


def elements(label: str, metadata: Mapping[str, Any], field: str) -> list[Any]:
    held = (label or None) if field == LABEL else metadata.get(field)
    return [each for each in (held if isinstance(held, list) else [held]) if each is not None and each != []]


def comparable(one: Any, other: Any) -> bool:
    return kind_of(one) == kind_of(other)


def holds(label: str, metadata: Mapping[str, Any], filter: Filter) -> bool:
    """The definition, by a loop."""
    match filter:
        case AllOf(filters):
            return all(holds(label, metadata, each) for each in filters)
        case AnyOf(filters):
            return any(holds(label, metadata, each) for each in filters)
        case Not(inner):
            return not holds(label, metadata, inner)
        case Exists(field):
            return bool(elements(label, metadata, field))
        case Equal(field, value):
            return any(
                comparable(each, value) and number(each) == number(value)
                for each in elements(label, metadata, field)
            )
        case In(field, values):
            return any(holds(label, metadata, Equal(field, value)) for value in values)
        case Range(field, above, least, below, most):
            return any(
                (above is None or (comparable(each, above) and number(each) > number(above)))
                and (least is None or (comparable(each, least) and number(each) >= number(least)))
                and (below is None or (comparable(each, below) and number(each) < number(below)))
                and (most is None or (comparable(each, most) and number(each) <= number(most)))
                for each in elements(label, metadata, field)
            )


def number(value: Any) -> Any:
    return float(value) if kind_of(value) == "number" else value


def columns_of(items: list[tuple[str, dict[str, Any]]]) -> Columns:
    return Columns.of(
        [label for label, _ in items], [json.dumps(metadata, ensure_ascii=False) for _, metadata in items]
    )


@settings(max_examples=50)
@given(items=ITEMS, filters=st.lists(FILTERS, min_size=1, max_size=4), cut=st.integers(0, 12))
def test_mask_is_what_a_loop_finds(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[tuple[str, dict[str, Any]]],
    filters: list[Filter],
    cut: int,
) -> None:
    whole = columns_of(items)
    extended = Columns.joined([columns_of(items[:cut]), columns_of(items[cut:])])
    path = tmp_path_factory.mktemp("columns") / "index-1.columns"
    loaded = Columns.load(path, extended.save(path))
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for filter in filters:
        check_filter(filter)
        expected = [holds(label, metadata, filter) for label, metadata in items]
        for columns in (whole, extended, loaded):
            assert columns.mask(filter).tolist() == expected
    for columns in (whole, extended, loaded):
        assert len(columns) == len(items)
        assert [columns.label_names[code] if code >= 0 else "" for code in columns.label_codes] == [
            label for label, _ in items
        ]
        assert dict(columns.fields) == {
            field: frozenset(
                kind_of(each)
                for label, metadata in items
                for each in elements(label, metadata, field)
                if not isinstance(each, dict | list)
            )
            for field in {LABEL, *(name for _, metadata in items for name in metadata)}
            if any(elements(label, metadata, field) for label, metadata in items)
        }


@pytest.mark.parametrize("values", [[1, 2, 3], ["a", "b", "c"]])
def test_a_bound_holds_for_what_equals_it_or_not(values: list[Any]) -> None:
    columns = columns_of([("", {"a": value}) for value in values])
    for bound, found in (
        ("above", [False, False, True]),
        ("least", [False, True, True]),
        ("below", [True, False, False]),
        ("most", [True, True, False]),
    ):
        assert columns.mask(Range("a", **{bound: values[1]})).tolist() == found


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "columns"
    checksum = columns_of([("x", {"a": [1, "b", True]})]).save(path)
    with pytest.raises(IndexDamaged, match="cannot be read"):
        Columns.load(tmp_path / "absent", checksum)
    path.write_bytes(b"no columns")
    with pytest.raises(IndexDamaged, match="the checksum"):
        Columns.load(path, checksum)
    with pytest.raises(IndexDamaged, match="cannot be read"):
        Columns.load(path, file_checksum(path))


def test_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        columns_of([]).save(tmp_path / "absent" / "columns")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1' + "0" * 400 + "}", "7"])
def test_text_that_is_no_metadata_is_refused(text: str) -> None:
    with pytest.raises((ValueError, OverflowError), match=r".+"):
        Columns.of([""], [text])
