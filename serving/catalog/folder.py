"""The formats `folder` and `cifar10`: images in class folders, with or without split folders above them.

In `folder` a class is a folder, nested as deep as one likes; the label is the folder's path. In `cifar10`
class folders lie below split folders, `train/<class>/x.jpg` and `test/<class>/x.jpg`, and a class is the
same in all of them, so that no copy of it is taken for another class.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from serving.catalog.picture import File
from serving.catalog.rows import SPLITS, Catalog, Row, make_catalog, path_text
from serving.catalog.walk import SUFFIXES, walk
from serving.errors import BadData

__all__ = ["read"]

_WRAPPERS: Final = frozenset(
    ("data", "dataset", "image", "images", "img", "imgs", "jpg", "photos", "pictures")
)


@dataclass(frozen=True, slots=True)
class _Tree:
    """What lies below a folder; all paths are relative to it."""

    root: Path
    wrapper: PurePosixPath
    """The folder that wraps every class folder and says nothing about any, such as CUB's `images`."""
    images: tuple[PurePosixPath, ...]
    dangling: tuple[PurePosixPath, ...]
    """Links named as an image that lead nowhere."""
    leaves: tuple[PurePosixPath, ...]
    """Folders with neither an image nor a folder in them."""

    def folder_of(self, path: PurePosixPath) -> PurePosixPath:
        """Return an image's folder below the wrapper; what lies beside that is of no class."""
        within = path.is_relative_to(self.wrapper)
        return path.relative_to(self.wrapper).parent if within else PurePosixPath()


def read(root: Path, format: str = "auto") -> Catalog:
    """Return a row for each image below a folder.

    Args:
        root: The folder.
        format: `folder` or `cifar10`; `auto` takes cifar10 where there are split folders.

    Raises:
        BadData: A folder cannot be read, there is no image, or they are not laid out as `cifar10` wants them.
    """
    tree = _grow(root)
    has_splits = format != "folder" and _has_splits(tree)
    if has_splits or format == "cifar10":
        _check_splits(tree, has_splits)

    def row(path: PurePosixPath) -> Row:
        folder, split = tree.folder_of(path), ""
        if has_splits and folder.parts:
            folder, split = PurePosixPath(*folder.parts[1:]), SPLITS[folder.parts[0].lower()]
        key = path_text(os.path.relpath(path, tree.wrapper))
        return Row(key, File(root / path), path_text(folder) if folder.parts else "", split)

    within = [path.relative_to(tree.wrapper) for path in tree.leaves if path.is_relative_to(tree.wrapper)]
    return make_catalog(
        root / tree.wrapper,
        "cifar10" if has_splits else "folder",
        [row(path) for path in tree.images],
        empty=[path_text(path) for path in within],
        absent=[row(path) for path in tree.dangling],
    )


def _grow(root: Path) -> _Tree:
    """List the images below a folder."""
    images, leaves, dangling = list[PurePosixPath](), list[PurePosixPath](), list[PurePosixPath]()
    others = 0
    for path, kind in walk(root):
        if kind == "empty folder":
            leaves.append(path)
        elif path.suffix.lower() not in SUFFIXES:
            others += 1
        else:
            (images if kind == "file" else dangling).append(path)
    if not images:
        raise BadData(
            f"{root} holds no image: looked below it for {', '.join(sorted(SUFFIXES))} and found "
            f"{others} other files and {len(dangling)} links to nothing"
        )
    return _Tree(root, _wrapper(images), tuple(images), tuple(dangling), tuple(leaves))


def _wrapper(images: Sequence[PurePosixPath]) -> PurePosixPath:
    """Return the folder that wraps every class folder; images beside it are passed over."""
    folders = {path.parent.parts for path in images}
    depth = 0
    while len(tops := {parts[depth] for parts in folders if len(parts) > depth}) == 1:
        if (top := tops.pop()).lower() not in _WRAPPERS:
            break
        depth += 1
        folders = {parts for parts in folders if parts[depth - 1 : depth] == (top,)}
    return PurePosixPath(*next(iter(folders))[:depth])


def _has_splits(tree: _Tree) -> bool:
    """Tell whether there are two split folders or more, and class folders in one at least.

    One alone may be a class of vehicles; class folders beside several fit, and are refused later.
    """
    folders = [folder.parts for folder in set(map(tree.folder_of, tree.images)) if folder.parts]
    return len({parts[0].lower() for parts in folders} & SPLITS.keys()) > 1 and any(
        parts[0].lower() in SPLITS for parts in folders if len(parts) > 1
    )


def _check_splits(tree: _Tree, has_splits: bool) -> None:
    """Refuse images that lie in no split folder, or in folders beside those."""
    tops = sorted({folder.parts[0] for path in tree.images if (folder := tree.folder_of(path)).parts})
    others = [top for top in tops if top.lower() not in SPLITS]
    if not has_splits:
        raise BadData(
            f"{tree.root} is not laid out as train/<class>/ and test/<class>/: its images lie below "
            f"{_named(tops) or 'no folder'}; read it as folder"
        )
    if others:
        raise BadData(
            f"{tree.root} holds the split folders {_named([top for top in tops if top not in others])} and"
            f" beside them the folders {_named(others)}: move these into one of those, or away (or read it as"
            " folder, where train/a and test/a are two classes)"
        )


def _named(folders: list[str]) -> str:
    return ", ".join(map(path_text, folders[:5])) + (" and others" if len(folders) > 5 else "")
