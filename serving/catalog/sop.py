"""The format `sop`, Stanford Online Products: `Ebay_train.txt` and `Ebay_test.txt` beside the images."""

import os
from pathlib import Path
from typing import Final

from serving.catalog.listing import Listed, check, locate, published_number, read_list
from serving.catalog.rows import Catalog

__all__ = ["find", "parse", "read"]

_LISTS: Final = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}
_COLUMNS: Final = ("image_id", "class_id", "super_class_id", "path")
_MOST: Final = 99_999  # as many digits as a label has, so that sorted labels are in the order of the numbers


def find(root: Path) -> Path | None:
    """Return the folder of the lists, if there is one: `root`, or Stanford_Online_Products in it."""
    for folder in (root, root / "Stanford_Online_Products"):
        if any(os.path.isfile(folder / name) for name in _LISTS.values()):
            return folder
    return None


def parse(folder: Path) -> list[Listed]:
    """Return the images that the lists name; the disk is not asked for them.

    Raises:
        BadData: The lists do not hold.
    """
    return check(
        [
            Listed(path, f"{published_number(number, _MOST, where):05d}", split)
            for split, name in _LISTS.items()
            for where, (_, number, _, path) in read_list(folder / name, _COLUMNS)
        ],
        folder,
    )


def read(folder: Path) -> Catalog:
    """Return a row for each listed image that is there; `folder` is that of the lists.

    Raises:
        BadData: The lists do not hold, or none of their images is there.
    """
    return locate(folder, "sop", parse(folder))
