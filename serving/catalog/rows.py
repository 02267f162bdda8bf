"""What a data set is once it is read: rows (key, image, label, split), sorted by key."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from serving.catalog.picture import Picture
from serving.errors import BadData

__all__ = ["SPLITS", "Catalog", "Row", "known_split", "make_catalog", "path_text"]

SPLITS: Final = {
    "train": "train", "test": "test", "query": "query", "gallery": "gallery",
    "val": "", "valid": "", "validation": "",
}  # fmt: skip
"""What a data set may call its sides, in lower case, and what they are here."""


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a data set."""

    key: str
    """Unique in the catalogue: the POSIX path from the root, or what a table or a list calls the image."""
    image: Picture
    label: str
    """Class, empty when the data set names none: such a row neither trains nor tests."""
    split: str = ""
    """`train`, `test`, `query`, `gallery`, or empty when the data set names none."""
    metadata: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All images of a data set, sorted by key."""

    root: Path
    format: str
    rows: tuple[Row, ...]
    empty: tuple[str, ...] = ()
    """Labels of folders that hold neither an image nor a folder."""
    table: Path | None = None
    """Absolute path of the one file that was read, of a table or where one file of several was asked for."""
    absent: tuple[Row, ...] = ()
    """Rows of a table or a list, and dangling links, whose image is not there."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Paths from the root that the data set names and that are not there, sorted."""
        return tuple(sorted(map(self.path_of, self.absent)))

    @property
    def unlabelled(self) -> int:
        """How many rows are of no class; `select` leaves them out of every side."""
        return sum(not row.label for row in self.rows)

    def path_of(self, row: Row) -> str:
        """Return the POSIX path of a row's image from the root: what may be told to others."""
        return path_text(os.path.relpath(row.image.path, self.root))


def make_catalog(
    root: Path,
    format: str,
    rows: Sequence[Row],
    *,
    empty: Sequence[str] = (),
    absent: Sequence[Row] = (),
    table: Path | None = None,
) -> Catalog:
    """Return a catalogue with its rows and empty classes sorted, or raise BadData where a key comes twice."""
    first = dict[str, Row]()
    for row in (*rows, *absent):
        if first.setdefault(row.key, row) is not row:
            raise BadData(
                f"the key {row.key!r} is that of {first[row.key].image} and again of {row.image}; each image"
                " needs its own"
            )
    ordered = sorted(rows, key=lambda row: row.key)
    return Catalog(root, format, tuple(ordered), tuple(sorted(empty)), table, tuple(absent))


def known_split(given: str, where: str) -> str:
    """Return the side that a table's cell names, or raise BadData where it is none."""
    if given and given.lower() not in SPLITS:
        raise BadData(f"{where} has the split {given!r}; give train, test, query, gallery or none")
    return SPLITS.get(given.lower(), "")


def path_text(path: str | PurePosixPath) -> str:
    """Return a path as text that any store and wire can hold; a byte that is not UTF-8 is written as hex."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
