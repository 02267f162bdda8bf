"""Which images train, which classes choose the best epoch; what a run's record says of them, and its reading.

The rest of a data set is never looked at in training, but for near-duplicates that the test shares with it.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from serving.catalog.catalog import Catalog, Row, Split, SplitRule, read, select, tell_unread
from serving.errors import BadData
from training.recipes.recipe import Recipe

__all__ = [
    "Exclude", "Partition", "Table", "check_complete", "cut_fold", "divide", "hold_out", "is_own", "labelled",
    "read_own",
]  # fmt: skip

Table = Annotated[
    Path | None, Field(description="the .csv, .tar or .parquet file to read, where there are several")
]
"""The setting of every command that reads a data set."""
Exclude = Annotated[
    list[str],
    Field(
        description="pattern of files or folders to leave out beside those that the run left out, by the"
        " ends of their paths (*_back.jpg, shoes/old); may be repeated"
    ),
]
"""The setting of every command that takes images for the first time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Partition:
    """The training part of a data set, cut in two by class; `validation` may be empty."""

    catalog: Catalog
    recipe: Recipe
    train: tuple[Row, ...]
    validation: tuple[Row, ...]

    @property
    def classes(self) -> int:
        """How many classes train, with their quarter turns where the recipe has these."""
        return len({row.label for row in self.train}) * (4 if self.recipe.quarter_turns else 1)

    def tell(self) -> str:
        """Say in a line what was read and what trains."""
        told = f"{self.catalog.root} was read as {self.catalog.format}: {_count(self.train)} train"
        told += f", {_count(self.validation)} validate" if self.validation else ""
        labels = sorted({row.label for row in self.train})
        return f"{told}; the first: {', '.join(map(repr, labels[:3]))}{', ...' * (len(labels) > 3)}"

    def describe(self) -> dict[str, Any]:
        """Give what a run's record says of its data; `digest` changes when an image comes, goes or moves."""
        return {
            **_place(self.catalog),
            "exclude": list(self.catalog.exclude),
            "split": self.recipe.split.model_dump(),
            "train_classes": sorted({row.label for row in self.train}),
            "validation_classes": sorted({row.label for row in self.validation}),
            "train_images": len(self.train),
            "validation_images": len(self.validation),
            "folds": self.recipe.folds,
            "fold": self.recipe.fold if self.recipe.folds else None,
            "missing": list(self.catalog.missing),
            "unlabelled": self.catalog.unlabelled,
            "digest": _digest((*self.train, *self.validation)),
        }


def divide(catalog: Catalog, recipe: Recipe) -> Partition:
    """Take out of a data set what training may see; `BadData` if it cannot be cut as the recipe says."""
    check_complete(catalog)
    train, validation = hold_out(select(catalog, "train", recipe.split), recipe)
    partition = Partition(catalog, recipe, train, validation)
    classes, images = partition.classes, len(train) * (4 if recipe.quarter_turns else 1)
    if len({row.label for row in validation}) == 1:
        key, larger = ("folds", "set fewer folds") if recipe.folds else ("validation", "set it higher")
        raise BadData(
            f"{key} would hold out one class, where whatever is found is right: {larger}, or set {key} to 0"
        )
    if classes == 1:
        raise BadData(f"one class is left to train on ({train[0].label!r}), but two or more are needed")
    if classes < recipe.classes_per_batch:
        turned = " with their quarter turns" if recipe.quarter_turns else ""
        raise BadData(
            f"there are {classes} classes{turned} to train on, but a batch takes {recipe.classes_per_batch}:"
            f" give more classes or set classes_per_batch to {classes} or less"
        )
    if recipe.batch_size > images:
        raise BadData(
            f"there are {images} images to train on, but a batch takes {recipe.batch_size}, so that some"
            " would be in it twice: give more images, or lower classes_per_batch or images_per_class"
        )
    return partition


def check_complete(catalog: Catalog) -> None:
    """Refuse, with a `BadData`, a data set of which a class has no image; warn of images that are missing."""
    for note in (*tell_unread(catalog.passed_over, catalog.left_out), *catalog.notes):
        _log.warning("of %s: %s", catalog.root, note)
    if catalog.empty:
        raise BadData(
            f"the class {catalog.empty[0]!r} of {catalog.root} has no image: fill its folder or take it out"
            f" ({len(catalog.empty)} such folders)"
        )
    if catalog.missing:
        told = "%d images that %s names are not there (first: %s)"
        _log.warning(told, len(catalog.missing), catalog.root, ", ".join(catalog.missing[:3]))


