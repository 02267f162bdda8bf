"""Labels and metadata of many items by column, so that a filter is answered for all of them at once.

Each element that an item holds in a field is an entry: the item's position, and the value as a double (of a
string, its place in a sorted table). Entries are sorted by field, by kind and by value, so that those within
bounds are one run. The label is a field like others.
"""

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json import loads
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from serving.gallery.disk import file_checksum, written_aside
from serving.gallery.index.index import published
from serving.gallery.search.filter import LABEL, AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range, kind_of

__all__ = ["KINDS", "Columns", "Mask", "TextTable", "elements"]

Mask = NDArray[np.bool_]

KINDS = ("", "boolean", "number", "string")
"""The kinds of value, as a field's entries are sorted; the first stands for what is only there, an object."""

_NUMBER, _STRING = 2, 3
_MASKS = 32  # kept at most
_SEARCHED = 200  # to look a string up in a mapped table costs as much as to read so many of it


@dataclass(frozen=True, eq=False)
class TextTable:
    """Distinct strings, ascending by code points, that may lie in a mapped file."""

    ends: NDArray[np.int64]  # (t,): where each string ends
    content: NDArray[np.uint8]  # (b,): their UTF-8, one after the other

    @classmethod
    def of(cls, texts: Iterable[str]) -> "TextTable":
        """Return the table of `texts`, which are ascending; UnicodeEncodeError at a lone surrogate."""
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        return cls(ends, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, at: int) -> str:
        start = int(self.ends[at - 1]) if at else 0
        return self.content[start : int(self.ends[at])].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        whole, start = self.content.tobytes(), 0
        for end in self.ends.tolist():
            yield whole[start:end].decode()
            start = end

    def find(self, text: str) -> int | None:
        """Return the place of a string, or None where it is not in the table."""
        place = bisect_left(self, text)
        return place if place < len(self) and self[place] == text else None

    def places(self, texts: "TextTable") -> NDArray[np.float64]:
        """Return where each of other strings stands, (t,): half a place before the next one if it is new."""
        known = list(self) if _SEARCHED * len(texts) > len(self) else self
        places = np.empty(len(texts))
        for at, text in enumerate(texts):
            place = bisect_left(known, text)
            places[at] = place if place < len(known) and known[place] == text else place - 0.5
        return places

    def beginning(self, prefix: str) -> list[slice]:
        """Return where the strings stand that begin with `prefix`, whatever the case of its letters."""
        found = {"": (0, len(self))}
        for letter in prefix:  # each in both cases, as long as there is a string that begins so
            either = {letter, letter.lower(), letter.upper()}
            runs = {start + each: run for start, run in found.items() for each in either}
            found = {begun: self._run(begun, *run) for begun, run in runs.items()}
            found = {begun: (first, end) for begun, (first, end) in found.items() if first < end}
        return [slice(*run) for run in sorted(found.values())]

    def _run(self, begun: str, first: int, end: int) -> tuple[int, int]:
        """Return where, from `first` to before `end`, the strings stand that begin so."""
        first = bisect_left(self, begun, first, end)
        return first, bisect_right(self, begun, first, end, key=lambda text: text[: len(begun)])


