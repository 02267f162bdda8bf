"""The published lists of `cub`, `cars`, `sop` and `inshop`: read, checked, and held against the disk.

- `cub`, CUB-200-2011: `images.txt` and `image_class_labels.txt` beside the folder `images/`. Classes 1 to 100
  train and 101 to 200 test. `train_test_split.txt` is not read: it is the split of classification.
- `cars`, Cars196: `cars_annos.mat` beside `car_ims/`, or the devkit beside `cars_train/` and `cars_test/`,
  which are the split of classification, too. Classes 1 to 98 train and 99 to 196 test.
- `sop`, Stanford Online Products: `Ebay_train.txt` and `Ebay_test.txt` beside the images.
- `inshop`, DeepFashion In-shop Clothes Retrieval: one list says train, query or gallery, in the folder `Eval`
  or in the folder itself; the images lie below `img/` or `Img/img/`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from serving.catalog.picture import File
from serving.catalog.rows import Catalog, Row, known_split
from serving.catalog.table import read_text
from serving.catalog.walk import sort_out
from serving.errors import BadData, BadSetting

__all__ = ["Listed", "find", "parse", "read"]

_CUB_LINE: Final = re.compile(rb"^(?:\xef\xbb\xbf)?\d+ +\d{3}\.[^\s/]+/\S+\s*$", re.MULTILINE)
_CUB_BESIDE: Final = ("image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")
_CARS_WHOLE: Final = "cars_annos.mat"
_CARS_TRAIN: Final = "cars_train_annos.mat"
_CARS_TEST: Final = ("cars_test_annos_withlabels.mat", "cars_test_annos.mat")  # the latter without classes
# On a file of which one byte is damaged, SciPy's reader can end its process or ask for any amount of memory.
# So it has a process of its own, which may take 4 GiB and a minute.
_LOAD: Final = """
import contextlib, json, resource, sys
from scipy.io import loadmat
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
with contextlib.suppress(ValueError):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.getrlimit(resource.RLIMIT_AS)[1]))
found = loadmat(sys.argv[1], variable_names=["annotations", "class_names"], simplify_cells=True)
print(json.dumps(found, default=lambda it: it.tolist() if hasattr(it, "tolist") else str(it)))
"""
_SOP_LISTS: Final = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}
_INSHOP_LIST: Final = "list_eval_partition.txt"


class Listed(NamedTuple):
    """One image that a list names, whether it is on disk or not."""

    path: str
    """POSIX path as the list has it; the row's key."""
    label: str
    """Class, such that the classes' sorted names are in the order of their published numbers; or empty."""
    split: str


def find(root: Path) -> dict[str, Path]:
    """Return the formats whose lists are in a folder, or in its folder of the published name, and where."""
    return {format: home for format in _KNOWN if (home := _home(root, format)) is not None}


def parse(root: Path, format: str) -> tuple[Path, list[Listed]]:
    """Return the folder of the lists and the images that they name; BadData where they do not hold."""
    home = _home(root, format) or root
    listed = _KNOWN[format].parse(home)
    if not listed:
        raise BadData(f"the lists of {home} name no image; take the published ones")
    is_trained, seen = dict[str, bool](), set[str]()
    for path, label, split in listed:
        if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):  # "/a" begins with an empty part
            raise BadData(f"{home} names the image {path!r}, which is no plain path below its folder")
        if path in seen:
            raise BadData(f"{home} names the image {path!r} twice; each image may be there once")
        seen.add(path)
        if label and is_trained.setdefault(label, split == "train") != (split == "train"):
            raise BadData(f"{home} has the class {label!r} both in train and in test; take the published one")
    return home, listed


