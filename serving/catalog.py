"""A data set on disk as rows (key, image, label, split); images are found here and decoded elsewhere.

Three formats, told apart by `auto`:

- `folder`: a class is a folder, nested as deep as one likes; the label is the folder's path
  (`Greek/character01`). A folder that only wraps all others and is called `images` or the like is left out.
- `cifar10`: `train/<class>/x.jpg` and `test/<class>/x.jpg`; the data set names the split.
- `csv`: a table with the columns `path` (or `image`) and `label`; `split` and `key` if wanted; any other
  column is metadata.

An image beside the class folders, or with an empty label, is of no class: it can be indexed, and neither
trains nor tests. `docs/catalogues.md` tells it all.
"""

import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serving.errors import BadData, BadSetting
from serving.table import column_type, find_table, read_lines
from serving.walk import walk

__all__ = ["FORMATS", "SUFFIXES", "Catalog", "Row", "SplitRule", "read", "select", "select_missing"]

FORMATS: Final = ("auto", "folder", "csv", "cifar10")
SUFFIXES: Final = frozenset(  # in any case
    (".avif", ".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
)
_WRAPPERS: Final = frozenset(
    ("data", "dataset", "image", "images", "img", "imgs", "jpg", "photos", "pictures")
)
_SPLITS: Final = {"train": "train", "test": "test", "val": "", "valid": "", "validation": "", "": ""}


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a data set."""

    key: str
    """Unique in the catalogue: the POSIX path from the root, or the table's `key` column."""
    image: Path
    """Absolute path; it was there when the catalogue was read, and may hold anything."""
    label: str
    """Class, empty when the data set names none: such a row neither trains nor tests."""
    split: str = ""
    """`train`, `test`, or empty when the data set names none."""
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All images of a data set, sorted by key."""

    root: Path
    format: str
    rows: tuple[Row, ...]
    empty: tuple[str, ...] = ()
    """Labels of folders that hold neither an image nor a folder."""
    table: Path | None = None
    """Absolute path of the table that was read, for the format csv."""
    absent: tuple[Row, ...] = ()
    """Rows of a table, and dangling links, whose image is not there."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Paths from the root that the data set names and that are not there, sorted."""
        return tuple(sorted(self.path_of(row) for row in self.absent))

    @property
    def unlabelled(self) -> int:
        """How many rows are of no class; `select` leaves them out of `train` and `test`."""
        return sum(not row.label for row in self.rows)

    def path_of(self, row: Row) -> str:
        """Return the POSIX path of a row's image from the root: what may be told to others."""
        return _text(PurePosixPath(os.path.relpath(row.image, self.root)))


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


def read(root: Path, format: str = "auto", *, table: Path | None = None) -> Catalog:
    """Read the data set at `root`.

    Args:
        root: The folder; or a `.csv` file, whose paths then start from its own folder.
        format: One of `FORMATS`.
        table: The table of a csv data set, where it is not the one `.csv` file in `root`.

    Raises:
        BadData: No such folder, not readable, no image in it, or a table that does not hold.
        BadSetting: `format` is not one of `FORMATS`.
    """
    if format not in FORMATS:
        raise BadSetting(f"the format {format!r} is not known; give one of {', '.join(FORMATS)}")
    root = Path(os.path.abspath(os.fspath(root)))
    if root.suffix.lower() == ".csv" and root.is_file():
        root, table = root.parent, root if table is None else table
    _check_folder(root)
    if table is None and format in ("auto", "csv"):
        table = find_table(root, required=format == "csv")
    if table is not None and format in ("auto", "csv"):
        return _read_table(root, Path(os.path.abspath(os.fspath(table))))
    if table is not None:
        raise BadSetting(f"a table was given with the format {format!r}; give the format csv, or no table")
    return _read_folders(root, format)


def select(catalog: Catalog, split: Literal["all", "train", "test"], rule: SplitRule) -> tuple[Row, ...]:
    """Return the rows of one side of the split, sorted by key.

    Rows without a label are of no class, so they are in `all` and in neither side; `Catalog.unlabelled`
    counts them.

    Raises:
        BadData: The data set cannot be cut that way, or that side of it is empty.
    """
    if split == "all":
        return catalog.rows
    found = _side(catalog.rows, split, rule, _training_groups(catalog, rule))
    if not found:  # only a split of the data set's own can have an empty side
        named = Counter(row.split or "neither" for row in catalog.rows if row.label)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(named.items()))
        raise BadData(
            f"{catalog.root} names no image with a label as {split} ({counts}); cut it by class or folder"
        )
    return found


def select_missing(
    catalog: Catalog, split: Literal["all", "train", "test"], rule: SplitRule
) -> tuple[str, ...]:
    """Return those of `Catalog.missing` that belong to one side of the split.

    Raises:
        BadData: The data set cannot be cut that way.
    """
    if split == "all":
        return catalog.missing
    found = _side(catalog.absent, split, rule, _training_groups(catalog, rule))
    return tuple(sorted(catalog.path_of(row) for row in found))


def _side(rows: Sequence[Row], split: str, rule: SplitRule, trained: Set[str]) -> tuple[Row, ...]:
    if rule.by == "given":
        return tuple(row for row in rows if row.label and row.split == split)
    return tuple(
        row for row in rows if row.label and (_group(row.label, rule) in trained) == (split == "train")
    )


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
            f"{catalog.root} has no folders above its {len(groups)} class folders to cut by; cut it by class"
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


