"""A published list of images: read as text, checked, and held against what is on disk.

A list says an image's path and class; its class says which side of the split it is on, or the list does.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from serving.catalog.picture import File
from serving.catalog.rows import Catalog, Row, make_catalog
from serving.catalog.table import read_text
from serving.catalog.walk import which_are_files
from serving.errors import BadData

__all__ = ["Listed", "check", "locate", "published_number", "read_list"]

_SHOWN: Final = 3


class Listed(NamedTuple):
    """One image that a list names, whether it is on disk or not."""

    path: str
    """POSIX path as the list has it; the row's key."""
    label: str
    """Class, such that the classes' sorted names are in the order of their published numbers; or empty."""
    split: str


def read_list(
    path: Path, columns: Sequence[str], *, header: bool = True, counted: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of a list whose columns are parted by blanks; blank lines are passed over.

    Args:
        path: The file.
        columns: What the columns are called.
        header: Whether a first line names them.
        counted: Whether a line before that says how many lines follow.

    Yields:
        Where the line is, for messages, and its cells.

    Raises:
        BadData: Not readable, not UTF-8, another header, a line of another length, or lines missing.
    """
    if not os.path.exists(path):
        raise BadData(f"{path} is not there; give the folder of the published lists, or another format")
    text = read_text(path, "list")
    lines = [(number, cells) for number, line in enumerate(text.split("\n"), 1) if (cells := line.split())]
    start = counted + header
    if counted and not (lines and lines[0][1] == [str(len(lines) - start)]):
        found = " ".join(lines[0][1])[:80] if lines else ""
        raise BadData(
            f"{path} begins with {found!r} where {max(0, len(lines) - start)}, the count of its images, was"
            " expected; take the whole of the published list, or read the data set in another format"
        )
    if header and not (len(lines) >= start and lines[start - 1][1] == list(columns)):
        found = " ".join(lines[start - 1][1])[:80] if len(lines) >= start else ""
        raise BadData(
            f"{path} has the header {found!r} where {' '.join(columns)!r} was expected; take the published"
            " list, or read the data set in another format"
        )
    for number, cells in lines[start:]:
        if len(cells) != len(columns):
            raise BadData(
                f"line {number} of {path} has {len(cells)} columns and not {len(columns)}"
                f" ({', '.join(columns)}); take the published list"
            )
        yield f"line {number} of {path}", cells


def published_number(text: str, most: int, where: str) -> int:
    """Return a published number, of a class or of an image.

    Raises:
        BadData: It is not one of 1 to `most`.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise BadData(f"{where} has the number {text[:80]!r}, which is not one of 1 to {most}")
    return int(text)


def check(listed: Sequence[Listed], source: Path) -> list[Listed]:
    """Return the images of a list once they are known to be fit to read.

    Args:
        listed: The images.
        source: The list, or the folder of its parts, for messages.

    Raises:
        BadData: There is none, a path leads out of the folder, an image comes twice, or a class both trains
            and tests.
    """
    if not listed:
        raise BadData(f"{source} names no image; take the published list")
    sides, seen = dict[str, bool](), set[str]()
    for path, label, split in listed:
        if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):  # "/a" begins with an empty part
            raise BadData(f"{source} names the image {path!r}, which is no plain path below its folder")
        if path in seen:
            raise BadData(f"{source} names the image {path!r} twice; each image may be there once")
        seen.add(path)
        if label and split and sides.setdefault(label, split == "train") != (split == "train"):
            raise BadData(
                f"{source} has the class {label!r} both in train and in test; take the published list"
            )
    return list(listed)


def locate(root: Path, format: str, listed: Sequence[Listed], folders: Sequence[str] = ("",)) -> Catalog:
    """Return the listed images as a catalogue: those on disk as rows, the others as absent.

    Args:
        root: The data set's folder.
        format: What to call the layout.
        listed: The images.
        folders: Where in `root` the paths may start; the first of them that any image is in counts.

    Raises:
        BadData: None of the images is there.
    """
    paths = [each.path for each in listed]
    for folder in folders:
        base = root / folder
        there = which_are_files(base, paths)
        if any(there):
            break
    else:
        places = " and ".join(str(root / folder) for folder in folders)
        raise BadData(
            f"none of the {len(listed)} images that the lists of {root} name is there: looked below {places}"
            f" for {', '.join(paths[:_SHOWN])}{' and so on' if len(paths) > _SHOWN else ''}"
        )
    rows, absent = list[Row](), list[Row]()
    for (path, label, split), is_there in zip(listed, there, strict=True):
        (rows if is_there else absent).append(Row(path, File(base / path), label, split))
    return make_catalog(root, format, rows, absent=absent)
