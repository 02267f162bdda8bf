"""Small data sets in the layouts of the published ones: a few classes of each side, every image drawn."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from serving.catalog.catalog import SplitRule, read
from serving.errors import BadData
from tests.pictures import encoded, picture

CUB = {
    1: "Black_footed_Albatross",
    2: "Laysan_Albatross",
    100: "Brown_Pelican",
    101: "White_Pelican",
    200: "Yellowthroat",
}
CARS = {
    1: "AM General Hummer SUV 2000",
    98: "Eagle Talon",
    99: "FIAT 500",
    174: "Ram C/V Cargo Van",
    196: "smart",
}
_IMAGE = encoded(picture(6, 4), "JPEG")


GIVEN = SplitRule(by="given")


def refused(root: Path, message: str, format: str = "auto") -> None:
    with pytest.raises(BadData, match=message):
        read(root, format)


def draw(root: Path, paths: Iterable[str]) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(_IMAGE)
    return root


def write(path: Path, *lines: str, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())


def make_cub(root: Path, classes: Mapping[int, str] = CUB) -> Path:
    """Two images a class, listed in no order of the classes."""
    images = [
        (f"{number:03d}.{name}/{name}_{i}.jpg", number) for i in (1, 2) for number, name in classes.items()
    ]
    draw(root / "images", (path for path, _ in images))
    write(root / "images.txt", *(f"{i} {path}" for i, (path, _) in enumerate(images, 1)))
    write(root / "image_class_labels.txt", *(f"{i} {number}" for i, (_, number) in enumerate(images, 1)))
    write(root / "train_test_split.txt", *(f"{i} {i % 2}" for i in range(1, len(images) + 1)))
    write(root / "classes.txt", *(f"{number} {number:03d}.{name}" for number, name in classes.items()))
    return root


def make_sop(root: Path) -> Path:
    lines = {
        "train": [(1, "bicycle"), (9, "chair"), (11318, "chair")],
        "test": [(11319, "bicycle"), (22634, "chair")],
    }
    image = 0
    for split, classes in lines.items():
        rows = []
        for number, kind in classes * 2:
            image += 1
            rows.append(f"{image} {number} {1 + (kind == 'chair')} {kind}_final/{number}_{image}.JPG")
        draw(root, (row.split()[3] for row in rows))
        write(root / f"Ebay_{split}.txt", "image_id class_id super_class_id path", *rows)
    return root


INSHOP = [
    ("MEN/Denim/id_00000080/01_1_front.jpg", 80, "train"),
    ("MEN/Denim/id_00000080/01_2_side.jpg", 80, "train"),
    ("WOMEN/Tees_Tanks/id_00007982/01_1_front.jpg", 7982, "query"),
    ("WOMEN/Tees_Tanks/id_00007982/01_3_back.jpg", 7982, "gallery"),
    ("WOMEN/Dresses/id_00000002/02_1_front.jpg", 2, "train"),
    ("WOMEN/Dresses/id_00000011/02_1_front.jpg", 11, "gallery"),
]


def inshop_lines(rows: Sequence[tuple[str, int, str]] = INSHOP) -> list[str]:
    """The list, its columns padded as the published one's are."""
    lines = [f"{'img/' + path:<70} id_{number:08d} {split:<10}" for path, number, split in rows]
    return [str(len(lines)), "image_name item_id evaluation_status", *lines]


def make_inshop(root: Path, *, below: str = "") -> Path:
    draw(root / below / "img", (path for path, _, _ in INSHOP))
    write(root / "Eval" / "list_eval_partition.txt", *inshop_lines())
    return root


def annotated(
    rows: Sequence[tuple[str, object]], image: str = "relative_im_path", *, labelled: bool = True
) -> np.ndarray:
    """Annotations in the structure of the published ones; `image` is the field with the paths."""
    boxes = [(name, "O") for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")]
    found = np.empty((1, len(rows)), [*boxes, *([("class", "O")] if labelled else []), (image, "O")])
    for place, (name, number) in enumerate(rows):
        found[0, place] = (1, 1, 5, 3, *([number] if labelled else []), name)
    return found


def car_names(count: int = 196) -> np.ndarray:
    names = np.empty((1, count), object)
    names[0] = [CARS.get(number, f"Car {number}") for number in range(1, count + 1)]
    return names


def make_cars(root: Path) -> Path:
    """The layout with one file: a whole of 10 images."""
    rows = [(f"car_ims/{place:06d}.jpg", number) for place, number in enumerate([*CARS, *CARS], 1)]
    draw(root, (path for path, _ in rows))
    savemat(root / "cars_annos.mat", {"annotations": annotated(rows), "class_names": car_names()})
    return root


def make_cars_devkit(root: Path, *, labelled: bool) -> Path:
    """The layout with a devkit: each class has one image in each folder, under the same names."""
    rows = [(f"{place:05d}.jpg", number) for place, number in enumerate(CARS, 1)]
    draw(root, (f"{folder}/{path}" for folder in ("cars_train", "cars_test") for path, _ in rows))
    test = "cars_test_annos_withlabels.mat" if labelled else "cars_test_annos.mat"
    contents = {
        "cars_train_annos.mat": {"annotations": annotated(rows, "fname")},
        test: {"annotations": annotated(rows, "fname", labelled=labelled)},
        "cars_meta.mat": {"class_names": car_names()},
    }
    (root / "devkit").mkdir(exist_ok=True)
    for name, content in contents.items():
        savemat(root / "devkit" / name, content)
    return root