def _check_folder(root: Path) -> None:
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        raise BadData(f"the data folder {root} cannot be read: {_reason(error)}") from error
    if not stat.S_ISDIR(mode):
        raise BadData(f"{root} is a file; give the folder that holds the images, or a .csv table")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _read_folders(root: Path, format: str) -> Catalog:
    """Read the format `folder` or `cifar10`, or find out which of them it is."""
    images, leaves, dangling, others = [], [], [], 0
    for path, kind in walk(root, SUFFIXES):
        if kind == "empty folder":
            leaves.append(path)
        elif path.suffix.lower() not in SUFFIXES:
            others += 1
        elif kind == "file":
            images.append(path)
        else:
            dangling.append(path)
    if not images:
        raise BadData(
            f"{root} holds no image: looked below it for {', '.join(sorted(SUFFIXES))} and found "
            f"{others} other files and {len(dangling)} links to nothing"
        )
    # Where the images with a class lie says what the layout is; one beside the class folders changes nothing.
    wrapper = _wrapper(images)
    parts = [_below(path, wrapper).parts for path in images]
    tops = {each[0].lower() for each in parts if len(each) > 1}
    classed = {each[0].lower() for each in parts if len(each) > 2}
    is_cifar10 = {"train", "test"} <= classed and tops <= _SPLITS.keys()
    if format == "cifar10" and not is_cifar10:
        top = sorted({_text(path).partition("/")[0] for path in images})
        raise BadData(
            f"{root} is not laid out as train/<class>/ and test/<class>/: its images lie below "
            f"{', '.join(top[:5])}{' and others' if len(top) > 5 else ''}; read it as folder"
        )
    if format == "auto":
        format = "cifar10" if is_cifar10 else "folder"

    def row(path: PurePosixPath) -> Row:
        folder, given = _below(path, wrapper).parent, ""
        if format == "cifar10" and folder.parts:
            given = _SPLITS.get(folder.parts[0].lower(), "")
            folder = folder.relative_to(folder.parts[0])
        key = _text(PurePosixPath(os.path.relpath(path, wrapper)))
        return Row(key, root / path, _text(folder) if folder.parts else "", given)

    return _catalog(
        root / wrapper,
        format,
        [row(path) for path in images],
        empty=[_text(path.relative_to(wrapper)) for path in leaves if path.is_relative_to(wrapper)],
        absent=[row(path) for path in dangling],
    )


def _read_table(root: Path, table: Path) -> Catalog:
    lines = read_lines(table, needed=(("path", "image"), ("label",)))
    rows, absent, numbers = list[Row](), list[Row](), dict[str, int]()
    extra = {
        name: column_type([cells[name] for _, cells in lines])
        for name in (lines[0][1] if lines else ())
        if name.lower() not in {"path", "image", "label", "split", "key"}
    }
    for number, cells in lines:
        named = {name.lower(): cell for name, cell in cells.items()}
        path, given = named.get("path", named.get("image", "")), named.get("split", "")
        image = os.path.normpath(os.path.join(root, path))
        if not path or not image.startswith(os.path.join(root, "")):
            raise BadData(f"line {number} of {table} names the image {path!r}, which is not below {root}")
        if given.lower() not in _SPLITS:
            raise BadData(f"line {number} of {table} has the split {given!r}; give train, test or nothing")
        key = named.get("key", _text(PurePosixPath(os.path.relpath(image, root))))
        if not key or numbers.setdefault(key, number) != number:
            found = f"the key {key!r} again, as on line {numbers[key]}" if key else "an empty key"
            raise BadData(f"line {number} of {table} has {found}; each row needs its own key")
        metadata = {name: kind(cells[name]) for name, kind in extra.items() if cells[name]}
        row = Row(key, Path(image), named["label"], _SPLITS[given.lower()], metadata)
        (rows if os.path.isfile(image) else absent).append(row)
    if not rows:
        paths = [os.path.relpath(row.image, root) for row in absent[:3]]
        found = f"none of its {len(absent)} images is there: {paths}" if absent else "it has no rows"
        raise BadData(f"the table {table} gives no image below {root}: {found}")
    return _catalog(root, "csv", rows, absent=absent, table=table)


def _wrapper(images: Sequence[PurePosixPath]) -> PurePosixPath:
    """Return the folder that wraps every class folder and says nothing about any, such as CUB's `images`.

    Images beside it are of no class and are passed over.
    """
    wrapper = PurePosixPath()
    while True:
        below = (path.relative_to(wrapper) for path in images if path.is_relative_to(wrapper))
        tops = {path.parts[0] for path in below if len(path.parts) > 1}
        if len(tops) != 1 or (top := tops.pop()).lower() not in _WRAPPERS:
            return wrapper
        wrapper /= top


def _below(path: PurePosixPath, wrapper: PurePosixPath) -> PurePosixPath:
    """Return a file's path below the wrapper; what lies beside it is of no class, as if it lay in it."""
    return path.relative_to(wrapper) if path.is_relative_to(wrapper) else PurePosixPath(path.name)


def _text(path: PurePosixPath) -> str:
    """Return a path as text that any store and wire can hold; a byte that is not UTF-8 is written as hex."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _catalog(
    root: Path,
    format: str,
    rows: list[Row],
    *,
    empty: Sequence[str] = (),
    absent: Sequence[Row] = (),
    table: Path | None = None,
) -> Catalog:
    rows.sort(key=lambda row: row.key)
    return Catalog(root, format, tuple(rows), tuple(sorted(empty)), table, tuple(absent))
