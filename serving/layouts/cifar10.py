"""The format `cifar10`: `train/<class>/x.jpg` and `test/<class>/x.jpg`; the data set names the split."""

from pathlib import PurePosixPath
from typing import Final

from serving.errors import BadData
from serving.layouts.tree import Tree, tree_catalog
from serving.rows import SPLITS, Catalog, path_text

__all__ = ["fits", "read"]

_SPLITS: Final = {name: side for name, side in SPLITS.items() if side not in ("query", "gallery")}


def fits(tree: Tree) -> bool:
    """Tell whether the images are laid out so.

    Where the images with a class lie says what the layout is; one beside the class folders changes nothing.
    """
    parts = [tree.below(path).parts for path in tree.images]
    tops = {each[0].lower() for each in parts if len(each) > 1}
    classed = {each[0].lower() for each in parts if len(each) > 2}
    return {"train", "test"} <= classed and tops <= _SPLITS.keys()


def read(tree: Tree) -> Catalog:
    """Return a row for each image, with its split.

    Raises:
        BadData: The images are not laid out so.
    """
    if not fits(tree):
        top = sorted({path_text(path).partition("/")[0] for path in tree.images})
        raise BadData(
            f"{tree.root} is not laid out as train/<class>/ and test/<class>/: its images lie below "
            f"{', '.join(top[:5])}{' and others' if len(top) > 5 else ''}; read it as folder"
        )
    return tree_catalog(tree, "cifar10", _classify)


def _classify(folder: PurePosixPath) -> tuple[PurePosixPath, str]:
    if not folder.parts:
        return folder, ""
    return folder.relative_to(folder.parts[0]), _SPLITS.get(folder.parts[0].lower(), "")
