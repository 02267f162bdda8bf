"""The formats `folder` and `cifar10`: images in class folders, with or without split folders above them.

In `folder` a class is a folder, nested as deep as one likes; the label is the folder's path. In `cifar10`
class folders lie below split folders, and a class is the same in all of them, so that no copy of it is taken
for another class.
"""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final
from unicodedata import is_normalized, normalize

from serving.catalog.picture import File
from serving.catalog.rows import SPLITS, Catalog, Row, path_text, tell_unread
from serving.catalog.table import why_not_read
from serving.catalog.walk import SUFFIXES, list_files
from serving.errors import BadData

__all__ = ["read"]

_WRAPPERS: Final = ("data", "dataset", "image", "images", "img", "imgs", "jpg", "photos", "pictures")


def read(root: Path, format: str, exclude: Sequence[str]) -> Catalog:
    """Return a row for each image below a folder: as `folder`, `cifar10`, or `auto`, whichever it is."""
    found = list_files(root, exclude)
    images, dangling = (
        [path for path in paths if path.suffix.lower() in SUFFIXES] for paths in (found.files, found.dangling)
    )
    passed_over = found.passed_over(SUFFIXES)
    if not images:
        raise BadData(
            f"{root} holds no image: looked below it for {', '.join(sorted(SUFFIXES))} and found "
            f"{sum(passed_over.values())} other files and {len(dangling)} links to nothing"
            f"{''.join(f'; {told}' for told in tell_unread(passed_over, found.left_out))}"
        )
    wrapper = _wrapper(images)

    def below(folder: PurePosixPath) -> PurePosixPath:  # what lies beside the wrapper is of no class
        return folder.relative_to(wrapper) if folder.is_relative_to(wrapper) else PurePosixPath()

    folders = {path: below(path.parent) for path in (*images, *dangling)}
    classes = {folders[path] for path in images if folders[path].parts}
    has_splits = format != "folder" and _has_splits(root, classes, format)

    def row(path: PurePosixPath) -> Row:
        folder, split = folders[path], ""
        if has_splits and folder.parts:
            folder, split = PurePosixPath(*folder.parts[1:]), SPLITS[folder.parts[0].lower()]
        key = path_text(os.path.relpath(path, wrapper))
        return Row(key, File(root / path), path_text(folder) if folder.parts else "", split)

    rows, empty = tuple(map(row, images)), map(below, found.empty)
    tables = sorted(path for path in found.files if path.suffix.lower() == ".csv")
    labels = {row.label for row in rows}
    notes = [
        f"the class {label!r} has two folders, whose accents are written in two ways: make them one"
        for label in sorted(labels)
        if not is_normalized("NFC", label) and normalize("NFC", label) in labels
    ]
    return Catalog(
        root / wrapper,
        "cifar10" if has_splits else "folder",
        rows=rows,
        empty=tuple(path_text(path) for path in empty if path.parts),
        absent=tuple(map(row, dangling)),
        passed_over=passed_over,
        left_out=found.left_out,
        notes=(*notes, *(why_not_read(root / path) for path in tables[:3])),
    )


def _wrapper(images: Sequence[PurePosixPath]) -> PurePosixPath:
    """Return the folder that wraps every class folder and says nothing about any, such as CUB's `images`."""
    wrapper, folders = PurePosixPath(), {path.parent.parts for path in images}
    while len(tops := {parts[0] for parts in folders if parts}) == 1 and min(tops).lower() in _WRAPPERS:
        wrapper /= tops.pop()
        folders = {parts[1:] for parts in folders if parts}
    return wrapper


def _has_splits(root: Path, classes: set[PurePosixPath], format: str) -> bool:
    """Tell whether there are split folders with class folders; one alone may be a class of vehicles."""
    tops = sorted({each.parts[0] for each in classes})
    others = [path_text(top) for top in tops if top.lower() not in SPLITS]
    splits = [top for top in tops if top.lower() in SPLITS]
    deep = any(len(each.parts) > 1 and each.parts[0] in splits for each in classes)
    if not deep or len({top.lower() for top in splits}) < 2:
        if format == "auto":
            return False
        raise BadData(
            f"{root} is not laid out as train/<class>/ and test/<class>/: its images lie below "
            f"{', '.join([*splits, *others][:5]) or 'no folder'}; read it as folder"
        )
    if others:
        raise BadData(
            f"{root} holds the split folders {', '.join(splits)} and beside them {', '.join(others[:5])}:"
            " move these away (or read it as folder, where train/a and test/a are two classes)"
        )
    return True
