"""Which images train, which classes choose the best epoch; what a run's record says of them, and its reading.

The rest of a data set is never looked at in training.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.catalog import Catalog, Row, SplitRule, read, select
from serving.errors import BadData
from training.recipe import Recipe

__all__ = ["Partition", "check_complete", "divide", "hold_out", "is_own", "read_own"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Partition:
    """The training part of a data set, cut in two by class."""

    catalog: Catalog
    split: SplitRule
    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    """Empty when the recipe holds none out."""

    def describe(self) -> dict[str, Any]:
        """Give what a run's record says of its data; `digest` changes when an image comes, goes or moves."""
        return {
            **_place(self.catalog),
            "split": self.split.model_dump(),
            "train_classes": sorted({row.label for row in self.train}),
            "validation_classes": sorted({row.label for row in self.validation}),
            "train_images": len(self.train),
            "validation_images": len(self.validation),
            "missing": list(self.catalog.missing),
            "unlabelled": self.catalog.unlabelled,
            "digest": _digest((*self.train, *self.validation)),
        }


def divide(catalog: Catalog, recipe: Recipe) -> Partition:
    """Take out of a data set what training may see.

    Raises:
        BadData: If the data set cannot be cut as the recipe says, has an empty class, too few classes for a
            batch, one validation class alone, or none with two images.
    """
    check_complete(catalog)
    rows = select(catalog, "train", recipe.split)
    train, validation = hold_out(rows, recipe.validation, by=recipe.split_by)
    classes = len({row.label for row in train}) * (4 if recipe.quarter_turns else 1)
    if classes < recipe.classes_per_batch:
        turned = " with their quarter turns" if recipe.quarter_turns else ""
        raise BadData(
            f"there are {classes} classes{turned} to train on, but a batch takes {recipe.classes_per_batch}:"
            f" give more classes or set classes_per_batch to {classes} or less"
        )
    held = len({row.label for row in validation})
    if held == 1:
        raise BadData(
            "validation would hold out one class, where whatever is found is right: hold out a larger share,"
            " or set validation to 0 to keep the last epoch"
        )
    if validation and held == len(validation):
        raise BadData(
            f"none of the {held} validation classes has two images, so that nothing could be found: set"
            " validation to 0 to keep the last epoch"
        )
    return Partition(catalog, recipe.split, train, validation)


def check_complete(catalog: Catalog) -> None:
    """Refuse a data set of which a class has no image, and warn of images that are not there.

    Raises:
        BadData: If a class is empty.
    """
    if catalog.empty:
        raise BadData(
            f"the class {catalog.empty[0]!r} of {catalog.root} has no image: fill its folder or take it out"
            f" ({len(catalog.empty)} such folders)"
        )
    if catalog.missing:
        _log.warning(
            "%d images that %s names are not there (first: %s)",
            len(catalog.missing), catalog.root, catalog.missing[0],
        )  # fmt: skip


def read_own(
    record: Mapping[str, Any], *, data: Path | None = None, format: str = "auto", table: Path | None = None
) -> Catalog:
    """Read the data set of a run: the one that its record names, as it was read then, or another one.

    Args:
        record: The run's.
        data: Where the images are, if not where they were; elsewhere the record's format and table are of
            no use.
        format: Layout; `auto` is the record's.
        table: Table of a csv data set; the record's when not given.

    Raises:
        BadData: If the images are no longer there, or cannot be read.
        BadSetting: If the format is not known, or takes no table.
    """
    own = record.get("data", {})
    root, read_as = Path(own.get("root", "")), own.get("format", "auto")
    if data is not None and Path(os.path.abspath(data)) != root:
        return read(data, format, table=table)
    if not own.get("root") or not root.is_dir():
        raise BadData(
            f"the images that the run was trained on are no longer at {root}: give their folder by --data"
        )
    if table is None and format in ("auto", read_as):
        format, table = read_as, Path(own["table"]) if own.get("table") else None
    return read(root, format, table=table)


def is_own(record: Mapping[str, Any], catalog: Catalog, rule: SplitRule) -> bool:
    """Tell whether a catalogue is the one that a run was trained on, in the same place and read the same way.

    A copy elsewhere may hold other pixels under the same names, so that it does not count.
    """
    own = record.get("data", {})
    if any(own.get(name) != value for name, value in _place(catalog).items()):
        return False
    return bool(own.get("digest") == _digest(select(catalog, "train", rule)))


def hold_out(rows: Sequence[Row], share: float, *, by: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Cut validation classes from the training rows, evenly spaced over the sorted names.

    Args:
        rows: Training rows.
        share: Share of the classes held out, rounded, at least one; 0 holds out none.
        by: `folder` holds out whole top-level folders, so that validation is as unseen as the test is.

    Returns:
        Rows to train on, rows to validate on; no class is in both.

    Raises:
        BadData: If nothing would be left to train on.
    """
    if share == 0:
        return tuple(rows), ()
    names = sorted({_group(row, by) for row in rows})
    count = max(1, round(share * len(names)))
    if count >= len(names):
        raise BadData(
            f"there are {len(names)} {'folders' if by == 'folder' else 'classes'} to train on, and validation"
            f" {share} would take {count} of them: lower it, or set it to 0 to keep the last epoch"
        )
    held = {names[int((i + 0.5) * len(names) / count)] for i in range(count)}
    return (
        tuple(row for row in rows if _group(row, by) not in held),
        tuple(row for row in rows if _group(row, by) in held),
    )


def _group(row: Row, by: str) -> str:
    return row.label.partition("/")[0] if by == "folder" else row.label


def _place(catalog: Catalog) -> dict[str, str | None]:
    """Give where a data set is and how it was read."""
    table = str(catalog.table) if catalog.table else None
    return {"root": str(catalog.root), "format": catalog.format, "table": table}


def _digest(rows: Iterable[Row]) -> str:
    """Give the SHA-256 of keys and classes, whatever the order of the rows."""
    digest = hashlib.sha256()
    for row in sorted(rows, key=lambda row: row.key):
        digest.update(f"{row.key}\t{row.label}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
