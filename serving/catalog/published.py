"""The published lists of `cub`, `sop` and `inshop`: read as text, checked, and held against the disk.

- `cub`, CUB-200-2011: `images.txt` and `image_class_labels.txt` beside the folder `images/`. Classes 1 to 100
  train and 101 to 200 test. `train_test_split.txt` is not read: it is the split of classification, in which
  every class is on both sides.
- `sop`, Stanford Online Products: `Ebay_train.txt` and `Ebay_test.txt` beside the images.
- `inshop`, DeepFashion In-shop Clothes Retrieval: one list says train, query or gallery, in the folder `Eval`
  or in the folder itself; the images lie below `img/` or `Img/img/`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from serving.catalog.picture import File
from serving.catalog.rows import Catalog, Row, make_catalog
from serving.catalog.table import read_text
from serving.catalog.walk import sort_out
from serving.errors import BadData

__all__ = [
    "Listed", "check", "find_cub", "find_inshop", "find_sop", "locate", "parse_cub", "parse_inshop",
    "parse_sop", "published_number",
]  # fmt: skip

_CUB_CLASSES: Final = 200
_CUB_LINE: Final = re.compile(rb"^(?:\xef\xbb\xbf)?\d+ +\d{3}\.[^\s/]+/\S+\s*$", re.MULTILINE)
_CUB_BESIDE: Final = ("image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")
_MOST_IMAGES: Final = 10**8
_SOP_LISTS: Final = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}
_SOP_CLASSES: Final = 99_999  # as many digits as a label has, so that sorted labels are in the numbers' order
_INSHOP_LISTS: Final = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
_INSHOP_ITEM: Final = re.compile("id_([0-9]{1,8})")


class Listed(NamedTuple):
    """One image that a list names, whether it is on disk or not."""

    path: str
    """POSIX path as the list has it; the row's key."""
    label: str
    """Class, such that the classes' sorted names are in the order of their published numbers; or empty."""
    split: str


def find_cub(root: Path) -> Path | None:
    """Return the folder of CUB's lists, if there is one: `root`, or CUB_200_2011 in it.

    Others have files of these names too, so a line of `images.txt` must look as it does here.
    """
    for folder in (root, root / "CUB_200_2011"):
        images = folder / "images.txt"
        if images.is_file() and any((folder / name).is_file() for name in _CUB_BESIDE):
            with open(images, "rb") as file:
                if _CUB_LINE.search(file.read(4096)):
                    return folder
    return None


def parse_cub(folder: Path) -> list[Listed]:
    """Return the images that CUB's lists name; the disk is not asked for them."""
    path, labels, classes = (
        folder / name for name in ("images.txt", "image_class_labels.txt", "classes.txt")
    )
    numbers, names = dict[int, int](), dict[int, str]()
    for where, (image, number) in _read_list(labels, ("image number", "class number"), header=False):
        key = published_number(image, _MOST_IMAGES, where)
        if key in numbers:
            raise BadData(f"{where} gives image {key} a class again; each image is of one class")
        numbers[key] = published_number(number, _CUB_CLASSES, where)
    if classes.is_file():
        for where, (number, name) in _read_list(classes, ("class number", "name"), header=False):
            value = published_number(number, _CUB_CLASSES, where)
            names[value] = f"{value:03d}.{name.removeprefix(f'{value:03d}.')}"
    listed = []
    for where, (image, name) in _read_list(path, ("image number", "path"), header=False):
        value = numbers.pop(published_number(image, _MOST_IMAGES, where), 0)
        if not value:
            raise BadData(f"{where} names image {image}, which has no class (or comes twice) in {labels}")
        listed.append(Listed(name, names.get(value, f"{value:03d}"), "train" if value <= 100 else "test"))
    if numbers:
        raise BadData(f"{labels} gives a class to image {min(numbers)}, which is not in {path}")
    return check(listed, path)


def find_sop(root: Path) -> Path | None:
    """Return the folder of SOP's lists, if there is one: `root`, or Stanford_Online_Products in it."""
    places = (
        folder / name for folder in (root, root / "Stanford_Online_Products") for name in _SOP_LISTS.values()
    )
    return next((place.parent for place in places if place.is_file()), None)


