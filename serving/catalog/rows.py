"""What a data set is once it is read: rows (key, image, label, split), and which of them train.

The split is cut by a rule, or is the data set's own.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.picture import Picture
from serving.errors import BadData

__all__ = [
    "SPLITS", "Catalog", "Plain", "Row", "Split", "SplitRule", "known_split", "path_text", "select",
    "select_missing", "tell_unread",
]  # fmt: skip

SPLITS: Final = {
    "train": "train", "test": "test", "query": "query", "gallery": "gallery",
    "val": "", "valid": "", "validation": "",
}  # fmt: skip
"""What a data set may call its sides, in lower case, and what they are here."""
Plain = str | int | float | bool
Split = Literal["all", "train", "test", "query", "gallery"]
_ESCAPE: Final = re.compile(rb"\\(?=x(?:5c|[89a-f][0-9a-f]))")  # as a name may have it spelled out
_GIVEN: Final = {"train": ("train",), "test": ("test", "query", "gallery")}


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
    metadata: dict[str, Plain] = field(default_factory=dict)


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
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """How many files, or members of tars, are no images, by the ends of their names."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many folders were not looked into by names that systems give, and what was excluded."""
    exclude: tuple[str, ...] = ()
    """The patterns of what was excluded."""
    notes: tuple[str, ...] = ()
    """A sentence on each thing that looks like data, and was not read."""
    texts: tuple[str, ...] = ()
    """A sentence on each field of metadata that is text because of one value."""

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


def known_split(given: str, where: str) -> str:
    """Return the side that a table's cell names, or raise BadData where it is none."""
    if given and given.lower() not in SPLITS:
        raise BadData(f"{where} has the split {given!r}; give train, test, query, gallery or none")
    return SPLITS.get(given.lower(), "")


def path_text(path: str | PurePosixPath) -> str:
    """Return a path as text that any store and wire can hold, another for each path.

    A byte that is not UTF-8 is written as hex, and so is the backslash of a name that has such hex in it.
    """
    return _ESCAPE.sub(rb"\\x5c", os.fsencode(path)).decode("utf-8", "backslashreplace")


def tell_unread(passed_over: Mapping[str, int], left_out: Mapping[str, int]) -> list[str]:
    """Return what of a `Catalog` was not read as a person reads it, the largest counts first."""
    lines = []
    for title, counts in (("passed over", passed_over), ("left out", left_out)):
        most = [(f"{count} {name}", count) for name, count in Counter(counts).most_common()]
        if more := sum(count for _, count in most[8:]):
            most[8:] = [(f"{more} others", more)]
        lines += [f"{title}: {', '.join(text for text, _ in most)}"] if most else []
    return lines


class SplitRule(BaseModel):
    """Which classes train; the rest is unseen and tests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: Literal["class", "folder", "given"] = Field(
        default="class",
        description="what is cut in two: the sorted class names, the sorted top-level folders, "
        "or 'given' for the data set's own split",
    )
    train: Annotated[int, Field(ge=1, strict=True)] | Annotated[float, Field(gt=0, lt=1, strict=True)] = (
        Field(default=0.5, description="how many of them train, from the front: a share below 1, or a count")
    )


def select(catalog: Catalog, split: Split, rule: SplitRule) -> tuple[Row, ...]:
    """Return the rows of one side of the split, sorted by key.

    `test` is all that is unseen, queries and gallery included; `query` and `gallery` are those rows of it
    that the data set itself calls so. Rows without a label are in `all` and in no side. Raises BadData where
    the data set cannot be cut that way, or that side of it is empty.
    """
    found = _side(catalog, catalog.rows, split, rule)
    if not found and split != "all":  # only a split of the data set's own can have an empty side
        named = Counter(row.split or "on no side" for row in catalog.rows if row.label)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(named.items()))
        raise BadData(
            f"{catalog.root} names no image with a label as {split} ({counts}); take another split, or cut it"
            " by class or folder (split_by of a recipe)"
        )
    return found


def select_missing(catalog: Catalog, split: Split, rule: SplitRule) -> tuple[str, ...]:
    """Return those of `Catalog.missing` that belong to one side of the split; raises as `select` does."""
    return tuple(sorted(map(catalog.path_of, _side(catalog, catalog.absent, split, rule))))


def _side(catalog: Catalog, rows: Sequence[Row], split: Split, rule: SplitRule) -> tuple[Row, ...]:
    if split == "all":
        return tuple(rows)
    trained = _training_groups(catalog, rule)
    rows = [row for row in rows if row.label]
    if split in ("query", "gallery"):
        rows = [row for row in rows if row.split == split]
    if rule.by == "given":
        return tuple(row for row in rows if row.split in _GIVEN.get(split, (split,)))
    return tuple(row for row in rows if (_group(row.label, rule) in trained) == (split == "train"))


def _training_groups(catalog: Catalog, rule: SplitRule) -> frozenset[str]:
    """Return the classes or folders that train; those of the images that are there are counted."""
    labels = {row.label for row in catalog.rows if row.label}
    if not labels:
        raise BadData(
            f"none of the {len(catalog.rows)} images of {catalog.root} has a class, so there is nothing to "
            "cut in two; put each image into a folder named by its class, or name it in the column label"
        )
    if rule.by == "given":
        return frozenset()
    groups = sorted({_group(label, rule) for label in labels})
    if rule.by == "folder" and not any("/" in label for label in labels):
        raise BadData(
            f"{catalog.root} has no folders above its {len(groups)} class folders to cut by; cut it by"
            " class (split_by=class)"
        )
    # A share rounds down, and 0.29 of 100 is 29 in spite of binary fractions.
    count = int(len(groups) * rule.train + 1e-9) if isinstance(rule.train, float) else rule.train
    if not 0 < count < len(groups):
        raise BadData(
            f"the {rule.by} count of {catalog.root} is {len(groups)}, of which the split rule "
            f"(train: {rule.train}) would train on {count}; both sides need at least one"
        )
    return frozenset(groups[:count])


def _group(label: str, rule: SplitRule) -> str:
    return label.partition("/")[0] if rule.by == "folder" else label
