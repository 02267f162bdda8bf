"""Conditions on an item's label and metadata, which a search can demand of its hits.

A condition names a field: a top-level name of the metadata, or `LABEL`. Where the field holds a list, the
condition holds if it does for any element. Values are strings, booleans or numbers; numbers compare as
doubles, strings by code points, booleans are no numbers, and values of two kinds are never equal.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from serving.errors import InvalidArgument
from serving.gallery.item import MAX_EXACT, ROUNDED, plain

__all__ = [
    "LABEL", "MAX_CONDITIONS", "MAX_FILTER_BYTES", "MAX_LEVELS", "AllOf", "AnyOf", "Equal", "Exists",
    "Filter", "In", "Not", "Range", "Value", "check_filter", "check_kinds", "kind_of", "parse_filter",
    "unknown_fields",
]  # fmt: skip

LABEL = "$label"
"""The field that stands for an item's label; an item whose label is empty has none."""

MAX_LEVELS = 30
"""Most levels of filters within filters."""
MAX_CONDITIONS = 1000
"""Most conditions in one filter; each value that a field may be among is one."""
MAX_FILTER_BYTES = 65_536  # of all fields and strings of one; no metadata is longer
_TOO_DEEP = f"the filter is nested more than {MAX_LEVELS} levels deep; make it flatter"
_RANGES = {"$gt": "above", "$gte": "least", "$lt": "below", "$lte": "most"}
_OPERATORS = ("$eq", "$ne", *_RANGES, "$in", "$nin", "$exists")
_JOINTS = ("$and", "$or", "$not", LABEL)

Value: TypeAlias = str | bool | int | float


@dataclass(frozen=True, slots=True)
class Equal:
    """The field has this value."""

    field: str
    value: Value