def labelled(catalog: Catalog, split: Split, rule: SplitRule) -> list[Row]:
    """Give the rows of one side of a complete data set that are of a class; `BadData` if none is."""
    check_complete(catalog)
    rows = [row for row in select(catalog, split, rule) if row.label]
    if not rows:
        raise BadData(f"none of the {len(catalog.rows)} images of {catalog.root} is of a class")
    return rows


def read_own(
    record: Mapping[str, Any],
    *,
    data: Path | None = None,
    format: str = "auto",
    table: Path | None = None,
    exclude: Sequence[str] = (),
) -> Catalog:
    """Read the data set of a run: the one that its record names, as it was read then, or that at `data`.

    What the run excluded is excluded from either.
    """
    own = record["data"]
    exclude = [*dict.fromkeys((*own.get("exclude", ()), *exclude))]  # older runs have none
    root, read_as = Path(own["root"]), own["format"]
    if data is not None and Path(os.path.abspath(data)) != root:
        return read(data, format, table=table, exclude=exclude)
    if not root.is_dir():
        raise BadData(
            f"the images that the run was trained on are no longer at {root}: give their folder by --data"
        )
    if table is None and format in ("auto", read_as):
        format, table = read_as, Path(own["table"]) if own["table"] else None
    return read(root, format, table=table, exclude=exclude)


def is_own(record: Mapping[str, Any], catalog: Catalog, rule: SplitRule) -> bool:
    """Tell whether a catalogue is the one that a run was trained on, in the same place, read the same way."""
    own = record["data"]
    if any(own[name] != value for name, value in _place(catalog).items()):
        return False  # first, since the rule may not fit another data set
    return bool(own["digest"] == _digest(select(catalog, "train", rule)))


def hold_out(rows: Sequence[Row], recipe: Recipe) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Cut the recipe's fold, or its share of validation classes, from the training rows.

    Gives rows to train on and rows to validate on; of a data set split by folder, whole top-level folders.
    """
    by_folder = recipe.split_by == "folder"
    groups = [row.label.partition("/")[0] if by_folder else row.label for row in rows]
    names = sorted(set(groups))
    held = {names[place] for place in _held(len(names), recipe)}
    train = tuple(row for row, group in zip(rows, groups, strict=True) if group not in held)
    return train, tuple(row for row, group in zip(rows, groups, strict=True) if group in held)


def cut_fold(count: int, *, folds: int, fold: int, rule: Literal["even", "wrapped"]) -> NDArray[np.intp]:
    """Choose the names of one fold, counted from 0, among `count` sorted ones; their places, (k,).

    `even` cuts the list at equal steps, as the authors of XML do. `wrapped` goes by the original MLRC code:
    from fold/folds of the list on count - count // folds names train, round its end; the rest is held out.
    """
    if rule == "even":
        edges = np.linspace(0, count, folds + 1).astype(np.intp)
        return np.arange(edges[fold], edges[fold + 1])
    size = count // folds
    first = int(count * fold / folds) + count - size
    return np.arange(first, first + size) % count


def _held(count: int, recipe: Recipe) -> NDArray[np.intp]:
    """Choose what is held out of `count` sorted classes or folders; their places, (k,)."""
    what = "folders" if recipe.split_by == "folder" else "classes"
    if recipe.folds > count:
        raise BadData(
            f"there are {count} {what} to train on, of which {recipe.folds} folds cannot be cut: set fewer"
        )
    if recipe.folds:
        return cut_fold(count, folds=recipe.folds, fold=recipe.fold, rule=recipe.fold_rule)
    if recipe.validation == 0:
        return np.empty(0, dtype=np.intp)
    wanted = max(1, round(recipe.validation * count))
    if wanted >= count:
        raise BadData(
            f"there are {count} {what} to train on, and validation {recipe.validation} would take {wanted}:"
            " set it lower, or to 0"
        )
    return np.array([int((i + 0.5) * count / wanted) for i in range(wanted)], dtype=np.intp)  # evenly spaced


def _count(rows: Sequence[Row]) -> str:
    return f"{len(rows):,} images of {len({row.label for row in rows}):,} classes"


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
