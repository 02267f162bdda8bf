"""The format `cars`, Cars196, in both layouts in which it is found.

- `cars_annos.mat` beside `car_ims/`;
- `devkit/cars_train_annos.mat`, `devkit/cars_test_annos.mat` (or `cars_test_annos_withlabels.mat`) and
  `devkit/cars_meta.mat` beside `cars_train/` and `cars_test/`.

Classes 1 to 98 train and 99 to 196 test. Which of its folders an image lies in says nothing: that is the
split of classification, in which every class is on both sides.
"""

import os
from pathlib import Path
from typing import Any, Final

from serving.catalog.listing import Listed, check, locate, published_number
from serving.catalog.matlab import read_arrays
from serving.catalog.rows import Catalog
from serving.errors import BadData

__all__ = ["find", "parse", "read"]

_CLASSES: Final = 196
_TRAIN: Final = 98
_ANNOTATIONS: Final = "cars_annos.mat"
_TRAIN_LIST: Final = "cars_train_annos.mat"
_TEST_LISTS: Final = ("cars_test_annos_withlabels.mat", "cars_test_annos.mat")
_META: Final = "cars_meta.mat"


def find(root: Path) -> Path | None:
    """Return `root` if annotations of either layout are in it or in its folder devkit."""
    names = (_ANNOTATIONS, _TRAIN_LIST, *_TEST_LISTS)
    return root if any(_file(root, name) for name in names) else None


def parse(folder: Path) -> list[Listed]:
    """Return the images that the annotations name; the disk is not asked for them.

    Images of the test folder are of no class where only `cars_test_annos.mat` is there, which names none.

    Raises:
        BadData: The annotations do not hold.
    """
    whole, train = _file(folder, _ANNOTATIONS), _file(folder, _TRAIN_LIST)
    if whole is not None and (train is None or os.path.isdir(folder / "car_ims")):
        content = read_arrays(whole, ("annotations", "class_names"))
        return check(_listed(whole, content, "relative_im_path", "", _names(whole, content)), whole)
    meta, test = _file(folder, _META), _file(folder, *_TEST_LISTS)
    if train is None or test is None:
        wanted = _TRAIN_LIST if train is None else _TEST_LISTS[1]
        raise BadData(f"{folder} holds neither {_ANNOTATIONS} nor devkit/{wanted}; take the published files")
    names = _names(meta, read_arrays(meta, ("class_names",))) if meta is not None else {}
    listed = [
        *_listed(train, read_arrays(train, ("annotations",)), "fname", "cars_train/", names),
        *_listed(test, read_arrays(test, ("annotations",)), "fname", "cars_test/", names),
    ]
    return check(listed, train.parent)


def read(folder: Path) -> Catalog:
    """Return a row for each listed image that is there; `folder` is the data set's.

    Raises:
        BadData: The annotations do not hold, or none of their images is there.
    """
    return locate(folder, "cars", parse(folder))


def _file(folder: Path, *names: str) -> Path | None:
    """Return the first of the files that is there, in `devkit` or in the folder itself."""
    places = [folder / below / name for name in names for below in ("devkit", "")]
    return next((place for place in places if os.path.isfile(place)), None)


def _listed(
    path: Path, content: dict[str, Any], image: str, below: str, names: dict[int, str]
) -> list[Listed]:
    """Return the images of one file; `image` is the field with their paths, which lie `below` a folder."""
    annotations = content["annotations"]
    fields = annotations[0] if annotations and isinstance(annotations[0], dict) else ()
    if image not in fields:
        raise BadData(
            f"the annotations of {path} have no field {image!r} but {', '.join(fields) or 'none at all'};"
            " take the published file"
        )
    paths = [_text(annotation[image]) for annotation in annotations]
    if "class" not in fields and image == "fname" and path.name == _TEST_LISTS[1]:
        return [Listed(below + each, "", "") for each in paths]
    if "class" not in fields:
        raise BadData(f"the annotations of {path} have no field 'class'; take the published file")
    listed = []
    for number, (each, annotation) in enumerate(zip(paths, annotations, strict=True), 1):
        value = published_number(_text(annotation["class"]), _CLASSES, f"annotation {number} of {path}")
        label = names.get(value, f"{value:03d}")
        listed.append(Listed(below + each, label, "train" if value <= _TRAIN else "test"))
    return listed


def _names(path: Path, content: dict[str, Any]) -> dict[int, str]:
    """Return labels by class number, such as `001.AM General Hummer SUV 2000`.

    A slash in a name (Ram C/V Cargo Van) becomes a dash: in a label it would part a folder from a class.
    """
    names = [_text(value) for value in content["class_names"]]
    if len(names) != _CLASSES or not all(names):
        raise BadData(
            f"{path} has {sum(map(bool, names))} class names and not {_CLASSES}; take the published file"
        )
    return {number: f"{number:03d}.{name.replace('/', '-')}" for number, name in enumerate(names, 1)}


def _text(value: object) -> str:
    """Return the one value of an array as text, a whole number in digits; nothing where there is no such."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], int | float):
        return str(int(value[0])) if value[0] == value[0] // 1 else str(value[0])
    return value if isinstance(value, str) else ""
