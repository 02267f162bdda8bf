"""What the items of a gallery hold, one entry for each element, sorted so that a run of them has one meaning.

An entry is the item's position and the value as a double: a string is the number of its place in a sorted
table. Entries are sorted by field, by kind and by value. The label is a field like others.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import loads
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.gallery.search.filter import LABEL
from serving.gallery.search.texts import Texts

__all__ = ["KINDS", "Entries", "as_double", "join_entries", "read_entries"]

KINDS = ("", "boolean", "number", "string")
"""The first: a value that is only there, as an object is."""


@dataclass(frozen=True, slots=True)
class Entries:
    """All e entries of n items, in g groups, each of one field and kind.

    Attributes:
        values: float64 (e,), ascending within a group.
        bounds: Where each group begins, and where the last one ends, int64 (g + 1,).
        groups: Four times the field's place in `names`, plus the kind's in `KINDS`, int64 (g,), ascending.
        names: The fields.
        texts: The strings.
        positions: Whose entries they are, int32 (e,).
        label_codes: Where each item's label stands in `texts`, int32 (n,); -1 where it is empty.
    """

    values: NDArray[np.float64]
    bounds: NDArray[np.int64]
    groups: NDArray[np.int64]
    names: Texts
    texts: Texts
    positions: NDArray[np.int32]
    label_codes: NDArray[np.int32]

    def group(self, field: str, kind: int, until: int) -> tuple[int, int]:
        """Return where a field's entries of kinds from `kind` to before `until` begin and end."""
        code = self.names.find(field)
        if code is None:
            return 0, 0
        first, end = np.searchsorted(self.groups, [4 * code + kind, 4 * code + until])
        return int(self.bounds[first]), int(self.bounds[end])


@dataclass(frozen=True, slots=True)
class _Part:
    """Entries that are not sorted yet, of items numbered from 0; strings by their place in `texts`."""

    names: Sequence[str]
    texts: Sequence[str]
    groups: NDArray[np.int64]
    values: NDArray[np.float64]
    positions: NDArray[np.int32]
    label_codes: NDArray[np.int32]


def read_entries(labels: Iterable[str], metadata: Iterable[str]) -> Entries:
    """Return the entries of items in order, given by their labels and their metadata as JSON texts.

    Raises:
        ValueError: A text is not one that can be stored as metadata.
    """
    names: dict[str, int] = {}
    texts: dict[str, int] = {}
    groups, positions, values, label_codes = array("q"), array("i"), array("d"), array("i")
    for position, (label, text) in enumerate(zip(labels, metadata, strict=True)):
        label_codes.append(texts.setdefault(label, len(texts)) if label else -1)
        found = {} if text == "{}" else loads(text)
        if not isinstance(found, dict):
            raise ValueError("metadata is no JSON object")
        found[LABEL] = label or None
        for name, value in found.items():
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, str):
                    kind, number = 3, float(texts.setdefault(each, len(texts)))
                elif isinstance(each, bool | int | float):
                    kind, number = 1 if isinstance(each, bool) else 2, as_double(each)
                elif each is None or each == []:
                    continue
                else:
                    kind, number = 0, 0.0
                groups.append(4 * names.setdefault(name, len(names)) + kind)
                positions.append(position)
                values.append(number)
    part = _Part(
        list(names),
        list(texts),
        np.frombuffer(groups, np.int64),
        np.frombuffer(values),
        np.frombuffer(positions, np.int32),
        np.frombuffer(label_codes, np.int32),
    )
    return _assembled([part])


def join_entries(parts: Sequence[Entries]) -> Entries:
    """Return the entries of the items of all parts, one after the other."""
    return _assembled(
        [
            _Part(
                part.names[:],
                part.texts[:],
                np.repeat(part.groups, np.diff(part.bounds)),
                part.values,
                part.positions,
                part.label_codes,
            )
            for part in parts
        ]
    )


def as_double(value: float) -> float:
    """Return a number as the double that it is compared as.

    Raises:
        ValueError: It is larger than a double.
    """
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("a whole number is larger than a double") from error


def _assembled(parts: Sequence[_Part]) -> Entries:
    names = sorted(set[str]().union(*(part.names for part in parts)))
    texts = sorted(set[str]().union(*(part.texts for part in parts)))
    name_codes = {name: code for code, name in enumerate(names)}
    text_codes = {text: code for code, text in enumerate(texts)}
    all_groups, all_values, all_positions, all_labels = [], [], [], []
    count = 0
    for part in parts:
        name_map = np.array([name_codes[name] for name in part.names], np.int64)
        text_map = np.array([*(text_codes[text] for text in part.texts), -1], np.int32)  # -1: no label
        mapped = part.values.copy()
        is_string = part.groups & 3 == 3
        mapped[is_string] = text_map[part.values[is_string].astype(np.int64)]
        all_groups.append(4 * name_map[part.groups >> 2] + (part.groups & 3))
        all_values.append(mapped)
        all_positions.append(part.positions + np.int32(count))
        all_labels.append(text_map[part.label_codes])
        count += len(part.label_codes)
    group, value = _concatenated(all_groups, np.int64), _concatenated(all_values, np.float64)
    order = np.lexsort((value, group))
    distinct, starts = np.unique(group[order], return_index=True)
    return Entries(
        values=value[order],
        bounds=np.append(starts, len(group)).astype(np.int64),
        groups=distinct,
        names=Texts.of(names),
        texts=Texts.of(texts),
        positions=_concatenated(all_positions, np.int32)[order],
        label_codes=_concatenated(all_labels, np.int32),
    )


def _concatenated(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
