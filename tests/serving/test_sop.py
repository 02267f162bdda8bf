"""Stanford Online Products: two lists, no class in both."""

from pathlib import Path

import pytest

from serving.catalog.catalog import SplitRule, read, select, select_missing
from serving.errors import BadData
from tests.serving.published import draw, make_sop, write

HEADER = "image_id class_id super_class_id path"


def test_lists_say_the_split_and_labels_sort_as_numbers(tmp_path: Path) -> None:
    catalog = read(make_sop(tmp_path))
    assert (catalog.format, len(catalog.rows)) == ("sop", 10)
    assert {row.label: row.split for row in catalog.rows} == {
        "00001": "train", "00009": "train", "11318": "train", "11319": "test", "22634": "test",
    }  # fmt: skip
    assert catalog.rows[0].key == "bicycle_final/11319_7.JPG"
    assert {row.split for row in select(catalog, "test", SplitRule(by="class", train=3))} == {"test"}


def test_download_around_the_folder_gives_the_same(tmp_path: Path) -> None:
    make_sop(tmp_path / "Stanford_Online_Products")
    assert read(tmp_path) == read(tmp_path / "Stanford_Online_Products")


def test_missing_images_are_counted_and_named(tmp_path: Path) -> None:
    make_sop(tmp_path)
    (tmp_path / "bicycle_final" / "11319_7.JPG").unlink()
    catalog = read(tmp_path)
    assert len(catalog.rows) == 9
    assert select_missing(catalog, "test", SplitRule(by="given")) == ("bicycle_final/11319_7.JPG",)
    assert select_missing(catalog, "train", SplitRule(by="given")) == ()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["image_id class_id path", "1 7 a/1.JPG"],
            "has the header 'image_id class_id path' where 'image_id class_id",
        ),
        ([], "has the header '' where"),
        (["1 7 1 a/1.JPG"], "has the header '1 7 1 a/1.JPG' where"),
        ([HEADER, "1 7 a/1.JPG"], "line 2 of .*Ebay_test.txt has 3 columns and not 4"),
        ([HEADER, "", "1 7 1 a/1 b.JPG"], "line 3 of .*Ebay_test.txt has 5 columns and not 4"),
        (
            [HEADER, "1 seven 1 a/1.JPG"],
            "line 2 of .* has the number 'seven', which is not one of 1 to 99999",
        ),
        ([HEADER, "1 100000 1 a/1.JPG"], "line 2 of .* has the number '100000'"),
        ([HEADER, "1 7 1 a/0.JPG"], "names the image 'a/0.JPG' twice"),
        ([HEADER, "1 1 1 a/1.JPG"], "has the class '00001' both in train and in test"),
        ([HEADER, "1 7 1 a/../../1.JPG"], "the image 'a/../../1.JPG', which is no plain path"),
        ([HEADER, "1 7 1 /a/1.JPG"], "the image '/a/1.JPG', which is no plain path"),
        ([HEADER, "1 7 1 a/\0.JPG"], "which is no plain path"),
    ],
)
def test_lists_that_do_not_hold_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    draw(tmp_path, ["a/0.JPG", "a/1.JPG"])
    write(tmp_path / "Ebay_train.txt", HEADER, "1 1 1 a/0.JPG")
    write(tmp_path / "Ebay_test.txt", HEADER, "1 7 1 a/1.JPG")
    assert len(read(tmp_path).rows) == 2
    write(tmp_path / "Ebay_test.txt", *lines)
    with pytest.raises(BadData, match=message):
        read(tmp_path)


def test_list_that_is_lost_not_utf8_or_a_folder_is_named(tmp_path: Path) -> None:
    make_sop(tmp_path)
    (tmp_path / "Ebay_test.txt").write_bytes(f"{HEADER}\n1 7 1 caf\xe9.JPG\n".encode("latin-1"))
    with pytest.raises(BadData, match=r"the list .*Ebay_test\.txt is not UTF-8 text at byte 47"):
        read(tmp_path)
    (tmp_path / "Ebay_test.txt").unlink()
    with pytest.raises(BadData, match=r"Ebay_test\.txt is not there; give the folder of the published lists"):
        read(tmp_path)
    (tmp_path / "Ebay_test.txt").mkdir()
    with pytest.raises(BadData, match=r"Ebay_test\.txt cannot be read: is a directory"):
        read(tmp_path)


def test_list_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    make_sop(tmp_path)
    with open(tmp_path / "Ebay_train.txt", "r+b") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(BadData, match=r"the list .*Ebay_train\.txt is larger than 1024 MiB"):
        read(tmp_path)


def test_lines_may_end_as_on_windows_and_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    before = read(make_sop(tmp_path))
    for path in tmp_path.glob("*.txt"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(tmp_path) == before
