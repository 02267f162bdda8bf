"""The format `cub`, CUB-200-2011: `images.txt` and `image_class_labels.txt` beside the folder `images/`.

Classes 1 to 100 train and 101 to 200 test. The file `train_test_split.txt` is not read: it is the split of
classification, in which every class is on both sides.
"""

import os
import re
from pathlib import Path
from typing import Final

from serving.catalog.listing import Listed, check, locate, published_number, read_list
from serving.catalog.rows import Catalog
from serving.errors import BadData

__all__ = ["find", "parse", "read"]

_CLASSES: Final = 200
_TRAIN: Final = 100
_MOST_IMAGES: Final = 10**8
_LINE: Final = re.compile(rb"^(?:\xef\xbb\xbf)?\d+ +\d{3}\.[^\s/]+/\S+\s*$", re.MULTILINE)
_BESIDE: Final = ("image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")


def find(root: Path) -> Path | None:
    """Return the folder of the lists, if there is one: `root`, or CUB_200_2011 in it.

    Others have files of these names too, so a line of `images.txt` must look as it does here.
    """
    for folder in (root, root / "CUB_200_2011"):
        if any(os.path.isfile(folder / name) for name in _BESIDE) and _is_ours(folder / "images.txt"):
            return folder
    return None


def parse(folder: Path) -> list[Listed]:
    """Return the images that the lists name; the disk is not asked for them.

    Raises:
        BadData: The lists do not hold.
    """
    path, labels = folder / "images.txt", folder / "image_class_labels.txt"
    classes = dict[int, int]()
    for where, (image, number) in read_list(labels, ("image number", "class number"), header=False):
        key = published_number(image, _MOST_IMAGES, where)
        if key in classes:
            raise BadData(f"{where} gives image {key} a class again; each image is of one class")
        classes[key] = published_number(number, _CLASSES, where)
    names = _names(folder / "classes.txt")
    listed = []
    for where, (image, name) in read_list(path, ("image number", "path"), header=False):
        value = classes.pop(published_number(image, _MOST_IMAGES, where), 0)
        if not value:
            raise BadData(f"{where} names image {image}, which has no class (or comes twice) in {labels}")
        label = names.get(value, f"{value:03d}")
        listed.append(Listed(name, label, "train" if value <= _TRAIN else "test"))
    if classes:
        raise BadData(f"{labels} gives a class to image {min(classes)}, which is not in {path}")
    return check(listed, path)


def read(folder: Path) -> Catalog:
    """Return a row for each listed image that is there; `folder` is that of the lists.

    Raises:
        BadData: The lists do not hold, or none of their images is there.
    """
    return locate(folder, "cub", parse(folder), ("images",))


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return _LINE.search(file.read(4096)) is not None
    except OSError:
        return False


def _names(path: Path) -> dict[int, str]:
    """Return labels by class number, such as 001.Black_footed_Albatross; none where there is no such file."""
    if not os.path.isfile(path):
        return {}
    names = {}
    for where, (number, name) in read_list(path, ("class number", "name"), header=False):
        value = published_number(number, _CLASSES, where)
        names[value] = f"{value:03d}.{name.removeprefix(f'{value:03d}.')}"
    return names
