"""Which format a folder is of: no layout is taken for another, and one that could be two is asked about."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import published_counts
from serving.catalog.catalog import FORMATS, Format, Layout, read, read_listed
from serving.catalog.walk import which_are_files
from serving.errors import BadData, BadSetting
from tests.serving.published import (
    draw,
    inshop_lines,
    make_cars,
    make_cars_devkit,
    make_cub,
    make_inshop,
    make_sop,
    write,
)
from tests.serving.test_parquet import make_parquet
from tests.serving.test_webdataset import make_tar
from training.loop.run import check_record

MAKERS: list[tuple[str, Callable[[Path], object]]] = [
    ("cub", make_cub),
    ("cars", make_cars),
    ("cars", lambda root: make_cars_devkit(root, labelled=False)),
    ("sop", make_sop),
    ("inshop", make_inshop),
    ("webdataset", lambda root: make_tar(root / "train-0.tar", {"1.jpg": b"x", "1.cls": "0"})),
    ("parquet", lambda root: make_parquet(root / "data/train-0.parquet", image=[b"x"], label=["a"])),
    ("csv", lambda root: write(draw(root, ["a/1.jpg", "b/1.jpg"]) / "items.csv", "path,label", "a/1.jpg,a")),
    ("cifar10", lambda root: draw(root, ["train/a/1.jpg", "test/a/1.jpg"])),
    ("folder", lambda root: draw(root, ["a/1.jpg", "b/1.jpg"])),
]


PACKED = ("webdataset", "parquet")


def test_formats_are_declared_once() -> None:
    assert ("auto", "folder", "csv", "cifar10", "cub", "cars", "sop", "inshop", *PACKED) == FORMATS
    assert get_args(Format) == ("auto", *get_args(Layout))


@pytest.mark.parametrize(("format", "make"), MAKERS)
def test_each_layout_is_found_and_is_read_again_from_its_own_root(
    tmp_path: Path, format: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path)
    catalog = read(tmp_path)
    assert catalog.format == format
    assert read(tmp_path, format) == read(catalog.root, format) == read(catalog.root) == catalog
    assert all(row.image.read_bytes() for row in catalog.rows)
    assert [row.key for row in catalog.rows] == sorted(row.key for row in catalog.rows)


@pytest.mark.parametrize(("format", "make"), MAKERS[:5])
def test_layouts_with_lists_can_be_read_as_folders_where_that_is_asked(
    tmp_path: Path, format: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path)
    catalog = read(tmp_path, "folder")
    assert catalog.format == "folder"
    assert len(catalog.rows) == len(read(tmp_path, format).rows)


@pytest.mark.parametrize("format", ["cub", "cars", "sop", "inshop"])
def test_folder_that_is_not_of_the_format_asked_for_is_refused(tmp_path: Path, format: str) -> None:
    draw(tmp_path, ["a/1.jpg", "b/1.jpg"])
    with pytest.raises(BadData, match=r"is not there; give the folder|holds neither cars_annos\.mat nor"):
        read(tmp_path, format)


def test_lists_of_the_same_names_in_another_form_leave_a_folder_a_folder(tmp_path: Path) -> None:
    """A subset of CUB with commas in its lists, and NABirds with names for numbers, are found in the wild."""
    for name, lines in (
        ("commas", ["0, Black_footed_Albatross/0000.jpg", "1, Black_footed_Albatross/0001.jpg"]),
        ("nabirds", ["0000139e-21dc-4d0c-bfe1-4cae3c85c829 0817/0000139e21dc4d0cbfe14cae3c85c829.jpg"]),
    ):
        root = draw(tmp_path / name, ["images/0817/1.jpg", "images/0818/1.jpg"])
        write(root / "images.txt", *lines)
        write(root / "image_class_labels.txt", "0, 0", "1, 0")
        assert read(root).format == "folder"
    write(
        tmp_path / "other" / "images.txt", "1 001.Black_footed_Albatross/1.jpg"
    )  # beside none of CUB's lists
    assert read(draw(tmp_path / "other", ["a/1.jpg"])).format == "folder"


def test_layout_that_could_be_two_says_which(tmp_path: Path) -> None:
    make_cub(tmp_path)
    write(
        tmp_path / "mine.csv",
        "path,label",
        "images/001.Black_footed_Albatross/Black_footed_Albatross_1.jpg,a",
    )
    with pytest.raises(BadData, match=r"fits the formats cub and csv; say which by the format"):
        read(tmp_path)
    make_sop(tmp_path)
    write(tmp_path / "list_eval_partition.txt", *inshop_lines())
    with pytest.raises(BadData, match=r"fits the formats cub and sop and inshop and csv"):
        read(tmp_path)
    assert read(tmp_path, "sop").format == "sop"
    assert read(tmp_path / "mine.csv").format == "csv"


def test_download_among_other_folders_is_not_read_as_if_it_were_all(tmp_path: Path) -> None:
    make_cub(tmp_path / "CUB_200_2011")
    draw(tmp_path, ["flowers/rose/1.jpg"])
    with pytest.raises(
        BadData, match=r"fits the formats cub and folder; say which .* or give the folder within"
    ):
        read(tmp_path)
    assert len(read(tmp_path, "cub").rows) == 10
    assert len(read(tmp_path, "folder").rows) == 11


def test_lists_in_a_folder_that_may_not_be_entered_are_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sop(tmp_path)
    real = os.scandir

    def scandir(path: str) -> object:  # root may read everything, so no mode bits
        if str(path).endswith("chair_final"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadData, match="chair_final cannot be read: permission denied"):
        read(tmp_path)


def test_folders_are_listed_once_and_not_asked_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, [f"{folder}/{i}.jpg" for folder in "ab" for i in range(50)])
    (tmp_path / "a" / "link.jpg").symlink_to("1.jpg")
    (tmp_path / "a" / "circle.jpg").symlink_to("circle.jpg")
    (tmp_path / "a" / "folder.jpg").mkdir()
    asked: list[str] = []
    real = os.scandir

    def scandir(path: str) -> object:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os.path, "isfile", lambda path: asked.append(str(path)))
    paths = [f"{folder}/{i}.jpg" for i in range(50) for folder in "ab"]
    assert which_are_files(tmp_path, paths) == [True] * 100
    assert asked == [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.undo()
    odd = [
        "a/link.jpg",
        "a/circle.jpg",
        "a/folder.jpg",
        "a/gone.jpg",
        "c/1.jpg",
        "a/1.jpg/x",
        "x" * 5000 + "/1.jpg",
    ]
    assert which_are_files(tmp_path, odd) == [True] + [False] * 6
    monkeypatch.setattr(os.path, "isfile", lambda path: Path(path).name.lower() == "1.jpg")  # case is folded
    assert which_are_files(tmp_path, ["a/1.JPG", "a/gone.jpg"]) == [True, False]


def test_format_without_published_lists_has_none_to_read(tmp_path: Path) -> None:
    with pytest.raises(
        BadSetting, match="the format 'folder' has no published lists; give one of cub, cars, sop, i"
    ):
        read_listed(tmp_path, "folder")


def test_record_of_a_run_may_name_every_layout_and_no_other() -> None:
    data: dict[str, object] = {
        "root": "/d",
        "table": None,
        "train_classes": [],
        "train_images": 0,
        "digest": "0" * 64,
    }
    for format in get_args(Layout):
        record = {"name": "n", "data": data | {"format": format}, "metrics": {}}
        assert check_record(record, source="record.json") == record


# --- the published counts, on lists made up here -----------------------------------------------------------


def test_counts_that_are_as_published_pass_and_others_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected: dict[tuple[str, str], published_counts.Counts] = {
        ("CUB_200_2011", "cub"): {"train": (6, 3), "test": (4, 2)},
        ("Cars196", "cars"): {"train": (4, 2), "test": (6, 3)},
        ("Cars196/devkit", "cars"): {"cars_train": (5, 5), "cars_test": (5, 0)},
        ("InShop", "inshop"): {"train": (3, 2), "query": (1, 1), "gallery": (2, 2)},
        ("Stanford_Online_Products", "sop"): {"train": (6, 3), "test": (4, 2)},
        ("Elsewhere", "sop"): {"train": (1, 1)},
    }
    make_cub(tmp_path / "CUB_200_2011")
    make_inshop(tmp_path / "InShop")
    make_sop(tmp_path / "Stanford_Online_Products")
    cars = tmp_path / "Cars196"
    make_cars_devkit(cars, labelled=False)
    for part, numbers in (("train", (1, 98, 1, 98)), ("test", (99, 174, 196, 99, 174, 196))):
        rows = (f"{i} {number} 1 car_ims/{part}{i}.jpg" for i, number in enumerate(numbers))
        write(cars / f"derived_cars196_{part}.txt", "image_id class_id super_class_id path", *rows)
    assert published_counts.main(str(tmp_path), expected) == 0
    told = capsys.readouterr().out
    assert "Cars196 as cars, by a cars_annos.mat made from the derived lists: as published" in told
    assert "Elsewhere: not there, not checked" in told
    assert published_counts.main(str(tmp_path), expected | {("CUB_200_2011", "cub"): {"train": (6, 3)}}) == 1
    assert (
        "  test            4 images       2 classes; published      0 and      0" in capsys.readouterr().out
    )
    assert published_counts.main(str(tmp_path / "InShop"), expected) == 1  # nothing to count