def parse_sop(folder: Path) -> list[Listed]:
    """Return the images that SOP's lists name; the disk is not asked for them."""
    columns = ("image_id", "class_id", "super_class_id", "path")
    listed = [
        Listed(path, f"{published_number(number, _SOP_CLASSES, where):05d}", split)
        for split, name in _SOP_LISTS.items()
        for where, (_, number, _, path) in _read_list(folder / name, columns)
    ]
    return check(listed, folder)


def find_inshop(root: Path) -> Path | None:
    """Return `root` if the list of In-shop is in it or in its folder Eval."""
    return root if any((root / name).is_file() for name in _INSHOP_LISTS) else None


def parse_inshop(folder: Path) -> list[Listed]:
    """Return the images that the list of In-shop names; the disk is not asked for them."""
    paths = [folder / name for name in _INSHOP_LISTS]
    path = next((each for each in paths if each.is_file()), paths[0])
    listed = []
    columns = ("image_name", "item_id", "evaluation_status")
    for where, (name, item, status) in _read_list(path, columns, counted=True):
        if status not in ("train", "query", "gallery"):
            raise BadData(f"{where} has the status {status!r}, which is not one of train, query and gallery")
        number = _INSHOP_ITEM.fullmatch(item)
        if number is None:
            raise BadData(f"{where} has the item {item!r}, which is not of the form id_00000001")
        listed.append(Listed(name, f"id_{int(number[1]):08d}", status))
    return check(listed, path)


def _read_list(
    path: Path, columns: Sequence[str], *, header: bool = True, counted: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yield where each line is, for messages, and its cells, which are parted by blanks.

    A first line names the columns where there is a `header`; one before it says how many lines follow in a
    list that is `counted`.
    """
    if not path.exists():
        raise BadData(f"{path} is not there; give the folder of the published lists, or another format")
    text = read_text(path)
    lines = [(number, cells) for number, line in enumerate(text.split("\n"), 1) if (cells := line.split())]
    start = counted + header
    head = [[str(max(0, len(lines) - start))]] * counted + [list(columns)] * header
    for number, wanted in enumerate(head):
        given = lines[number][1] if number < len(lines) else []
        if given != wanted:
            raise BadData(
                f"{path} has {' '.join(given)[:80]!r} where {' '.join(wanted)!r} was expected"
                f"{', the count of its images' if counted and not number else ''}; take the whole of the"
                " published list, or read the data set in another format"
            )
    for number, cells in lines[start:]:
        if len(cells) != len(columns):
            raise BadData(
                f"line {number} of {path} has {len(cells)} columns and not {len(columns)}"
                f" ({', '.join(columns)}); take the published list"
            )
        yield f"line {number} of {path}", cells


def published_number(text: str, most: int, where: str) -> int:
    """Return a published number, of a class or of an image, which is one of 1 to `most`."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise BadData(f"{where} has the number {text[:80]!r}, which is not one of 1 to {most}")
    return int(text)


def check(listed: Sequence[Listed], source: Path) -> list[Listed]:
    """Return the images of a list, or of the lists in a folder, once they are known to be fit to read."""
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


def locate(root: Path, format: str, listed: Sequence[Listed], folders: Sequence[str]) -> Catalog:
    """Return the listed images as a catalogue: those on disk as rows, the others as absent.

    Of the `folders` in `root` where the paths may start, the first that any image is in counts.
    """
    for base in (root / folder for folder in folders):
        rows = [Row(each.path, File(base / each.path), each.label, each.split) for each in listed]
        found, absent = sort_out(base, rows, root)
        if found:
            return make_catalog(root, format, found, absent=absent)
    places = " and ".join(str(root / folder) for folder in folders)
    raise BadData(
        f"none of the {len(listed)} images that the lists of {root} name is there: looked below {places} for"
        f" {', '.join(each.path for each in listed[:3])}{' and so on' if len(listed) > 3 else ''}"
    )
