"""Cars196 in its two layouts; the files are .mat files in the structure of the published ones."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from serving.catalog.catalog import SplitRule, read, select
from serving.errors import BadData
from tests.serving.published import CARS, car_names, make_cars, make_cars_devkit, save_annotations

SIDES = {
    "001.AM General Hummer SUV 2000": "train",
    "098.Eagle Talon": "train",
    "099.FIAT 500": "test",
    "174.Ram C-V Cargo Van": "test",  # a slash would part a folder from a class
    "196.smart": "test",
}


@pytest.mark.parametrize("below", ["", "devkit"])
def test_one_file_beside_its_images(tmp_path: Path, below: str) -> None:
    make_cars(tmp_path)
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / "cars_annos.mat").rename(tmp_path / below / "cars_annos.mat")
    catalog = read(tmp_path)
    assert (catalog.format, len(catalog.rows), catalog.unlabelled) == ("cars", 10, 0)
    assert {row.label: row.split for row in catalog.rows} == SIDES
    assert (catalog.rows[0].key, catalog.rows[0].label) == (
        "car_ims/000001.jpg",
        "001.AM General Hummer SUV 2000",
    )


def test_devkit_with_labels_cuts_by_class_and_not_by_folder(tmp_path: Path) -> None:
    catalog = read(make_cars_devkit(tmp_path, labelled=True))
    assert {row.key.partition("/")[0] for row in catalog.rows} == {"cars_train", "cars_test"}
    assert {row.label: row.split for row in catalog.rows} == SIDES
    train = select(catalog, "train", SplitRule(by="given"))
    assert [row.key for row in train] == [
        f"cars_{part}/0000{i}.jpg" for part in ("test", "train") for i in (1, 2)
    ]


def test_devkit_without_labels_counts_its_test_images_as_of_no_class(tmp_path: Path) -> None:
    make_cars_devkit(tmp_path, labelled=False)
    catalog = read(tmp_path)
    assert (len(catalog.rows), catalog.unlabelled) == (10, 5)
    assert {row.label: row.split for row in catalog.rows if row.label} == SIDES
    assert {row.key[:9] for row in catalog.rows if not row.label} == {"cars_test"}
    (tmp_path / "devkit" / "cars_meta.mat").unlink()
    assert {row.label for row in read(tmp_path).rows} == {"", "001", "098", "099", "174", "196"}


def test_labels_are_taken_where_there_are_some(tmp_path: Path) -> None:
    make_cars_devkit(tmp_path, labelled=True)
    labelled = tmp_path / "devkit" / "cars_test_annos_withlabels.mat"
    save_annotations(tmp_path / "devkit" / "cars_test_annos.mat", "fname", [("00001.jpg", 0)], labelled=False)
    assert read(tmp_path).unlabelled == 0
    labelled.rename(tmp_path / labelled.name)  # where it is downloaded to
    assert read(tmp_path).unlabelled == 0
    (tmp_path / labelled.name).rename(tmp_path / "devkit" / "cars_test_annos.mat")
    assert read(tmp_path).unlabelled == 0


def test_layout_whose_images_are_there_is_read(tmp_path: Path) -> None:
    make_cars_devkit(tmp_path, labelled=True)
    rows = [("car_ims/000001.jpg", 1)]
    save_annotations(tmp_path / "cars_annos.mat", "relative_im_path", rows)
    assert {row.key[:9] for row in read(tmp_path).rows} == {"cars_test", "cars_trai"}
    make_cars(tmp_path)
    assert {row.key[:7] for row in read(tmp_path).rows} == {"car_ims"}


def test_numbers_saved_as_decimals_are_numbers(tmp_path: Path) -> None:
    make_cars(tmp_path)
    content = loadmat(tmp_path / "cars_annos.mat")
    for place in range(10):
        content["annotations"]["class"][0, place] = np.float64(
            content["annotations"]["class"][0, place].item()
        )
    savemat(tmp_path / "cars_annos.mat", {name: content[name] for name in ("annotations", "class_names")})
    assert {row.label: row.split for row in read(tmp_path).rows} == SIDES


@pytest.mark.parametrize("number", [0, 197, -1, 1.5, "one", [1, 2], []])
def test_class_that_is_no_class_is_refused(tmp_path: Path, number: object) -> None:
    make_cars(tmp_path)
    save_annotations(
        tmp_path / "cars_annos.mat",
        "relative_im_path",
        [("car_ims/000001.jpg", 1), ("car_ims/000002.jpg", number)],  # type: ignore[list-item]
    )
    with pytest.raises(
        BadData, match=r"annotation 2 of .*cars_annos\.mat has the number '.*', which is not one of"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("car_ims/1.jpg", 1), ("car_ims/1.jpg", 1)], "names the image 'car_ims/1.jpg' twice"),
        ([("../1.jpg", 1)], "the image '../1.jpg', which is no plain path"),
        ([("/car_ims/1.jpg", 1)], "which is no plain path"),
        ([("", 1)], "the image '', which is no plain path"),
        ([], "have no field|names no image"),
    ],
)
def test_images_that_cannot_be_are_refused(tmp_path: Path, rows: list[tuple[str, int]], message: str) -> None:
    make_cars(tmp_path)
    save_annotations(tmp_path / "cars_annos.mat", "relative_im_path", rows)
    with pytest.raises(BadData, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"annotations": np.eye(2), "class_names": car_names()},
            "no field 'relative_im_path' but none at all",
        ),
        ({"class_names": car_names()}, "has no annotations; take the published file"),
        ({"annotations": np.zeros((1, 1), [("fname", "O")]), "class_names": car_names()}, "but fname; take"),
        (
            {"annotations": np.zeros((1, 1), [("relative_im_path", "O")]), "class_names": car_names()},
            "field 'class'",
        ),
        ({"annotations": np.zeros((1, 1), [("relative_im_path", "O")])}, "has no class_names"),
        (
            {"annotations": np.zeros((1, 1), [("relative_im_path", "O")]), "class_names": car_names(3)},
            "has 3 class",
        ),
        (
            {"annotations": np.zeros((1, 1), [("relative_im_path", "O")]), "class_names": np.eye(14)},
            "has 0 class",
        ),
    ],
)
def test_file_without_what_is_needed_is_refused(
    tmp_path: Path, content: dict[str, object], message: str
) -> None:
    savemat(tmp_path / "cars_annos.mat", content)
    with pytest.raises(BadData, match=message):
        read(tmp_path)


def test_damaged_file_is_told_with_its_path(tmp_path: Path) -> None:
    path = make_cars(tmp_path) / "cars_annos.mat"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        BadData, match=r"cars_annos\.mat is damaged or no \.mat file; take the published file$"
    ):
        read(tmp_path)


def test_part_of_the_devkit_that_is_lost_is_named(tmp_path: Path) -> None:
    make_cars_devkit(tmp_path, labelled=True)
    (tmp_path / "devkit" / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(BadData, match=r"neither cars_annos\.mat nor devkit/cars_test_annos\.mat"):
        read(tmp_path)
    with pytest.raises(BadData, match=r"neither cars_annos\.mat nor devkit/cars_train_annos\.mat"):
        read(tmp_path / "cars_train", "cars")


def test_every_class_has_its_own_number(tmp_path: Path) -> None:
    rows = [(f"car_ims/{number}.jpg", number) for number in range(1, 197)]
    save_annotations(tmp_path / "cars_annos.mat", "relative_im_path", rows)
    (tmp_path / "car_ims").mkdir()
    for path, _ in rows:
        (tmp_path / path).touch()
    catalog = read(tmp_path)
    assert sorted({row.label for row in catalog.rows})[:2] == [f"001.{CARS[1]}", "002.Car 2"]
    for split in ("train", "test"):
        found = select(catalog, split, SplitRule(by="given"))
        assert len(found) == 98
        assert found == select(catalog, split, SplitRule(by="class", train=0.5))
