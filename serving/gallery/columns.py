"""Labels and metadata of many items by column, so that a filter is answered for all of them at once.

Each element that a field of an item holds is one entry: the item's position, and the value as a double; a
string is the number of its place in a sorted table. Entries are sorted by field, by kind and by value, so
whatever lies between two values is one run of them. The label is a field like others.
"""

import json
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from serving.gallery.checksum import file_checksum
from serving.gallery.disk import written_aside
from serving.gallery.filter import LABEL, AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range, kind_of
from serving.gallery.texts import Texts

__all__ = ["Columns", "ColumnsDamaged"]

_KINDS = ("", "boolean", "number", "string")  # the first: a value that is only there, as an object is
_MASKS = 16  # kept

Mask = NDArray[np.bool_]


class ColumnsDamaged(Exception):
    """The file is missing, or is not the one that was published."""


class Columns:
    """Labels and metadata of n items; they never change, and every method is thread-safe.

    Attributes:
        label_codes: Where each item's label stands in `label_names`, int32 (n,); -1 where it is empty.
        label_names: A sorted table that has every label in it (and other strings).
    """

    def __init__(
        self,
        *,
        values: NDArray[np.float64],
        bounds: NDArray[np.int64],
        groups: NDArray[np.int64],
        names: Texts,
        texts: Texts,
        positions: NDArray[np.int32],
        label_codes: NDArray[np.int32],
    ) -> None:
        """Use `of`, `joined` or `load`."""
        self._values = values  # (e,), ascending within a group
        self._bounds = bounds  # (g + 1,), where each group begins and the last one ends
        self._groups = groups  # (g,), ascending: four times the field's place in `names`, plus the kind
        self._names = names
        self._positions = positions  # (e,)
        self.label_names = texts
        self.label_codes = label_codes
        self._guard = threading.Lock()  # of the masks
        self._masks: OrderedDict[str, Mask] = OrderedDict()

    def __len__(self) -> int:
        return len(self.label_codes)

    @classmethod
    def of(cls, labels: Iterable[str], metadata: Iterable[str]) -> Self:
        """Return the columns of items in order, given by their labels and their metadata as JSON texts.

        Raises:
            ValueError: A text is not one that can be stored as metadata.
        """
        names: dict[str, int] = {}
        texts: dict[str, int] = {}
        groups, positions, values, label_codes = array("q"), array("i"), array("d"), array("i")
        for position, (label, text) in enumerate(zip(labels, metadata, strict=True)):
            label_codes.append(texts.setdefault(label, len(texts)) if label else -1)
            found = {} if text == "{}" else json.loads(text)
            if not isinstance(found, dict):
                raise ValueError("metadata is no JSON object")
            found[LABEL] = label or None
            for name, value in found.items():
                for each in value if isinstance(value, list) else (value,):
                    if isinstance(each, str):
                        kind, number = 3, float(texts.setdefault(each, len(texts)))
                    elif isinstance(each, bool | int | float):
                        kind, number = 1 if isinstance(each, bool) else 2, _double(each)
                    elif each is None or each == []:
                        continue
                    else:
                        kind, number = 0, 0.0
                    groups.append(4 * names.setdefault(name, len(names)) + kind)
                    positions.append(position)
                    values.append(number)
        part = (
            np.frombuffer(groups, np.int64),
            np.frombuffer(values),
            np.frombuffer(positions, np.int32),
            np.frombuffer(label_codes, np.int32),
        )
        return cls._assembled([(list(names), list(texts), *part)])

    @classmethod
    def joined(cls, parts: Sequence["Columns"]) -> Self:
        """Return the columns of the items of all parts, one after the other: cheaper than adding each."""
        return cls._assembled(
            [
                (
                    part._names[:],
                    part.label_names[:],
                    np.repeat(part._groups, np.diff(part._bounds)),
                    part._values,
                    part._positions,
                    part.label_codes,
                )
                for part in parts
            ]
        )

    @classmethod
    def _assembled(cls, parts: Sequence[tuple[Any, ...]]) -> Self:
        """Return columns of parts: names, strings, and group, value and position of entries, label codes."""
        names = sorted(set().union(*(part[0] for part in parts)))
        texts = sorted(set().union(*(part[1] for part in parts)))
        name_codes = {name: code for code, name in enumerate(names)}
        text_codes = {text: code for code, text in enumerate(texts)}
        all_groups, all_values, all_positions, all_labels = [], [], [], []
        count = 0
        for own_names, own_texts, groups, values, positions, labels in parts:
            name_map = np.array([name_codes[name] for name in own_names], np.int64)
            text_map = np.array([*(text_codes[text] for text in own_texts), -1], np.int32)  # -1: no label
            mapped = values.copy()
            is_string = groups & 3 == 3
            mapped[is_string] = text_map[values[is_string].astype(np.int64)]
            all_groups.append(4 * name_map[groups >> 2] + (groups & 3))
            all_values.append(mapped)
            all_positions.append(positions + np.int32(count))
            all_labels.append(text_map[labels])
            count += len(labels)
        group, value = _concatenated(all_groups, np.int64), _concatenated(all_values, np.float64)
        order = np.lexsort((value, group))
        distinct, starts = np.unique(group[order], return_index=True)
        return cls(
            values=value[order],
            bounds=np.append(starts, len(group)).astype(np.int64),
            groups=distinct,
            names=Texts.of(names),
            texts=Texts.of(texts),
            positions=_concatenated(all_positions, np.int32)[order],
            label_codes=_concatenated(all_labels, np.int32),
        )

    def extended(self, labels: Iterable[str], metadata: Iterable[str]) -> "Columns":
        """Return the columns of these items and, behind them, of more.

        Raises:
            ValueError: A text is not one that can be stored as metadata.
        """
        return Columns.joined([self, Columns.of(labels, metadata)])

    def save(self, path: Path) -> str:
        """Write a file that `load` maps, on disk when this returns; it appears whole or not at all.

        Returns:
            Its checksum.

        Raises:
            OSError: It cannot be written.
        """
        arrays = (  # wide ones first, so that each begins at a multiple of its width
            self._values,
            self._bounds,
            self._groups,
            self._names.ends,
            self.label_names.ends,
            self._positions,
            self.label_codes,
            self._names.content,
            self.label_names.content,
        )
        with written_aside(path) as aside:
            with aside.open("wb") as file:
                for each in arrays:
                    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(each))
                    file.write(each.data)  # `tofile` does not tell why it fails
            checksum = file_checksum(aside)
        return checksum  # noqa: RET504 - only once the file is in its place

    @classmethod
    def load(cls, path: Path, checksum: str) -> Self:
        """Map the file that was saved with this checksum.

        Raises:
            ColumnsDamaged: It is missing, differs from what was saved, or cannot be read.
        """
        arrays: list[NDArray[Any]] = []
        try:
            found = file_checksum(path)  # first of all: mapping a truncated file ends the process
            if found != checksum:
                raise ColumnsDamaged(f"{path} has the checksum {found}, published was {checksum}")
            with path.open("rb") as file:
                whole = np.memmap(file, np.uint8, "r")
                file.seek(0)
                while file.tell() < len(whole):
                    npy.read_magic(file)
                    shape, _, dtype = npy.read_array_header_1_0(file)
                    start, size = file.tell(), shape[0] * dtype.itemsize
                    arrays.append(np.asarray(whole[start : start + size]).view(dtype))
                    file.seek(size, os.SEEK_CUR)
            values, bounds, groups, name_ends, text_ends, positions, label_codes, names, texts = arrays
        except (OSError, ValueError) as error:
            raise ColumnsDamaged(f"{path} cannot be read: {error}") from error
        return cls(
            values=values,
            bounds=bounds,
            groups=groups,
            names=Texts(name_ends, names),
            texts=Texts(text_ends, texts),
            positions=positions,
            label_codes=label_codes,
        )

    @cached_property
    def fields(self) -> Mapping[str, frozenset[str]]:
        """The kinds of what each field holds: "string", "number", "boolean"; none where only objects."""
        kinds: dict[int, set[str]] = {}
        for group in self._groups.tolist():
            kinds.setdefault(group >> 2, set()).add(_KINDS[group & 3])
        return {name: frozenset(kinds[code] - {""}) for code, name in enumerate(self._names)}

    def mask(self, filter: Filter) -> Mask:
        """Tell for which items a checked filter holds, bool (n,), read-only."""
        key = repr(filter)  # to Python, Equal("a", True) and Equal("a", 1) are the same
        with self._guard:
            if key in self._masks:
                self._masks.move_to_end(key)
                return self._masks[key]
        mask = self._evaluated(filter)
        mask.flags.writeable = False
        with self._guard:
            self._masks[key] = mask
            while len(self._masks) > _MASKS:
                self._masks.popitem(last=False)
        return mask

    def _evaluated(self, filter: Filter) -> Mask:
        """Return the mask of a filter in an array of its own."""
        match filter:
            case AllOf(filters):
                mask = np.ones(len(self), np.bool_)
                for each in filters:
                    mask &= self._evaluated(each)
                return mask
            case Not(inner):
                return ~self._evaluated(inner)
        mask = np.zeros(len(self), np.bool_)
        match filter:
            case AnyOf(filters):
                for each in filters:
                    mask |= self._evaluated(each)
            case Exists(field):
                mask[self._run(field, 0, len(_KINDS))] = True
            case Equal(field, value):
                mask[self._between(field, least=value, most=value)] = True
            case In(field, values):
                for value in values:
                    mask[self._between(field, least=value, most=value)] = True
            case Range(field, above, least, below, most):
                mask[self._between(field, above=above, least=least, below=below, most=most)] = True
        return mask

    def _run(self, field: str, kind: int, until: int) -> NDArray[np.int32]:
        """Return the positions of a field's entries of kinds from `kind` to before `until`."""
        start, end = self._group(field, kind, until)
        return self._positions[start:end]

    def _group(self, field: str, kind: int, until: int) -> tuple[int, int]:
        code = self._names.find(field)
        if code is None:
            return 0, 0
        first, end = np.searchsorted(self._groups, [4 * code + kind, 4 * code + until])
        return int(self._bounds[first]), int(self._bounds[end])

    def _between(self, field: str, **bounds: Any) -> NDArray[np.int32]:
        """Return the positions of the entries within the bounds of a `Range`, all of one kind."""
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        kind = _KINDS.index(kind_of(next(iter(given.values()))))
        start, end = self._group(field, kind, kind + 1)
        values = self._values[start:end]

        def place(bound: Any, *, behind: bool) -> int:
            if isinstance(bound, str):  # behind a string is before the next one of the table
                found = (
                    bisect_right(self.label_names, bound) if behind else bisect_left(self.label_names, bound)
                )
                return int(np.searchsorted(values, found))
            return int(np.searchsorted(values, _double(bound), side="right" if behind else "left"))

        first, last = 0, len(values)
        for name, bound in given.items():
            at = place(bound, behind=name in ("above", "most"))
            first, last = (max(first, at), last) if name in ("above", "least") else (first, min(last, at))
        return self._positions[start:end][first:last]


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("a whole number is larger than a double") from error


def _concatenated(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
