"""Filters as expressions of Milvus, and what is stored of each item so that they can be told exactly.

    terms   one for each field that an item has, for each kind of value there, and for each value: a condition
            on a value is whether there is its term, whatever the field and the value are made of
    bounds  the smallest and the largest number and string of each field, for ranges

A term is a hash: no quote, bracket or letter of another alphabet in a field or value reaches an expression.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from serving.errors import InvalidArgument
from serving.gallery.item import plain
from serving.gallery.milvus.server import MAX_JSON_BYTES, MAX_TERMS, TERM_LENGTH
from serving.gallery.search.columns import elements
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range, kind_of

__all__ = ["ALWAYS", "COMPARED", "among", "expression", "having", "indexed", "quoted"]

ALWAYS, _NEVER = "version >= 0", "version < 0"
COMPARED = 256
"""Characters of a string that a range looks at."""
_KINDS = ("boolean", "number", "string")
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r"})


def indexed(label: str, metadata: str) -> tuple[list[str], str]:
    """Return the terms of an item, of its metadata as JSON, and its bounds as JSON."""
    terms, bounds = set[str](), dict[str, float | str]()
    for field, value in elements(label, metadata):
        kind = kind_of(value)
        terms.add(_term(field))
        if kind not in _KINDS:
            continue
        group = _term(field, kind)
        terms |= {group, _value_term(field, value)}
        if kind != "boolean":
            bound: Any = _bound(value)
            bounds[f"l{group}"] = min(bounds.get(f"l{group}", bound), bound)
            bounds[f"h{group}"] = max(bounds.get(f"h{group}", bound), bound)
    if len(terms) > MAX_TERMS:
        raise InvalidArgument(
            f"its fields have {len(terms)} different values, kinds and names, and a gallery on Milvus "
            f"takes {MAX_TERMS}; put long lists elsewhere"
        )
    return sorted(terms), fitting(json.dumps(bounds, ensure_ascii=False), "what its fields hold")


def fitting(text: str, what: str) -> str:
    """Return a JSON text if Milvus takes it."""
    if (size := len(text.encode())) > MAX_JSON_BYTES:
        raise InvalidArgument(f"{what} comes to {size} bytes of JSON; Milvus takes {MAX_JSON_BYTES}")
    return text


def expression(filter: Filter) -> str:
    """Return the expression of a checked filter."""
    match filter:
        case Equal(field, value):
            return _any_of([_value_term(field, plain(value))])
        case In(field, values):
            return _any_of([_value_term(field, plain(value)) for value in values])
        case Exists(field):
            return having(field)
        case Range():
            return _within(filter)
        case Not(inner):
            return f"not ({expression(inner)})"
        case AllOf(filters):
            return " and ".join(f"({expression(each)})" for each in filters) or ALWAYS
        case AnyOf(filters):
            return " or ".join(f"({expression(each)})" for each in filters) or _NEVER


def having(field: str, kind: str = "") -> str:
    """Return the expression for what has a field, or values of a kind there."""
    return _any_of([_term(field, kind) if kind else _term(field)])


def among(keys: Iterable[str]) -> str:
    """Return the expression for the items of some keys."""
    return f"key in [{', '.join(map(quoted, keys))}]"


def quoted(text: str) -> str:
    """Write a string as Milvus reads it."""
    return f'"{text.translate(_ESCAPED)}"'


def _within(bounds: Range) -> str:
    given = {">": bounds.above, ">=": bounds.least, "<": bounds.below, "<=": bounds.most}
    group, found = "", list[str]()
    for sign, value in given.items():
        if value is not None:
            group = _term(bounds.field, kind_of(plain(value)))
            bound = _bound(plain(value))
            told = quoted(bound) if isinstance(bound, str) else repr(bound)
            found.append(f'bounds["{"h" if ">" in sign else "l"}{group}"] {sign} {told}')
    return " and ".join([_any_of([group]), *found])


def _any_of(terms: list[str]) -> str:
    return f"array_contains_any(terms, {json.dumps(terms)})" if terms else _NEVER


def _bound(value: Any) -> float | str:
    return value[:COMPARED] if isinstance(value, str) else float(value) + 0.0  # of which -0.0 is none


def _value_term(field: str, value: Any) -> str:
    kind = kind_of(value)
    return _term(field, kind, repr(float(value) + 0.0) if kind == "number" else str(value))


def _term(*parts: str) -> str:
    whole = json.dumps(parts).encode()
    return blake2b(whole, digest_size=TERM_LENGTH // 2).hexdigest()
