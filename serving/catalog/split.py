"""Which rows of a catalogue train and which are unseen: by a rule, or by the data set's own word."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serving.catalog.rows import Catalog, Row
from serving.errors import BadData

__all__ = ["Split", "SplitRule", "select", "select_missing"]

Split = Literal["all", "train", "test", "query", "gallery"]

_GIVEN: Final = {"train": ("train",), "test": ("test", "query", "gallery")}


class SplitRule(BaseModel):
    """Which classes train; the rest is unseen and tests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: Literal["class", "folder", "given"] = Field(
        default="class",
        description="what is cut in two: the sorted class names, the sorted top-level folders, "
        "or 'given' for the data set's own split",
    )
    train: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="how many of them train, from the front: a share below 1, or a count"
    )

    @field_validator("train", mode="before")
    @classmethod
    def _whole_is_count(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("a share or a count, not true or false")
        return value


def select(catalog: Catalog, split: Split, rule: SplitRule) -> tuple[Row, ...]:
    """Return the rows of one side of the split, sorted by key.

    `test` is all that is unseen, queries and gallery included; `query` and `gallery` are those rows of it
    that the data set itself calls so. Rows without a label are in `all` and in no side.

    Raises:
        BadData: The data set cannot be cut that way, or that side of it is empty.
    """
    found = _side(catalog, catalog.rows, split, rule)
    if not found and split != "all":  # only a split of the data set's own can have an empty side
        named = Counter(row.split or "on no side" for row in catalog.rows if row.label)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(named.items()))
        own = split in ("query", "gallery")
        advice = "take the split test" if own else "cut it by class or folder (split_by of a recipe)"
        unseen = "" if rule.by == "given" else " unseen"
        raise BadData(f"{catalog.root} names no{unseen} image with a label as {split} ({counts}); {advice}")
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
