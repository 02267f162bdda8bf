"""How many items have each field and each value, from the columns of all parts of a gallery.

A part is the columns of n items and which of them are deleted or replaced, bool (n,): those count nowhere.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray

from serving.gallery.search.columns import KINDS, Columns, Mask
from serving.gallery.search.filter import Value

__all__ = ["FieldCount", "ValueCount", "count_fields", "count_values"]

Part = tuple[Columns, Mask]
Counts = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Values of one kind, distinct and ascending, strings by their places in a table; and how many have each."""

_BOOLEAN, _NUMBER, _STRING = 1, 2, 3  # of `KINDS`


@dataclass(frozen=True, slots=True)
class FieldCount:
    """A field, the kinds of what it holds, sorted (none where only objects), and how many items have it.

    `least` and `most` are of its numbers, None where it holds none.
    """

    name: str
    kinds: tuple[str, ...]
    items: int
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class ValueCount:
    """A value, a number always as a double, and how many items have it."""

    value: Value
    items: int


def count_fields(parts: Sequence[Part], limit: int) -> list[FieldCount]:
    """Return the fields that items have, sorted by name, the label among them: the `limit` of most values."""
    entries = Counter[str]()
    for columns, dead in parts:
        counts = np.diff(columns.bounds)
        gone = np.flatnonzero(dead[columns.positions]) if dead.any() else np.empty(0, np.int64)
        counts -= np.bincount(np.searchsorted(columns.bounds, gone, "right") - 1, minlength=len(counts))
        for group, count in zip(columns.groups.tolist(), counts.tolist(), strict=True):
            entries[columns.names[group >> 2]] += count
    fullest = nsmallest(limit, ((-count, name) for name, count in entries.items() if count))
    return [_field(name, parts) for name in sorted(name for _, name in fullest)]


def count_values(parts: Sequence[Part], field: str, prefix: str, limit: int) -> tuple[list[ValueCount], int]:
    """Return the `limit` most frequent values of a field, and how many there are in all.

    Ties are in the order of the values: booleans, numbers, strings. With a prefix it is only strings that
    begin with it, whatever the case of their letters.
    """
    strings, new = _in_one_table(parts, [_counts(*part, field, _STRING, prefix) for part in parts])
    found = [(_STRING, _in_all(strings))]
    if not prefix:
        others = (_BOOLEAN, _NUMBER)
        found[:0] = [(kind, _in_all([_counts(*part, field, kind) for part in parts])) for kind in others]
    items = np.concatenate([items for _, (_, items) in found])
    values = np.concatenate([values for _, (values, _) in found])
    kinds = np.repeat([kind for kind, _ in found], [len(items) for _, (_, items) in found])
    top = np.arange(len(items))
    if len(items) > limit:
        last = np.partition(items, -limit)[-limit]
        top = np.concatenate([np.flatnonzero(items > last), np.flatnonzero(items == last)])[:limit]
    top = top[np.argsort(-items[top], kind="stable")]
    table, made = parts[0][0].texts, []
    for kind, value, count in zip(
        kinds[top].tolist(), values[top].tolist(), items[top].tolist(), strict=True
    ):
        if kind == _STRING:
            made.append(ValueCount(new[value] if value in new else table[int(value)], count))
        else:
            made.append(ValueCount(bool(value) if kind == _BOOLEAN else value, count))
    return made, len(items)


def _field(name: str, parts: Sequence[Part]) -> FieldCount:
    """Count one field, which items have."""
    kinds, items, numbers = set[str](), 0, list[float]()
    for columns, dead in parts:
        own = columns.positions[columns.group(name, 0, len(KINDS))]
        if not len(own):
            continue
        for kind, word in enumerate(KINDS):
            run = columns.group(name, kind, kind + 1)
            live = np.flatnonzero(~dead[columns.positions[run]])
            if len(live):
                kinds.add(word)
                if kind == _NUMBER:
                    numbers += columns.values[run][live[[0, -1]]].tolist()
        having = np.zeros(len(columns), np.bool_)  # an item may hold several values
        having[own] = True
        items += int(np.count_nonzero(having & ~dead))
    least, most = (min(numbers), max(numbers)) if numbers else (None, None)
    return FieldCount(name, tuple(sorted(kinds - {""})), items, least, most)


def _counts(columns: Columns, dead: Mask, field: str, kind: int, prefix: str = "") -> Counts:
    """Count the values of one kind in a part, or those strings that begin with a prefix."""
    run = columns.group(field, kind, kind + 1)
    values, positions = columns.values[run], columns.positions[run]
    if prefix:
        begun = [
            slice(*np.searchsorted(values, (texts.start, texts.stop)).tolist())
            for texts in columns.texts.beginning(prefix)
        ]
        values = np.concatenate([values[:0], *(values[each] for each in begun)])
        positions = np.concatenate([positions[:0], *(positions[each] for each in begun)])
    live = ~dead[positions]
    values, positions = values[live], positions[live]
    if not len(values):
        return np.empty(0), np.empty(0, np.int64)
    # Entries of one value are in the order of their items; a list may hold a value twice.
    values = values[np.append(True, (values[1:] != values[:-1]) | (positions[1:] != positions[:-1]))]
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return values[starts], np.diff(starts, append=len(values))


def _in_one_table(parts: Sequence[Part], strings: Sequence[Counts]) -> tuple[list[Counts], dict[float, str]]:
    """Give each string its place in the table of the first part, or one between two of that where it is new.

    Returns the strings of each part so, and the new ones by their places.
    """
    placed, unknown = [strings[0]], []
    for (columns, _), (codes, items) in zip(parts[1:], strings[1:], strict=True):
        own = codes.astype(np.int64)
        places = columns.places_in(parts[0][0].texts)[own]
        missing = np.flatnonzero(places % 1)
        unknown.append((places, missing, [columns.texts[at] for at in own[missing].tolist()]))
        placed.append((places, items))
    texts = sorted(set[str]().union(*(missed for _, _, missed in unknown)))
    ranks = {text: rank / (len(texts) + 1) for rank, text in enumerate(texts, 1)}
    new = dict[float, str]()
    for places, missing, missed in unknown:
        places[missing] += np.array([ranks[text] - 0.5 for text in missed], np.float64)
        new.update(zip(places[missing].tolist(), missed, strict=True))
    return placed, new


def _in_all(counts: Sequence[Counts]) -> Counts:
    """Add up counts of all parts, the large first one last: each time both are copied."""
    first, *rest = counts
    return _merged(first, reduce(_merged, rest)) if rest else first


def _merged(counts: Counts, more: Counts) -> Counts:
    """Add up counts of the values of two parts."""
    (values, items), (others, added) = counts, more
    places = np.searchsorted(values, others)
    both = np.searchsorted(values, others, "right") > places
    items = items.copy()
    items[places[both]] += added[both]
    new = places[~both]
    return np.insert(values, new, others[~both]), np.insert(items, new, added[~both])
