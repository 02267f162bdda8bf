"""The format `folder`: a class is a folder, nested as deep as one likes; the label is the folder's path."""

from serving.catalog.rows import Catalog
from serving.catalog.tree import Tree, tree_catalog

__all__ = ["read"]


def read(tree: Tree) -> Catalog:
    """Return a row for each image, its folder as its label."""
    return tree_catalog(tree, "folder", lambda folder: (folder, ""))