@dataclass(frozen=True, eq=False)
class Columns:
    """Labels and metadata of n items in e entries and g groups; it never changes and is thread-safe."""

    values: NDArray[np.float64]  # (e,), ascending within a group
    bounds: NDArray[np.int64]  # (g + 1,): where each group begins, and where the last one ends
    groups: NDArray[np.int64]  # (g,), ascending: 4 times the field's place in `names`, plus the kind's
    names: TextTable  # of the fields
    texts: TextTable  # all strings, the labels among them
    positions: NDArray[np.int32]  # (e,): whose entries they are
    label_codes: NDArray[np.int32]  # (n,): where each item's label stands in `texts`; -1: it is empty
    _masks: dict[str, Mask] = field(default_factory=dict)
    _places: dict[TextTable, NDArray[np.float64]] = field(default_factory=dict)
    _numbers: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label_codes)

    @staticmethod
    def of(labels: Iterable[str], metadata: Iterable[str]) -> "Columns":
        """Return the columns of items, given by labels and metadata in JSON; ValueError where it is not."""
        return _sorted([_read(labels, metadata)])

    @staticmethod
    def joined(parts: Sequence["Columns"]) -> "Columns":
        """Return the columns of the items of all parts, one after the other."""
        return _sorted([_read([], []), *(part._entries() for part in parts)])

    def save(self, path: Path) -> str:
        """Write a file that `load` maps, whole or not at all, on disk; returns its checksum."""
        numbers = self.values, self.bounds, self.groups, self.names.ends, self.texts.ends
        narrow = self.positions, self.label_codes, self.names.content, self.texts.content
        with written_aside(path) as aside:
            with aside.open("wb") as file:
                for each in (*numbers, *narrow):  # wide ones first: each begins at a multiple of its width
                    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(each))
                    file.write(each.data)  # `tofile` does not tell why it fails
            checksum = file_checksum(aside)
        return checksum  # noqa: RET504 - only once the file is in its place

    @staticmethod
    def load(path: Path, checksum: str) -> "Columns":
        """Map the file that was saved with this checksum; IndexDamaged where it is not there."""
        arrays: list[NDArray[Any]] = []
        with published(path, checksum), path.open("rb") as file:
            whole = np.memmap(file, np.uint8, "r")
            file.seek(0)
            while file.tell() < len(whole):
                npy.read_magic(file)
                shape, _, dtype = npy.read_array_header_1_0(file)
                start, size = file.tell(), shape[0] * dtype.itemsize
                arrays.append(np.asarray(whole[start : start + size]).view(dtype))
                file.seek(size, os.SEEK_CUR)
            values, bounds, groups, name_ends, text_ends, positions, label_codes, names, texts = arrays
        tables = TextTable(name_ends, names), TextTable(text_ends, texts)
        return Columns(values, bounds, groups, *tables, positions, label_codes)

    @cached_property
    def fields(self) -> Mapping[str, frozenset[str]]:
        """The kinds of what each field holds: "string", "number", "boolean"; none where only objects."""
        kinds: dict[int, set[str]] = {}
        for group in self.groups.tolist():
            kinds.setdefault(group >> 2, set()).add(KINDS[group & 3])
        return {name: frozenset(kinds[code] - {""}) for code, name in enumerate(self.names)}

    def mask(self, filter: Filter) -> Mask:
        """Tell for which items a checked filter holds, bool (n,), read-only."""
        key = repr(filter)  # to Python, Equal("a", True) and Equal("a", 1) are the same
        mask = self._masks.get(key)
        if mask is None:
            mask = self._evaluated(filter)
            mask.flags.writeable = False
            if len(self._masks) >= _MASKS:
                self._masks.clear()
            self._masks[key] = mask
        return mask

    def places_in(self, table: TextTable) -> NDArray[np.float64]:
        """Return where the strings stand in the table of an older part, as `TextTable.places`; it is kept."""
        if table not in self._places:
            self._places[table] = table.places(self.texts)
        return self._places[table]

    def numbers(self, name: str) -> NDArray[np.float32]:
        """Return the number that each item has in a field, (n,), NaN where it has none; it is kept."""
        found = self._numbers.get(name)
        if found is None:
            group = self.group(name, _NUMBER, _NUMBER + 1)
            found = np.full(len(self), np.nan, np.float32)
            with np.errstate(over="ignore"):
                found[self.positions[group]] = self.values[group]
            self._numbers[name] = found
        return found

    def _entries(self) -> "_Entries":
        groups = np.repeat(self.groups, np.diff(self.bounds))
        tables = list(self.names), list(self.texts)
        return _Entries(*tables, groups, self.values, self.positions, self.label_codes)

    def _evaluated(self, filter: Filter) -> Mask:
        """Return the mask of a filter in an array of its own."""
        mask = np.zeros(len(self), np.bool_)
        match filter:
            case Not(inner):
                return ~self._evaluated(inner)
            case AllOf(filters):
                mask[:] = True
                for each in filters:
                    mask &= self._evaluated(each)
            case AnyOf(filters):
                for each in filters:
                    mask |= self._evaluated(each)
            case Exists(name):
                mask[self.positions[self.group(name, 0, len(KINDS))]] = True
            case Equal(name, value):
                mask[self._within(Range(name, least=value, most=value))] = True
            case In(name, values):
                for value in values:
                    mask[self._within(Range(name, least=value, most=value))] = True
            case Range():
                mask[self._within(filter)] = True
        return mask

    def group(self, name: str, kind: int, until: int) -> slice:
        """Return where a field's entries are whose kinds stand in `KINDS` from `kind` to before `until`."""
        code = self.names.find(name)
        if code is None:
            return slice(0, 0)
        first, end = np.searchsorted(self.groups, [4 * code + kind, 4 * code + until])
        return slice(int(self.bounds[first]), int(self.bounds[end]))

    def _within(self, bounds: Range) -> NDArray[np.int32]:
        """Return the positions of the entries within bounds, which are all of one kind."""
        lower = [(bounds.above, True), (bounds.least, False)]
        upper = [(bounds.below, False), (bounds.most, True)]
        given = next(bound for bound, _ in lower + upper if bound is not None)
        kind = KINDS.index(kind_of(given))
        group = self.group(bounds.field, kind, kind + 1)
        values = self.values[group]
        firsts = [self._place(values, bound, behind) for bound, behind in lower if bound is not None]
        lasts = [self._place(values, bound, behind) for bound, behind in upper if bound is not None]
        return self.positions[group][max(firsts, default=0) : min(lasts, default=len(values))]

    def _place(self, values: NDArray[np.float64], bound: Any, behind: bool) -> int:
        """Return where a bound would stand among ascending values, before or behind those equal to it."""
        if isinstance(bound, str):  # behind a string is before the next one of the table
            bound, behind = (bisect_right if behind else bisect_left)(self.texts, bound), False
        return int(np.searchsorted(values, float(bound), side="right" if behind else "left"))


