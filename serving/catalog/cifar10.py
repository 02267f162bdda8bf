"""The format `cifar10`: class folders below split folders, `train/<class>/x.jpg` and `test/<class>/x.jpg`.

A class is the same in all of them, so that no copy of it is taken for another class.
"""

from pathlib import PurePosixPath

from serving.catalog.rows import SPLITS, Catalog, path_text
from serving.catalog.tree import Tree, tree_catalog
from serving.errors import BadData

__all__ = ["fits", "read"]


def fits(tree: Tree) -> bool:
    """Tell whether there are two split folders or more, and class folders in one at least.

    One alone may be a class of vehicles; class folders beside several fit, and `read` refuses them.
    """
    parts = [tree.below(path).parts for path in tree.images]
    return len({each[0].lower() for each in parts if len(each) > 1} & SPLITS.keys()) > 1 and any(
        each[0].lower() in SPLITS for each in parts if len(each) > 2
    )


def read(tree: Tree) -> Catalog:
    """Return a row for each image, with its split; one beside the folders is of no class.

    Raises:
        BadData: The images are not laid out so, or some lie in folders beside the split folders.
    """
    tops = sorted({parts[0] for path in tree.images if len(parts := tree.below(path).parts) > 1})
    others = [top for top in tops if top.lower() not in SPLITS]
    if not fits(tree):
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
    return tree_catalog(tree, "cifar10", _classify)


def _named(folders: list[str]) -> str:
    more = " and others" if len(folders) > 5 else ""
    return ", ".join(path_text(PurePosixPath(folder)) for folder in folders[:5]) + more


def _classify(folder: PurePosixPath) -> tuple[PurePosixPath, str]:
    if not folder.parts:
        return folder, ""
    return folder.relative_to(folder.parts[0]), SPLITS[folder.parts[0].lower()]
