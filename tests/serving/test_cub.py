"""CUB-200-2011: the lists alone say which images there are, of which class and on which side."""

from pathlib import Path

import pytest

from serving.catalog.catalog import SplitRule, read, read_listed, select, select_missing
from serving.errors import BadData
from tests.serving.published import CUB, draw, make_cub, write


def test_classes_of_the_first_hundred_train_whatever_the_split_of_classification_says(tmp_path: Path) -> None:
    catalog = read(make_cub(tmp_path))
    assert (catalog.format, catalog.root, len(catalog.rows)) == ("cub", tmp_path, 10)
    assert {row.label: row.split for row in catalog.rows} == {
        f"{number:03d}.{name}": "train" if number <= 100 else "test" for number, name in CUB.items()
    }
    first = catalog.rows[0]
    assert first.key == "001.Black_footed_Albatross/Black_footed_Albatross_1.jpg"
    assert catalog.path_of(first) == f"images/{first.key}"
    assert first.image.read_bytes()[:2] == b"\xff\xd8"


def test_download_around_the_folder_gives_the_same(tmp_path: Path) -> None:
    make_cub(tmp_path / "CUB_200_2011")
    write(tmp_path / "attributes.txt", "1 has_bill_shape::curved")
    draw(tmp_path, ["__MACOSX/CUB_200_2011/._images.txt", ".cache/x.jpg"])
    assert read(tmp_path) == read(tmp_path / "CUB_200_2011") == read(tmp_path, "cub")


def test_labels_come_from_the_lists_and_not_from_the_folders(tmp_path: Path) -> None:
    make_cub(tmp_path)
    write(tmp_path / "image_class_labels.txt", *(f"{i} {200 if i == 1 else 7}" for i in range(1, 11)))
    (tmp_path / "classes.txt").unlink()
    labels = {row.key: (row.label, row.split) for row in read(tmp_path).rows}
    assert labels.pop("001.Black_footed_Albatross/Black_footed_Albatross_1.jpg") == ("200", "test")
    assert set(labels.values()) == {("007", "train")}


def test_files_that_macos_leaves_and_images_that_no_list_names_are_no_rows(tmp_path: Path) -> None:
    before = read(make_cub(tmp_path))
    folder = "images/001.Black_footed_Albatross"
    draw(
        tmp_path, [f"{folder}/._Black_footed_Albatross_1.jpg", f"{folder}/extra.jpg", "._images.txt", "a.jpg"]
    )
    assert read(tmp_path) == before


def test_missing_images_are_counted_and_named_by_side(tmp_path: Path) -> None:
    make_cub(tmp_path)
    for path in (
        "001.Black_footed_Albatross/Black_footed_Albatross_2.jpg",
        "200.Yellowthroat/Yellowthroat_1.jpg",
    ):
        (tmp_path / "images" / path).unlink()
    catalog, given = read(tmp_path), SplitRule(by="given")
    assert len(catalog.rows) == 8
    assert select_missing(catalog, "train", given) == (
        "images/001.Black_footed_Albatross/Black_footed_Albatross_2.jpg",
    )
    assert select_missing(catalog, "test", given) == ("images/200.Yellowthroat/Yellowthroat_1.jpg",)


def test_given_split_and_half_of_the_classes_are_the_same(tmp_path: Path) -> None:
    """With as many classes on each side as the data set has: 100 and 100."""
    write(tmp_path / "images.txt", *(f"{i} {i:03d}.x/{i}.jpg" for i in range(1, 201)))
    write(tmp_path / "image_class_labels.txt", *(f"{i} {i}" for i in range(1, 201)))
    draw(tmp_path / "images", (f"{i:03d}.x/{i}.jpg" for i in range(1, 201)))
    catalog = read(tmp_path)
    for split in ("train", "test"):
        rows = select(catalog, split, SplitRule(by="given"))
        assert len(rows) == 100
        assert rows == select(catalog, split, SplitRule(by="class", train=0.5))


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("image_class_labels.txt", ["1 1", "1 2"], "line 2 of .*labels.txt gives image 1 a class again"),
        ("image_class_labels.txt", ["1 1"], "line 2 of .*images.txt names image 2, which has no class"),
        (
            "image_class_labels.txt",
            ["1 1", "2 1", "3 1"],
            "gives a class to image 3, which is not in .*images",
        ),
        (
            "image_class_labels.txt",
            ["1 one", "2 1"],
            "line 1 of .* the number 'one', which is not one of 1 to 200",
        ),
        ("image_class_labels.txt", ["1 1", "2 201"], "line 2 of .* the number '201'"),
        ("image_class_labels.txt", ["1 1", "2 0"], "line 2 of .* the number '0'"),
        ("image_class_labels.txt", ["1 1", "2 ²"], "line 2 of .* the number '²'"),
        (
            "image_class_labels.txt",
            ["1 1 1", "2 1"],
            "line 1 of .* has 3 columns and not 2 .image number, class",
        ),
        (
            "images.txt",
            ["1 001.a/1.jpg", "1 001.a/2.jpg"],
            "names image 1, which has no class .or comes twice.",
        ),
        ("images.txt", ["1 001.a/1.jpg", "2 001.a/1.jpg"], "names the image '001.a/1.jpg' twice"),
        ("images.txt", ["1 001.a/1.jpg", "2 001.a/my dog.jpg"], "line 2 of .* has 3 columns and not 2"),
        ("images.txt", ["1 001.a/1.jpg", "x 001.a/2.jpg"], "line 2 of .* the number 'x'"),
        ("images.txt", ["1 001.a/1.jpg", "2 ../2.jpg"], "the image '../2.jpg', which is no plain path"),
        ("images.txt", ["1 001.a/1.jpg", "2 /etc/x.jpg"], "the image '/etc/x.jpg', which is no plain path"),
        ("classes.txt", ["1 001.a b"], "line 1 of .*classes.txt has 3 columns"),
        ("classes.txt", ["x 001.a"], "line 1 of .*classes.txt has the number 'x'"),
    ],
)
def test_lists_that_do_not_hold_are_refused_by_line(
    tmp_path: Path, name: str, lines: list[str], message: str
) -> None:
    write(tmp_path / "images.txt", "1 001.a/1.jpg", "2 001.a/2.jpg")
    write(tmp_path / "image_class_labels.txt", "1 1", "2 1")
    draw(tmp_path / "images", ["001.a/1.jpg", "001.a/2.jpg"])
    assert len(read(tmp_path).rows) == 2
    write(tmp_path / name, *lines)
    with pytest.raises(BadData, match=message):
        read(tmp_path)


def test_list_that_is_lost_or_empty_is_named(tmp_path: Path) -> None:
    make_cub(tmp_path)
    (tmp_path / "image_class_labels.txt").unlink()
    with pytest.raises(
        BadData, match=r"image_class_labels\.txt is not there; give the folder of the published"
    ):
        read(tmp_path)  # not read as folders, which would name other classes
    write(tmp_path / "image_class_labels.txt")
    write(tmp_path / "images.txt")
    with pytest.raises(BadData, match=r"images\.txt names no image"):
        read(tmp_path, "cub")


def test_lists_are_read_without_images_and_none_there_says_where_it_looked(tmp_path: Path) -> None:
    make_cub(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    assert [each.split for each in read_listed(tmp_path, "cub")].count("test") == 4
    with pytest.raises(
        BadData, match=r"none of the 10 images .* looked below \S+/images for 001\.B.*, .* and so on$"
    ):
        read(tmp_path)
