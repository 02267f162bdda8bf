"""The format `inshop`, DeepFashion In-shop Clothes Retrieval: one list says train, query or gallery.

The list is `Eval/list_eval_partition.txt`, or lies in the folder itself; the images lie below `img/` or
`Img/img/`.
"""

import os
import re
from pathlib import Path
from typing import Final

from serving.catalog.listing import Listed, check, locate, read_list
from serving.catalog.rows import Catalog
from serving.errors import BadData

__all__ = ["find", "parse", "read"]

_LISTS: Final = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
_COLUMNS: Final = ("image_name", "item_id", "evaluation_status")
_ITEM: Final = re.compile("id_([0-9]{1,8})")


def find(root: Path) -> Path | None:
    """Return `root` if the list is in it or in its folder Eval."""
    return root if any(os.path.isfile(root / name) for name in _LISTS) else None


def parse(folder: Path) -> list[Listed]:
    """Return the images that the list names; the disk is not asked for them.

    Raises:
        BadData: The list does not hold.
    """
    path = next((folder / name for name in _LISTS if os.path.isfile(folder / name)), folder / _LISTS[0])
    listed = []
    for where, (name, item, status) in read_list(path, _COLUMNS, counted=True):
        if status not in ("train", "query", "gallery"):
            raise BadData(f"{where} has the status {status!r}, which is not one of train, query and gallery")
        number = _ITEM.fullmatch(item)
        if number is None:
            raise BadData(f"{where} has the item {item!r}, which is not of the form id_00000001")
        listed.append(Listed(name, f"id_{int(number[1]):08d}", status))
    return check(listed, path)


def read(folder: Path) -> Catalog:
    """Return a row for each listed image that is there; `folder` is the data set's.

    Raises:
        BadData: The list does not hold, or none of its images is there.
    """
    return locate(folder, "inshop", parse(folder), ("", "Img"))