@dataclass(frozen=True, slots=True)
class In:
    """The field has one of these values."""

    field: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The field lies within the bounds given, all numbers or all strings."""

    field: str
    above: str | float | None = None  # >
    least: str | float | None = None  # >=
    below: str | float | None = None  # <
    most: str | float | None = None  # <=


@dataclass(frozen=True, slots=True)
class Exists:
    """The item has the field, whatever it holds; null and an empty list count as not having it."""

    field: str


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every one of the filters holds; with none of them, always."""

    filters: tuple["Filter", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of the filters holds; with none of them, never."""

    filters: tuple["Filter", ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The filter does not hold."""

    filter: "Filter"


Filter: TypeAlias = Equal | In | Range | Exists | AllOf | AnyOf | Not


def kind_of(value: object) -> str:
    """Return "string", "boolean" or "number"; the name of its type where it is none of them."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else type(value).__name__


def check_filter(filter: Filter) -> Filter:
    """Return the filter if it can be carried out."""
    conditions = size = 0
    for condition in _conditions(filter, MAX_LEVELS):
        values = _values(condition)
        conditions += max(1, len(values))
        if conditions > MAX_CONDITIONS:
            raise InvalidArgument(f"the filter has more than {MAX_CONDITIONS} conditions or values; use less")
        if isinstance(condition, AllOf | AnyOf):
            continue
        for value in values:
            if isinstance(value, str) or abs(value) <= MAX_EXACT:
                continue
            finite = abs(value) < math.inf  # NaN is not
            told = f"{value!r:.40}, and {ROUNDED}" if finite else f"{value}; expected a finite number"
            raise InvalidArgument(f"the filter compares the field {condition.field!r} with {told}")
        texts = (text for text in (condition.field, *values) if isinstance(text, str))
        size += sum(len(text.encode(errors="replace")) for text in texts)
        if size > MAX_FILTER_BYTES:
            raise InvalidArgument(f"the filter has more than {MAX_FILTER_BYTES} bytes of text; shorten it")
        if isinstance(condition, Range):
            _check_bounds(values, condition.field)
    return filter


def check_kinds(filter: Filter, kinds_of: Callable[[str], frozenset[str] | None]) -> None:
    """Refuse a checked filter that compares a field with a kind of value that no item holds there.

    A field that no item has is none of that: it may be gone with the last item that had it, and a condition
    on it holds for no item. `kinds_of` gives the kinds that a field holds, None where no item has it.
    """
    for condition in _conditions(filter, MAX_LEVELS):
        if isinstance(condition, AllOf | AnyOf | Exists) or (kinds := kinds_of(condition.field)) is None:
            continue
        for value in _values(condition):
            if kind_of(value) not in kinds:
                held = " and ".join(f"{kind}s" for kind in sorted(kinds)) or "only objects"
                raise InvalidArgument(
                    f"the filter compares the field {condition.field!r} with the {kind_of(value)} {value!r}, "
                    f"and it holds {held}; compare it with those"
                )


def unknown_fields(filter: Filter, kinds_of: Callable[[str], frozenset[str] | None]) -> tuple[str, ...]:
    """Return the fields of a checked filter that no item has, sorted: gone, not there yet, or misspelt."""
    named = {each.field for each in _conditions(filter, MAX_LEVELS) if not isinstance(each, AllOf | AnyOf)}
    return tuple(sorted(field for field in named if kinds_of(field) is None))


def _conditions(filter: Filter, left: int) -> Iterator[Equal | In | Range | Exists | AllOf | AnyOf]:
    """Yield the conditions of a filter, and each `AllOf` and `AnyOf` of none."""
    if not left:
        raise InvalidArgument(_TOO_DEEP)
    match filter:
        case Not(inner):
            yield from _conditions(inner, left - 1)
        case AllOf(filters) | AnyOf(filters):
            if not filters:
                yield filter
            for each in filters:
                yield from _conditions(each, left - 1)
        case Equal(field) | In(field) | Range(field) | Exists(field) if isinstance(field, str):
            yield filter
        case _:
            raise InvalidArgument(f"{_shown(filter)} is no filter; see `serving.gallery.search.filter`")


def _values(condition: Equal | In | Range | Exists | AllOf | AnyOf) -> list[Value]:
    match condition:
        case Equal(_, value):
            return [plain(value)]
        case In(_, values) if not isinstance(values, str):
            return [plain(value) for value in values]
        case In(field):
            raise InvalidArgument(f"the values of the field {field!r} are one text; give a list of them")
        case Range(_, above, least, below, most):
            return [plain(bound) for bound in (above, least, below, most) if bound is not None]
    return []


def _check_bounds(bounds: list[Value], field: str) -> None:
    kinds = {kind_of(bound) for bound in bounds}
    if not kinds:
        raise InvalidArgument(f"the filter has a range without bounds on the field {field!r}; give one")
    if "boolean" in kinds or len(kinds) > 1:
        raise InvalidArgument(
            f"the bounds on the field {field!r} of the filter are {' and '.join(sorted(kinds))}; "
            "expected all numbers or all strings"
        )


def parse_filter(given: object, *, where: str = "filter") -> Filter:
    """Read a filter from JSON in the form that Pinecone and Chroma have made known.

    `{"brand": "acme", "price": {"$gte": 3, "$lt": 9}}` demands both; the operators are `$eq`, `$ne`, `$gt`,
    `$gte`, `$lt`, `$lte`, `$in`, `$nin` and `$exists`. `{"$or": [...]}`, `{"$and": [...]}` and
    `{"$not": ...}` join filters, and `$label` is the item's label. What is wrong begins with `where`.
    """
    return _parsed(given, where, MAX_LEVELS)


def _parsed(given: object, where: str, left: int) -> Filter:
    if not left:
        raise InvalidArgument(_TOO_DEEP)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidArgument(f'{where} is {_shown(given)}; expected a JSON object, as {{"brand": "acme"}}')
    found = [_part(name, value, f"{where}.{name}", left) for name, value in given.items()]
    return found[0] if len(found) == 1 else AllOf(tuple(found))


def _part(name: str, value: object, where: str, left: int) -> Filter:
    """Return what one name of a JSON object stands for."""
    match name:
        case "$and" | "$or":
            if not isinstance(value, list):
                raise InvalidArgument(f"{where} is {_shown(value)}; expected a list of filters")
            inner = tuple(_parsed(each, f"{where}[{at}]", left - 1) for at, each in enumerate(value))
            return AllOf(inner) if name == "$and" else AnyOf(inner)
        case "$not":
            return Not(_parsed(value, where, left - 1))
    if name.startswith("$") and name != LABEL:
        raise InvalidArgument(f"{where} is unknown; {_nearest(name, _JOINTS)}")
    if not isinstance(value, Mapping):
        return Equal(name, _value(value, where))
    if not value:
        raise InvalidArgument(f"{where} has no condition; expected a value, or an operator as $gte")
    bounds: dict[str, Any] = {}
    found: list[Filter] = []
    for operator, operand in value.items():
        place = f"{where}.{operator}"
        if operator in _RANGES:
            bounds[_RANGES[operator]] = _value(operand, place)
        else:
            found.append(_condition(name, operator, operand, place))
    if bounds:
        found.append(Range(name, **bounds))
    return found[0] if len(found) == 1 else AllOf(tuple(found))


def _condition(field: str, operator: object, operand: object, where: str) -> Filter:
    match operator:
        case "$eq":
            return Equal(field, _value(operand, where))
        case "$ne":
            return Not(Equal(field, _value(operand, where)))
        case "$in" | "$nin":
            if not isinstance(operand, list):
                raise InvalidArgument(f"{where} is {_shown(operand)}; expected a list of values")
            among = In(field, tuple(_value(each, f"{where}[{at}]") for at, each in enumerate(operand)))
            return among if operator == "$in" else Not(among)
        case "$exists":
            if not isinstance(operand, bool):
                raise InvalidArgument(f"{where} is {_shown(operand)}; expected true or false")
            return Exists(field) if operand else Not(Exists(field))
    if operator == "$contains":
        hint = f'a text is compared whole, and {{"{field}": VALUE}} holds where one element of a list is it'
    else:
        hint = _nearest(str(operator), _OPERATORS)
    raise InvalidArgument(f"{where} is unknown; {hint}")


def _value(value: object, where: str) -> Value:
    value = plain(value)
    if isinstance(value, str | bool | int | float):
        return value
    hint = {list: "; use $in for one of several", type(None): "; use $exists for a field that is not there"}
    raise InvalidArgument(
        f"{where} is {_shown(value)}; expected a string, a number or a boolean{hint.get(type(value), '')}"
    )


def _shown(value: object) -> str:
    return "null" if value is None else f"{value!r:.40}"


def _nearest(name: str, known: tuple[str, ...]) -> str:
    nearest = get_close_matches(name, known, 1)
    return f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(known)}"
