"""Filters: read from JSON, refused with one sentence that says where, and what they find in columns."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidArgument
from serving.gallery.disk import file_checksum
from serving.gallery.index.index import IndexDamaged
from serving.gallery.search.columns import Columns
from serving.gallery.search.filter import (
    LABEL,
    MAX_CONDITIONS,
    AllOf,
    AnyOf,
    Equal,
    Exists,
    Filter,
    In,
    Not,
    Range,
    check_filter,
    check_kinds,
    kind_of,
    parse_filter,
    unknown_fields,
)

NAN, HUGE = float("nan"), 10**400


def nested(levels: int, inmost: Any, around: Callable[[Any], Any]) -> Any:
    for _ in range(levels - 1):
        inmost = around(inmost)
    return inmost


NESTED = partial(nested, inmost=Exists("a"), around=Not)
NESTED_JSON = partial(nested, inmost={"a": 1}, around=lambda inner: {"$not": inner})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"brand": "acme"}, Equal("brand", "acme")),
        ({"a": True}, Equal("a", True)),
        ({}, AllOf(())),
        ({"price": {"$gte": 3, "$lt": 9}}, Range("price", least=3, below=9)),
        ({"price": {"$gt": "a", "$lte": "b"}}, Range("price", above="a", most="b")),
        ({"$label": {"$in": ["x", 1, False]}}, In(LABEL, ("x", 1, False))),
        ({"a": {"$nin": []}}, Not(In("a", ()))),
        ({"a": {"$eq": 1.5}}, Equal("a", 1.5)),
        ({"a": {"$ne": "b"}}, Not(Equal("a", "b"))),
        ({"size": {"$exists": True}}, Exists("size")),
        ({"size": {"$exists": False}}, Not(Exists("size"))),
        ({"": ""}, Equal("", "")),
        ({"a": {"$exists": True, "$gt": 0}}, AllOf((Exists("a"), Range("a", above=0)))),
        ({"a": 1, "b": 2}, AllOf((Equal("a", 1), Equal("b", 2)))),
        (
            {"$or": [{"a": 1}, {"$and": [{"b": 2}, {}]}], "$not": {"$label": "x"}},
            AllOf((AnyOf((Equal("a", 1), AllOf((Equal("b", 2), AllOf(()))))), Not(Equal(LABEL, "x")))),
        ),
        ({"$or": []}, AnyOf(())),
    ],
)
def test_json_is_read(given: Any, expected: Filter) -> None:
    found = parse_filter(given)
    assert repr(found) == repr(expected)  # == takes True for 1
    assert hash(found) == hash(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], r"^filter is \[1\]; expected a JSON object"),
        ("a", r"^filter is 'a'; expected a JSON object"),
        ({1: 2}, r"^filter is .*expected a JSON object"),
        ({"a": None}, r"^filter\.a is null; .*use \$exists"),
        ({"a": [1]}, r"^filter\.a is \[1\]; .*use \$in"),
        ({"a": {}}, r"^filter\.a has no condition"),
        ({"a": {"$gte": {}}}, r"^filter\.a\.\$gte is \{\}; expected a string, a number or a boolean$"),
        ({"a": {"$lten": 1}}, r"^filter\.a\.\$lten is unknown; did you mean \$lte\?"),
        ({"a": {"lower": 1}}, r"^filter\.a\.lower is unknown; expected one of \$eq, "),
        ({"a": {"$contains": 1}}, r"^filter\.a\.\$contains is unknown; .* \{\"a\": VALUE\} holds where one"),
        ({"$nor": []}, r"^filter\.\$nor is unknown; did you mean \$or\?"),
        ({"a": {"$in": 1}}, r"^filter\.a\.\$in is 1; expected a list of values"),
        ({"a": {"$in": [1, None]}}, r"^filter\.a\.\$in\[1\] is null"),
        ({"a": {"$exists": 1}}, r"^filter\.a\.\$exists is 1; expected true or false"),
        ({"$or": {"a": 1}}, r"^filter\.\$or is .*expected a list of filters"),
        ({"$or": [{"a": 1}, {"$not": 3}]}, r"^filter\.\$or\[1\]\.\$not is 3; expected a JSON object"),
        (NESTED_JSON(31), "more than 30 levels"),
        (NESTED_JSON(900), "more than 30 levels"),
    ],
)
def test_other_json_is_refused_with_its_place(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        parse_filter(given)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        (Equal("a", NAN), "finite number"),
        (Equal("a", HUGE), "as a string"),
        (Range("a"), "range without bounds"),
        (Range("a", least=1, most="b"), "are number and string"),
        (Range("a", least=True), "are boolean"),
        (Range("a", least=float("inf")), "finite number"),
        (In("a", tuple(range(1001))), "more than 1000 conditions"),
        (AllOf(tuple(Equal("a", 1) for _ in range(1001))), "more than 1000 conditions"),
        (AnyOf((AllOf(()),) * 1001), "more than 1000 conditions"),
        (Equal("a", "x" * 70_000), "65536 bytes of text"),
        (In("a", ("y" * 40_000, "z" * 40_000)), "65536 bytes of text"),
        (Exists("f" * 70_000), "65536 bytes of text"),
        (NESTED(31), "more than 30 levels"),
        (NESTED(3000), "more than 30 levels"),
    ],
)
def test_filter_out_of_bounds_is_refused(filter: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_filter(filter)


def test_filter_at_the_bounds_is_taken() -> None:
    for filter in (In("a", tuple(range(MAX_CONDITIONS))), NESTED(30), AllOf(()), AnyOf(())):
        assert check_filter(filter) is filter


KINDS = {"brand": frozenset({"string"}), "price": frozenset({"number", "string"}), "box": frozenset[str]()}


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        (Equal("brand", 3), "'brand' with the number 3, and it holds strings"),
        (In("price", (3, "a", True)), "'price' with the boolean True, and it holds numbers and strings"),
        (Range("box", least="a"), "holds only objects"),
    ],
)
def test_kind_that_no_item_has_is_refused(filter: Filter, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_kinds(filter, KINDS.get)


def test_what_can_be_answered_is_taken_though_no_item_has_the_field() -> None:
    for held in (Exists("x"), Equal("price", "a"), Range("price", most=3), AllOf(())):
        check_kinds(held, KINDS.get)
    for gone in (Equal("gone", True), Not(Equal("gone", 1)), Range("gone", most="a"), In("gone", (1, "a"))):
        check_kinds(gone, KINDS.get)


def test_fields_that_no_item_has_are_told_once_each() -> None:
    filter = AllOf((Not(Equal("brnd", 1)), AnyOf((Exists("a"), In("brnd", ()))), Exists("brand"), AnyOf(())))
    assert unknown_fields(filter, KINDS.get) == ("a", "brnd")


# Few of each, so that fields meet values; each kind has a value that another could be taken for.
NAMES = st.sampled_from(["a", "b", "", "$or", "é", "\U0001f426"]) | st.text(max_size=2)
SCALARS = (
    st.sampled_from([True, False, 0, 1, -0.0, 1.0, 0.5, 2**53 - 1, 1 - 2**53])
    | st.sampled_from(["", "a", "ab", "b", "1", "\uffff", "\U00010000"])
    | st.integers(1 - 2**53, 2**53 - 1)
    | st.floats(1 - 2**53, 2**53 - 1)
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
    texts = [json.dumps(metadata, ensure_ascii=False) for _, metadata in items]
    return Columns.of([label for label, _ in items], texts)


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
        labels = [columns.texts[code] if code >= 0 else "" for code in columns.label_codes]
        assert labels == [label for label, _ in items]
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
