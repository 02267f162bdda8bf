"""Which images train, which classes choose the best epoch; the rest of a data set is never looked at."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.catalog import Catalog, Row, SplitRule, read, select
from serving.errors import BadData
from training.recipe import Recipe

__all__ = ["Partition", "hold_out", "read_catalog", "read_partition"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Partition:
    """The training part of a data set, cut in two by class."""

    root: Path
    format: str
    split: SplitRule
    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    """Empty when the recipe holds none out."""
    missing: tuple[str, ...]
    """Paths that the data set names and that are not there."""

    def describe(self) -> dict[str, Any]:
        """Give what a run's record says of its data; `digest` changes when an image comes, goes or moves."""
        digest = hashlib.sha256()
        for row in (*self.train, *self.validation):
            digest.update(f"{row.key}\t{row.label}\n".encode("utf-8", "surrogateescape"))
        return {
            "root": str(self.root),
            "format": self.format,
            "split": self.split.model_dump(),
            "train_classes": sorted({row.label for row in self.train}),
            "validation_classes": sorted({row.label for row in self.validation}),
            "train_images": len(self.train),
            "validation_images": len(self.validation),
            "missing": list(self.missing),
            "digest": digest.hexdigest(),
        }


def read_partition(
    root: Path, recipe: Recipe, *, format: str = "auto", table: Path | None = None
) -> Partition:
    """Read a data set and take out what training may see.

    Raises:
        BadData: If the data set cannot be read or cut as the recipe says, has an empty class, too few classes
            for a batch, or no validation class with two images.
    """
    catalog = read_catalog(root, format=format, table=table)
    rows = select(catalog, "train", recipe.split)
    train, validation = hold_out(rows, recipe.validation, by=recipe.split_by)
    classes = len({row.label for row in train})
    if classes < recipe.classes_per_batch:
        raise BadData(
            f"there are {classes} classes to train on, but a batch takes {recipe.classes_per_batch}:"
            f" give more classes or set classes_per_batch to {classes} or less"
        )
    if validation and len({row.label for row in validation}) == len(validation):
        raise BadData(
            f"none of the {len(validation)} validation classes has two images, so that nothing could be"
            " found: set validation to 0 to keep the last epoch"
        )
    return Partition(catalog.root, catalog.format, recipe.split, train, validation, catalog.missing)


def read_catalog(root: Path, *, format: str = "auto", table: Path | None = None) -> Catalog:
    """Read a data set of which every class has an image.

    Raises:
        BadData: If it cannot be read, or a class is empty.
    """
    catalog = read(root, format, table=table)
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
    return catalog


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
