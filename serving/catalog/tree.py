"""The images below a folder, and the folder that wraps all class folders."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from serving.catalog.picture import File
from serving.catalog.rows import Catalog, Row, make_catalog, path_text
from serving.catalog.walk import walk
from serving.errors import BadData

__all__ = ["SUFFIXES", "Tree", "grow", "tree_catalog"]

SUFFIXES: Final = frozenset(  # in any case
    (".avif", ".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
)
_WRAPPERS: Final = frozenset(
    ("data", "dataset", "image", "images", "img", "imgs", "jpg", "photos", "pictures")
)


@dataclass(frozen=True, slots=True)
class Tree:
    """What lies below a folder; all paths are relative to it."""

    root: Path
    wrapper: PurePosixPath
    """The folder that wraps every class folder and says nothing about any, such as CUB's `images`."""
    images: tuple[PurePosixPath, ...]
    dangling: tuple[PurePosixPath, ...]
    """Links named as an image that lead nowhere."""
    leaves: tuple[PurePosixPath, ...]
    """Folders with neither an image nor a folder in them."""

    def below(self, path: PurePosixPath) -> PurePosixPath:
        """Return a file's path below the wrapper; what lies beside it is of no class, as if it lay in it."""
        return (
            path.relative_to(self.wrapper) if path.is_relative_to(self.wrapper) else PurePosixPath(path.name)
        )


def grow(root: Path) -> Tree:
    """List the images below a folder.

    Raises:
        BadData: A folder cannot be read, or there is no image.
    """
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
    return Tree(root, _wrapper(images), tuple(images), tuple(dangling), tuple(leaves))


def tree_catalog(
    tree: Tree, format: str, classify: Callable[[PurePosixPath], tuple[PurePosixPath, str]]
) -> Catalog:
    """Return a tree as a catalogue.

    Args:
        tree: The images.
        format: What to call the layout.
        classify: From an image's folder below the wrapper to the folder that is its class, and its split.
    """

    def row(path: PurePosixPath) -> Row:
        folder, split = classify(tree.below(path).parent)
        key = path_text(PurePosixPath(os.path.relpath(path, tree.wrapper)))
        return Row(key, File(tree.root / path), path_text(folder) if folder.parts else "", split)

    within = [path.relative_to(tree.wrapper) for path in tree.leaves if path.is_relative_to(tree.wrapper)]
    return make_catalog(
        tree.root / tree.wrapper,
        format,
        [row(path) for path in tree.images],
        empty=[path_text(path) for path in within],
        absent=[row(path) for path in tree.dangling],
    )


def _wrapper(images: Sequence[PurePosixPath]) -> PurePosixPath:
    """Return the folder that wraps every class folder; images beside it are passed over."""
    wrapper = PurePosixPath()
    while True:
        below = (path.relative_to(wrapper) for path in images if path.is_relative_to(wrapper))
        tops = {path.parts[0] for path in below if len(path.parts) > 1}
        if len(tops) != 1 or (top := tops.pop()).lower() not in _WRAPPERS:
            return wrapper
        wrapper /= top
