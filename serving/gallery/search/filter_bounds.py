"""What a filter may be: how large, and of what values; and which of its fields a gallery has."""

import math
from collections.abc import Callable, Iterator

from serving.errors import InvalidArgument
from serving.gallery.search.filter import (
    MAX_LEVELS,
    AllOf,
    AnyOf,
    Equal,
    Exists,
    Filter,
    In,
    Not,
    Range,
    Value,
    kind_of,
)

__all__ = ["MAX_CONDITIONS", "MAX_FILTER_BYTES", "check_filter", "check_kinds", "unknown_fields"]

MAX_CONDITIONS = 1000
"""Most conditions in one filter; each value that a field may be among is one."""
MAX_FILTER_BYTES = 65_536  # of all fields and strings of one; no metadata is longer


def check_filter(filter: Filter) -> Filter:
    """Return the filter if it can be carried out.

    Raises:
        InvalidArgument: A value is of a kind that cannot be compared or not finite, a range has no bound or
            bounds of two kinds, or there are too many conditions or levels.
    """
    conditions = size = 0
    for condition in _conditions(filter, MAX_LEVELS):
        values = [] if isinstance(condition, AllOf | AnyOf) else _values(condition)
        conditions += max(1, len(values))
        if conditions > MAX_CONDITIONS:
            raise InvalidArgument(
                f"the filter has more than {MAX_CONDITIONS} conditions and values; use fewer"
            )
        if isinstance(condition, AllOf | AnyOf):
            continue
        if not isinstance(condition.field, str):
            raise InvalidArgument(f"a field of the filter is {condition.field!r}; expected its name")
        for value in values:
            _check_value(value, condition.field)
        size += sum(
            len(text.encode(errors="replace")) for text in (condition.field, *values) if isinstance(text, str)
        )
        if size > MAX_FILTER_BYTES:
            raise InvalidArgument(f"the filter has more than {MAX_FILTER_BYTES} bytes of text; shorten it")
        if isinstance(condition, Range):
            _check_bounds(values, condition.field)
    return filter


def check_kinds(filter: Filter, kinds_of: Callable[[str], frozenset[str] | None]) -> None:
    """Refuse a checked filter that compares a field with what it never holds.

    A field that no item has is none of that: it may be gone with the last item that had it, and a condition
    on it holds for no item.

    Args:
        filter: The filter.
        kinds_of: Gives the kinds of value that a field holds, or None where no item has it.

    Raises:
        InvalidArgument: Items have a field of the filter, and none holds a value there of the kind that it is
            compared with.
    """
    for condition in _conditions(filter, MAX_LEVELS):
        if isinstance(condition, AllOf | AnyOf | Exists):
            continue
        field, kinds = condition.field, kinds_of(condition.field)
        if kinds is None:
            continue
        for value in _values(condition):
            if kind_of(value) not in kinds:
                held = " and ".join(f"{kind}s" for kind in sorted(kinds)) or "only objects"
                raise InvalidArgument(
                    f"the filter compares the field {field!r} with the {kind_of(value)} {value!r}, and it "
                    f"holds {held}; compare it with those"
                )


def unknown_fields(filter: Filter, kinds_of: Callable[[str], frozenset[str] | None]) -> tuple[str, ...]:
    """Return the fields of a checked filter that no item has, sorted: gone, not there yet, or misspelt."""
    named = {each.field for each in _conditions(filter, MAX_LEVELS) if not isinstance(each, AllOf | AnyOf)}
    return tuple(sorted(field for field in named if kinds_of(field) is None))


def _conditions(filter: Filter, left: int) -> Iterator[Equal | In | Range | Exists | AllOf | AnyOf]:
    """Yield the conditions of a filter, and each `AllOf` and `AnyOf` of none."""
    if not left:
        raise InvalidArgument(f"the filter is nested more than {MAX_LEVELS} levels deep; make it flatter")
    match filter:
        case Not(inner):
            yield from _conditions(inner, left - 1)
        case AllOf(filters) | AnyOf(filters):
            if not isinstance(filters, tuple | list):
                raise InvalidArgument(f"expected several filters, found {type(filters).__name__}")
            if not filters:
                yield filter
            for each in filters:
                yield from _conditions(each, left - 1)
        case Equal() | In() | Range() | Exists():
            yield filter
        case _:
            raise InvalidArgument(f"expected a filter, found {type(filter).__name__}")


def _values(condition: Equal | In | Range | Exists) -> list[Value]:
    match condition:
        case Equal(_, value):
            return [value]
        case In(_, values):
            if not isinstance(values, tuple | list):
                raise InvalidArgument(f"expected several values, found {type(values).__name__}")
            return list(values)
        case Range(_, above, least, below, most):
            return [bound for bound in (above, least, below, most) if bound is not None]
        case Exists():
            return []


def _check_value(value: object, field: str) -> None:
    if kind_of(value) not in ("string", "boolean", "number"):
        raise InvalidArgument(
            f"the filter compares the field {field!r} with a {kind_of(value)}; "
            "expected a string, a number or a boolean"
        )
    if isinstance(value, str):
        return
    try:
        finite = math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        finite = False
    if not finite:
        raise InvalidArgument(
            f"the filter compares the field {field!r} with a number that is not finite or is larger than a "
            "double; expected a finite one"
        )


def _check_bounds(bounds: list[Value], field: str) -> None:
    kinds = {kind_of(bound) for bound in bounds}
    if not kinds:
        raise InvalidArgument(f"the filter has a range without bounds on the field {field!r}; give one")
    if "boolean" in kinds or len(kinds) > 1:
        raise InvalidArgument(
            f"the bounds on the field {field!r} of the filter are {' and '.join(sorted(kinds))}; "
            "expected all numbers or all strings"
        )