def read(root: Path, format: str) -> Catalog:
    """Return the listed images that are on disk as rows, and the others as absent."""
    home, listed = parse(root, format)
    places = [home / folder for folder in _KNOWN[format].images]
    for place in places:  # the first that any image is in counts
        rows = [Row(path, File(place / path), label, split) for path, label, split in listed]
        found, absent, _ = sort_out(rows)
        if found:
            return Catalog(home, format, tuple(found), absent=tuple(absent))
    raise BadData(
        f"none of the {len(listed)} images that the lists of {home} name is there: looked below"
        f" {' and '.join(map(str, places))} for {', '.join(each.path for each in listed[:3])}"
        f"{' and so on' if len(listed) > 3 else ''}"
    )


def _home(root: Path, format: str) -> Path | None:
    known = _KNOWN[format]
    for home in (root, root / known.folder):
        if _file(home, *known.lists) and (format != "cub" or _is_cub(home)):
            return home
    return None


def _file(folder: Path, *names: str) -> Path | None:
    """Return the first of the files that is there, in the folder or where the lists lie within it."""
    places = (folder / below / name for name in names for below in ("devkit", "Eval", ""))
    return next((place for place in places if place.is_file()), None)


def _is_cub(home: Path) -> bool:
    """Others have files of these names too, so a line of `images.txt` must look as it does here."""
    images = home / "images.txt"
    if not images.is_file() or not _file(home, *_CUB_BESIDE):
        return False
    with open(images, "rb") as file:
        return _CUB_LINE.search(file.read(4096)) is not None


def _parse_cub(folder: Path) -> list[Listed]:
    images, classes, names = (folder / it for it in ("images.txt", "image_class_labels.txt", "classes.txt"))
    paths, numbers = _read_pairs(images, "image"), _read_pairs(classes, "image")
    named = _read_pairs(names, "class") if names.is_file() else {}
    for image in sorted(paths.keys() ^ numbers.keys())[:1]:
        raise BadData(f"image {image} is not in both {images} and {classes}; take the published lists")
    listed = []
    for image, path in paths.items():
        number = _class_number(numbers[image], 200, f"image {image} of {classes}")
        name = named.get(numbers[image], "").removeprefix(f"{number:03d}.")
        label = f"{number:03d}.{name}" if name else f"{number:03d}"
        listed.append(Listed(path, label, "train" if number <= 100 else "test"))
    return listed


def _parse_sop(folder: Path) -> list[Listed]:
    columns = ("image_id", "class_id", "super_class_id", "path")
    return [
        Listed(path, f"{_class_number(number, 99_999, where):05d}", split)
        for split, name in _SOP_LISTS.items()
        for where, (_, number, _, path) in _read_list(folder / name, columns)
    ]


def _parse_inshop(folder: Path) -> list[Listed]:
    path = _file(folder, _INSHOP_LIST) or folder / _INSHOP_LIST
    columns = ("image_name", "item_id", "evaluation_status")
    return [
        Listed(image, item, known_split(status, where))
        for where, (image, item, status) in _read_list(path, columns, counted=True)
    ]


def _parse_cars(folder: Path) -> list[Listed]:
    """Images of the test folder are of no class where only the devkit's own list of them is there."""
    whole, train = _file(folder, _CARS_WHOLE), _file(folder, _CARS_TRAIN)
    if whole is not None and (train is None or (folder / "car_ims").is_dir()):
        content = _read_arrays(whole)
        return _annotated(whole, content, "relative_im_path", "", _car_names(whole, content))
    meta, test = _file(folder, "cars_meta.mat"), _file(folder, *_CARS_TEST)
    if train is None or test is None:
        wanted = _CARS_TRAIN if train is None else _CARS_TEST[1]
        raise BadData(f"{folder} holds neither {_CARS_WHOLE} nor devkit/{wanted}; take the published files")
    names = _car_names(meta, _read_arrays(meta)) if meta else {}
    listed = _annotated(train, _read_arrays(train), "fname", "cars_train/", names)
    return listed + _annotated(test, _read_arrays(test), "fname", "cars_test/", names)


