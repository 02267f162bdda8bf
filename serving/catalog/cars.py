"""The format `cars`, Cars196, in both layouts in which it is found.

- `cars_annos.mat` beside `car_ims/`;
- `devkit/cars_train_annos.mat`, `devkit/cars_test_annos.mat` (or `cars_test_annos_withlabels.mat`) and
  `devkit/cars_meta.mat` beside `cars_train/` and `cars_test/`.

Classes 1 to 98 train and 99 to 196 test. Which of its folders an image lies in says nothing: that is the
split of classification, in which every class is on both sides.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from serving.catalog.published import Listed, check, published_number
from serving.errors import BadData, BadSetting

__all__ = ["find_cars", "parse_cars"]

_CLASSES: Final = 196
_TRAIN: Final = 98
_ANNOTATIONS: Final = "cars_annos.mat"
_TRAIN_LIST: Final = "cars_train_annos.mat"
_TEST_LISTS: Final = ("cars_test_annos_withlabels.mat", "cars_test_annos.mat")
_META: Final = "cars_meta.mat"
# SciPy's reader can end the whole process, or ask for any amount of memory, on a file of which one byte is
# damaged. So it runs in a process of its own, which may take 4 GiB and a minute; it tells a line a file.
_LOAD: Final = """
import contextlib, json, resource, sys
from scipy.io import loadmat
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
with contextlib.suppress(ValueError):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.getrlimit(resource.RLIMIT_AS)[1]))
for path in sys.argv[1:]:
    found = loadmat(path, variable_names=["annotations", "class_names"], simplify_cells=True)
    print(json.dumps(found, default=lambda it: it.tolist() if hasattr(it, "tolist") else str(it)), flush=True)
"""


def find_cars(root: Path) -> Path | None:
    """Return `root` if annotations of either layout are in it or in its folder devkit."""
    return root if _file(root, _ANNOTATIONS, _TRAIN_LIST, *_TEST_LISTS) else None


def parse_cars(folder: Path) -> list[Listed]:
    """Return the images that the annotations name; the disk is not asked for them.

    Images of the test folder are of no class where only `cars_test_annos.mat` is there, which names none.
    """
    whole, train = _file(folder, _ANNOTATIONS), _file(folder, _TRAIN_LIST)
    if whole is not None and (train is None or (folder / "car_ims").is_dir()):
        (content,) = _read_arrays(whole)
        return check(_listed(whole, content, "relative_im_path", "", _names(whole, content)), whole)
    meta, test = _file(folder, _META), _file(folder, *_TEST_LISTS)
    if train is None or test is None:
        wanted = _TRAIN_LIST if train is None else _TEST_LISTS[1]
        raise BadData(f"{folder} holds neither {_ANNOTATIONS} nor devkit/{wanted}; take the published files")
    of_train, of_test, *of_meta = _read_arrays(train, test, *([meta] if meta else []))
    names = _names(meta, of_meta[0]) if meta else {}
    listed = _listed(train, of_train, "fname", "cars_train/", names)
    return check(listed + _listed(test, of_test, "fname", "cars_test/", names), train.parent)


def _file(folder: Path, *names: str) -> Path | None:
    """Return the first of the files that is there, in `devkit` or in the folder itself."""
    places = (folder / below / name for name in names for below in ("devkit", ""))
    return next((place for place in places if place.is_file()), None)


def _read_arrays(*paths: Path) -> list[dict[str, Any]]:
    """Read .mat files: cells as lists, structs as dicts, an array of one as its value."""
    if importlib.util.find_spec("scipy") is None:
        raise BadSetting(
            "SciPy is not installed, which the format cars needs; install scipy, or crossbatch[train]"
        )
    command = [sys.executable, "-P", "-c", _LOAD, *map(os.fspath, paths)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each thread of its own would take memory
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if len(found) < len(paths):
        damaged = "of version 7.3" if b"matlab v7.3" in done.stderr else "damaged or no .mat file"
        raise BadData(f"{paths[len(found)]} is {damaged}, and cannot be read; take the published file")
    return found


def _listed(
    path: Path, content: dict[str, Any], image: str, below: str, names: dict[int, str]
) -> list[Listed]:
    """Return the images of one file; `image` is the field with their paths, which lie `below` a folder."""
    annotations = content.get("annotations", [])
    annotations = [annotations] if isinstance(annotations, dict) else annotations  # an array of one
    is_struct = isinstance(annotations, list) and annotations and isinstance(annotations[0], dict)
    fields = annotations[0] if is_struct else {}
    has_labels = "class" in fields or path.name != _TEST_LISTS[1]
    for name in (image, "class") if has_labels else (image,):
        if name not in fields:
            raise BadData(
                f"the annotations of {path} have no field {name!r} but {', '.join(fields) or 'none at all'};"
                " take the published file"
            )
    listed = []
    for number, each in enumerate(annotations, 1):
        label, split = "", ""
        if has_labels:
            value = published_number(_text(each["class"]), _CLASSES, f"annotation {number} of {path}")
            label, split = names.get(value, f"{value:03d}"), "train" if value <= _TRAIN else "test"
        listed.append(Listed(below + _text(each[image]), label, split))
    return listed


def _names(path: Path, content: dict[str, Any]) -> dict[int, str]:
    """Return labels by class number, such as `001.AM General Hummer SUV 2000`.

    A slash in a name (Ram C/V Cargo Van) becomes a dash: in a label it would part a folder from a class.
    """
    names = [name for name in content.get("class_names", []) if isinstance(name, str) and name]
    if len(names) != _CLASSES:
        raise BadData(f"{path} has {len(names)} class names and not {_CLASSES}; take the published file")
    return {number: f"{number:03d}.{name.replace('/', '-')}" for number, name in enumerate(names, 1)}


def _text(value: object) -> str:
    """Return a text or a number as text, a whole number in digits; nothing where it is neither."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int | float) else ""
