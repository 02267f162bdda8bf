"""Filters read from JSON, and refused with one sentence that says where."""

from typing import Any

import pytest

from serving.errors import InvalidArgument
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
    parse_filter,
    unknown_fields,
)

NAN, HUGE = float("nan"), 10**400


def nested(levels: int) -> Filter:
    filter: Filter = Exists("a")
    for _ in range(levels - 1):
        filter = Not(filter)
    return filter


def nested_json(levels: int) -> Any:
    given: dict[str, Any] = {"a": 1}
    for _ in range(levels - 1):
        given = {"$not": given}
    return given


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
        ({"$nor": []}, r"^filter\.\$nor is unknown; did you mean \$or\?"),
        ({"a": {"$in": 1}}, r"^filter\.a\.\$in is 1; expected a list of values"),
        ({"a": {"$in": [1, None]}}, r"^filter\.a\.\$in\[1\] is null"),
        ({"a": {"$exists": 1}}, r"^filter\.a\.\$exists is 1; expected true or false"),
        ({"$or": {"a": 1}}, r"^filter\.\$or is .*expected a list of filters"),
        ({"$or": [{"a": 1}, {"$not": 3}]}, r"^filter\.\$or\[1\]\.\$not is 3; expected a JSON object"),
        (nested_json(31), "more than 30 levels"),
        (nested_json(900), "more than 30 levels"),
    ],
)
def test_other_json_is_refused_with_its_place(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        parse_filter(given)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        (Equal("a", NAN), "not finite"),
        (Equal("a", HUGE), "larger than a double"),
        (Range("a"), "range without bounds"),
        (Range("a", least=1, most="b"), "are number and string"),
        (Range("a", least=True), "are boolean"),
        (Range("a", least=float("inf")), "not finite"),
        (In("a", tuple(range(1001))), "more than 1000 conditions"),
        (AllOf(tuple(Equal("a", 1) for _ in range(1001))), "more than 1000 conditions"),
        (AnyOf((AllOf(()),) * 1001), "more than 1000 conditions"),
        (Equal("a", "x" * 70_000), "65536 bytes of text"),
        (In("a", ("y" * 40_000, "z" * 40_000)), "65536 bytes of text"),
        (Exists("f" * 70_000), "65536 bytes of text"),
        (nested(31), "more than 30 levels"),
        (nested(3000), "more than 30 levels"),
    ],
)
def test_filter_out_of_bounds_is_refused(filter: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_filter(filter)


def test_filter_at_the_bounds_is_taken() -> None:
    for filter in (In("a", tuple(range(MAX_CONDITIONS))), nested(30), AllOf(()), AnyOf(())):
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
    filter = AllOf(
        (Not(Equal("brnd", "a")), AnyOf((Exists("a"), In("brnd", ()))), Equal("brand", "a"), AnyOf(()))
    )
    assert unknown_fields(filter, KINDS.get) == ("a", "brnd")