def _read_arrays(path: Path) -> Any:
    """Read a .mat file: cells as lists, structs as dicts, an array of one as its value."""
    if importlib.util.find_spec("scipy") is None:
        raise BadSetting("the format cars needs SciPy, which is not installed; install crossbatch[train]")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each thread of its own would take memory
    command = [sys.executable, "-P", "-c", _LOAD, os.fspath(path)]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    if done.returncode:
        raise BadData(f"{path} is damaged or no .mat file, and cannot be read; take the published file")
    return json.loads(done.stdout)


def _annotated(
    path: Path, content: Mapping[str, Any], image: str, below: str, names: Mapping[int, str]
) -> list[Listed]:
    """Return the images of one file; `image` is the field with their paths, which lie `below` a folder."""
    annotations = content.get("annotations")
    annotations = annotations if annotations and isinstance(annotations, list) else [annotations]
    needed = {image} if path.name == _CARS_TEST[1] else {image, "class"}
    listed = []
    for place, each in enumerate(annotations, 1):
        where, label, split = f"annotation {place} of {path}", "", ""
        if not isinstance(each, dict) or not needed <= each.keys():
            raise BadData(f"{where} lacks the field {' or '.join(sorted(needed))}; take the published file")
        if "class" in each:
            number = _class_number(str(each["class"]), 196, where)
            label, split = names.get(number, f"{number:03d}"), "train" if number <= 98 else "test"
        listed.append(Listed(f"{below}{each[image]}", label, split))
    return listed


def _car_names(path: Path, content: Mapping[str, Any]) -> dict[int, str]:
    names = content.get("class_names", [])
    if len(names) != 196:
        raise BadData(f"{path} has {len(names)} class names and not 196; take the published file")
    # In a label, the slash of Ram C/V Cargo Van would part a folder from a class.
    return {number: f"{number:03d}.{str(name).replace('/', '-')}" for number, name in enumerate(names, 1)}


def _class_number(text: str, most: int, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise BadData(f"{where} has the class number {text[:80]!r}, which is not one of 1 to {most}")
    return int(text)


def _read_pairs(path: Path, what: str) -> dict[str, str]:
    """Read a list without a header, whose lines are a number, each once, and what it stands for."""
    found = dict[str, str]()
    for where, (number, value) in _read_list(path, (f"{what} number", "value"), header=False):
        if number in found:
            raise BadData(f"{where} names {what} {number} again; take the published list")
        found[number] = value
    return found


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
    given = " ".join(cell for _, cells in lines[:start] for cell in cells)
    wanted = " ".join([str(max(0, len(lines) - start))] * counted + [*columns] * header)
    if given != wanted:
        raise BadData(
            f"{path} begins with {given[:80]!r} where {wanted!r} was expected"
            f"{', the count of its images first' if counted else ''}; take the whole of the published list,"
            " or read the data set in another format"
        )
    for number, cells in lines[start:]:
        where = f"line {number} of {path}"
        if len(cells) != len(columns):
            raise BadData(f"{where} has {len(cells)} columns and not {len(columns)} ({', '.join(columns)})")
        yield where, cells


class _Known(NamedTuple):
    parse: Callable[[Path], list[Listed]]
    lists: tuple[str, ...]
    """Any of these shows that the data set is there."""
    folder: str
    """What the folder of the lists is called as it is published."""
    images: tuple[str, ...] = ("",)
    """Where the images' paths may start from there."""


_KNOWN: Final = {
    "cub": _Known(_parse_cub, ("images.txt",), "CUB_200_2011", ("images",)),
    "cars": _Known(_parse_cars, (_CARS_WHOLE, _CARS_TRAIN, *_CARS_TEST), ""),
    "sop": _Known(_parse_sop, tuple(_SOP_LISTS.values()), "Stanford_Online_Products"),
    "inshop": _Known(_parse_inshop, (_INSHOP_LIST,), "", ("", "Img")),
}