class _Entries(NamedTuple):
    """Entries in any order, of items numbered from 0; names and strings by their places in the lists."""

    names: list[str]
    texts: list[str]
    groups: NDArray[np.int64]
    values: NDArray[np.float64]
    positions: NDArray[np.int32]
    label_codes: NDArray[np.int32]


def _read(labels: Iterable[str], metadata: Iterable[str]) -> _Entries:
    names: dict[str, int] = {}
    texts: dict[str, int] = {}
    groups, positions, values, label_codes = array("q"), array("i"), array("d"), array("i")
    for position, (label, text) in enumerate(zip(labels, metadata, strict=True)):
        label_codes.append(texts.setdefault(label, len(texts)) if label else -1)
        for name, value in elements(label, text):
            if isinstance(value, str):
                kind, number = _STRING, float(texts.setdefault(value, len(texts)))
            elif isinstance(value, bool | int | float):
                kind, number = 1 if isinstance(value, bool) else 2, float(value)
            else:
                kind, number = 0, 0.0
            groups.append(4 * names.setdefault(name, len(names)) + kind)
            positions.append(position)
            values.append(number)
    narrow = np.frombuffer(positions, np.int32), np.frombuffer(label_codes, np.int32)
    return _Entries(list(names), list(texts), np.frombuffer(groups, np.int64), np.frombuffer(values), *narrow)


def elements(label: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each element of each field of an item; null and an empty list are none."""
    held = {} if text == "{}" else loads(text)
    if not isinstance(held, dict):
        raise ValueError("metadata is no JSON object")
    held[LABEL] = label or None
    for name, value in held.items():
        for each in value if isinstance(value, list) else (value,):
            if each is not None and each != []:
                yield name, each


def _sorted(parts: Sequence[_Entries]) -> Columns:
    names = sorted(set[str]().union(*(part.names for part in parts)))
    texts = sorted(set[str]().union(*(part.texts for part in parts)))
    name_codes = {name: code for code, name in enumerate(names)}
    text_codes = {text: code for code, text in enumerate(texts)}
    groups, values, positions, labels = [], [], [], []
    count = 0
    for part in parts:
        name_map = np.array([name_codes[name] for name in part.names], np.int64)
        text_map = np.array([*(text_codes[text] for text in part.texts), -1], np.int32)  # -1: no label
        mapped = part.values.copy()
        is_string = part.groups & 3 == _STRING
        mapped[is_string] = text_map[part.values[is_string].astype(np.int64)]
        groups.append(4 * name_map[part.groups >> 2] + (part.groups & 3))
        values.append(mapped)
        positions.append(part.positions + np.int32(count))
        labels.append(text_map[part.label_codes])
        count += len(part.label_codes)
    group, value = np.concatenate(groups), np.concatenate(values)
    order = np.lexsort((value, group))
    distinct, starts = np.unique(group[order], return_index=True)
    return Columns(
        values=value[order],
        bounds=np.append(starts, len(group)).astype(np.int64),
        groups=distinct,
        names=TextTable.of(names),
        texts=TextTable.of(texts),
        positions=np.concatenate(positions)[order],
        label_codes=np.concatenate(labels),
    )
