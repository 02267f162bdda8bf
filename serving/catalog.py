"""A data set on disk as rows (key, image, label, split); images are found here and decoded elsewhere.

Three formats, told apart by `auto`:

- `folder`: a class is a folder, nested as deep as one likes; the label is the folder's path
  (`Greek/character01`). A folder that only wraps all others and is called `images` or the like is left out.
- `cifar10`: `train/<class>/x.jpg` and `test/<class>/x.jpg`; the data set names the split.
- `csv`: a table with the columns `path` (or `image`) and `label`; `split` and `key` if wanted; any other
  column is metadata.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serving.errors import BadData, BadSetting
from serving.table import column_type, find_table, read_lines

__all__ = ["FORMATS", "SUFFIXES", "Catalog", "Row", "SplitRule", "read", "select"]

FORMATS: Final = ("auto", "folder", "csv", "cifar10")
SUFFIXES: Final = frozenset(  # in any case
    (".avif", ".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
)
_WRAPPERS: Final = frozenset(
    ("data", "dataset", "image", "images", "img", "imgs", "jpg", "photos", "pictures")
)
_SPLITS: Final = {"train": "train", "test": "test", "val": "", "valid": "", "validation": "", "": ""}
_NOT_OURS: Final = frozenset({"__MACOSX"})


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a data set."""

    key: str
    """Unique in the catalogue: the POSIX path below the root, or the table's `key` column."""
    image: Path
    """Absolute path; it was there when the catalogue was read, and may hold anything."""
    label: str
    """Class, empty when the data set names none."""
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
    missing: tuple[str, ...] = ()
    """Paths that a table or a dangling link names and that are not there."""


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

    Raises:
        BadData: The data set cannot be cut that way, or that side of it is empty.
    """
    if split == "all":
        return catalog.rows
    if rule.by == "given":
        rows = tuple(row for row in catalog.rows if row.split == split)
        if not rows:
            found = Counter(row.split or "neither" for row in catalog.rows)
            counts = ", ".join(f"{name} {count}" for name, count in sorted(found.items()))
            raise BadData(f"{catalog.root} names no image as {split} ({counts}); cut it by class or folder")
        return rows
    groups = sorted({_group(row.label, rule) for row in catalog.rows})
    if rule.by == "folder" and not any("/" in row.label for row in catalog.rows):
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
    wanted = frozenset(groups[:count] if split == "train" else groups[count:])
    return tuple(row for row in catalog.rows if _group(row.label, rule) in wanted)


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
    images, leaves, missing, others = [], [], [], 0
    for path, kind in _walk(root):
        if kind == "empty folder":
            leaves.append(path)
        elif path.suffix.lower() not in SUFFIXES:
            others += 1
        elif kind == "file":
            images.append(path)
        else:
            missing.append(_text(path))
    if not images:
        raise BadData(
            f"{root} holds no image: looked below it for {', '.join(sorted(SUFFIXES))} and found "
            f"{others} other files and {len(missing)} links to nothing"
        )
    tops = {path.parts[0].lower() for path in images}
    is_cifar10 = {"train", "test"} <= tops <= _SPLITS.keys() and all(len(path.parts) > 2 for path in images)
    if format == "cifar10" and not is_cifar10:
        top = sorted({_text(path).partition("/")[0] for path in images})
        raise BadData(
            f"{root} is not laid out as train/<class>/ and test/<class>/: its images lie below "
            f"{', '.join(top[:5])}{' and others' if len(top) > 5 else ''}; read it as folder"
        )
    if format == "auto":
        format = "cifar10" if is_cifar10 else "folder"
    while format == "folder" and (wrapper := _wrapper(images)):
        root = root / wrapper
        images = [path.relative_to(wrapper) for path in images]
        leaves = [path.relative_to(wrapper) for path in leaves if path.parts[0] == wrapper]
    rows = []
    for path in images:
        label, given = _text(path.parent), ""
        if format == "cifar10":
            first, _, label = label.partition("/")
            given = _SPLITS[first.lower()]
        rows.append(Row(_text(path), root / path, "" if label == "." else label, given))
    return _catalog(root, format, rows, empty=[_text(path) for path in leaves], missing=missing)


def _read_table(root: Path, table: Path) -> Catalog:
    lines = read_lines(table, needed=(("path", "image"), ("label",)))
    rows, missing, numbers = list[Row](), list[str](), dict[str, int]()
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
        if not os.path.isfile(image):
            missing.append(path)
            continue
        metadata = {name: kind(cells[name]) for name, kind in extra.items() if cells[name]}
        rows.append(Row(key, Path(image), named["label"], _SPLITS[given.lower()], metadata))
    if not rows:
        absent = f"none of its {len(missing)} images is there: {missing[:3]}" if missing else "it has no rows"
        raise BadData(f"the table {table} gives no image below {root}: {absent}")
    return _catalog(root, "csv", rows, missing=missing)


def _wrapper(images: Sequence[PurePosixPath]) -> str | None:
    """Name the folder that holds every image and says nothing about any, such as CUB's `images`."""
    tops = {path.parts[0] if len(path.parts) > 1 else "" for path in images}
    top = tops.pop()
    return top if not tops and top.lower() in _WRAPPERS else None


def _walk(root: Path) -> Iterator[tuple[PurePosixPath, Literal["file", "dangling", "empty folder"]]]:
    """Yield what lies below `root`, hidden names left out, as paths relative to it.

    Links to folders are followed after all real folders, and a folder is entered once however many
    ways lead to it, so that a loop of links ends and a real path wins over a linked one.
    """
    real, linked, seen = [PurePosixPath()], list[PurePosixPath](), set[tuple[int, int]]()
    while real or linked:
        here = real.pop() if real else linked.pop()
        try:
            found = os.stat(root / here)
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(root / here) as entries:
                visible = sorted(
                    (entry for entry in entries if entry.name[0] != "." and entry.name not in _NOT_OURS),
                    key=lambda entry: entry.name,
                    reverse=True,
                )
            images = folders = False
            for entry in visible:
                kind = _kind(entry)
                if kind == stat.S_IFDIR:
                    folders = True
                    (linked if entry.is_symlink() else real).append(here / entry.name)
                elif kind == stat.S_IFREG:
                    images |= os.path.splitext(entry.name)[1].lower() in SUFFIXES
                    yield here / entry.name, "file"
                else:
                    yield here / entry.name, "dangling"
            if not images and not folders and here.parts:
                yield here, "empty folder"
        except OSError as error:
            raise BadData(f"the folder {root / here} cannot be read: {_reason(error)}") from error


def _kind(entry: os.DirEntry[str]) -> int:
    """Return the file type behind an entry, 0 where a link leads nowhere or round in a circle."""
    try:
        if not entry.is_symlink():  # what the folder's listing says already costs no call a file
            return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG if entry.is_file() else 0
        return stat.S_IFMT(entry.stat().st_mode)
    except OSError:
        return 0


def _text(path: PurePosixPath) -> str:
    """Return a path as text that any store and wire can hold; a byte that is not UTF-8 is written as hex."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _catalog(
    root: Path, format: str, rows: list[Row], *, empty: Sequence[str] = (), missing: Sequence[str] = ()
) -> Catalog:
    rows.sort(key=lambda row: row.key)
    return Catalog(root, format, tuple(rows), tuple(sorted(empty)), tuple(sorted(missing)))
