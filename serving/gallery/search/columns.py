"""Labels and metadata of many items by column, so that a filter is answered for all of them at once."""

import os
import threading
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
from serving.gallery.search.entries import KINDS, Entries, as_double, join_entries, read_entries
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range, kind_of
from serving.gallery.search.texts import Texts

__all__ = ["Columns", "ColumnsDamaged"]

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

    def __init__(self, entries: Entries) -> None:
        """Use `of`, `joined` or `load`."""
        self._entries = entries
        self.label_names = entries.texts
        self.label_codes = entries.label_codes
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
        return cls(read_entries(labels, metadata))

    @classmethod
    def joined(cls, parts: Sequence["Columns"]) -> Self:
        """Return the columns of the items of all parts, one after the other: cheaper than adding each."""
        return cls(join_entries([part._entries for part in parts]))

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
        entries = self._entries
        arrays = (  # wide ones first, so that each begins at a multiple of its width
            entries.values,
            entries.bounds,
            entries.groups,
            entries.names.ends,
            entries.texts.ends,
            entries.positions,
            entries.label_codes,
            entries.names.content,
            entries.texts.content,
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
        tables = Texts(name_ends, names), Texts(text_ends, texts)
        return cls(Entries(values, bounds, groups, *tables, positions, label_codes))

    @cached_property
    def fields(self) -> Mapping[str, frozenset[str]]:
        """The kinds of what each field holds: "string", "number", "boolean"; none where only objects."""
        kinds: dict[int, set[str]] = {}
        for group in self._entries.groups.tolist():
            kinds.setdefault(group >> 2, set()).add(KINDS[group & 3])
        return {name: frozenset(kinds[code] - {""}) for code, name in enumerate(self._entries.names)}

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
                start, end = self._entries.group(field, 0, len(KINDS))
                mask[self._entries.positions[start:end]] = True
            case Equal(field, value):
                mask[self._between(field, least=value, most=value)] = True
            case In(field, values):
                for value in values:
                    mask[self._between(field, least=value, most=value)] = True
            case Range(field, above, least, below, most):
                mask[self._between(field, above=above, least=least, below=below, most=most)] = True
        return mask

    def _between(self, field: str, **bounds: Any) -> NDArray[np.int32]:
        """Return the positions of the entries within the bounds of a `Range`, all of one kind."""
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        kind = KINDS.index(kind_of(next(iter(given.values()))))
        start, end = self._entries.group(field, kind, kind + 1)
        values = self._entries.values[start:end]

        def place(bound: Any, *, behind: bool) -> int:
            if isinstance(bound, str):  # behind a string is before the next one of the table
                found = (
                    bisect_right(self.label_names, bound) if behind else bisect_left(self.label_names, bound)
                )
                return int(np.searchsorted(values, found))
            return int(np.searchsorted(values, as_double(bound), side="right" if behind else "left"))

        first, last = 0, len(values)
        for name, bound in given.items():
            at = place(bound, behind=name in ("above", "most"))
            first, last = (max(first, at), last) if name in ("above", "least") else (first, min(last, at))
        return self._entries.positions[start:end][first:last]
