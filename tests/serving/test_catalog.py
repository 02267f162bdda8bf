"""Data sets on disk as rows: folders, tables, which format a folder is of, and the split."""

import codecs
import os
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import pytest
from pydantic import ValidationError

from benchmarks import published_counts
from serving.catalog.catalog import (
    FORMATS,
    Catalog,
    Row,
    SplitRule,
    read,
    select,
    select_missing,
    tell_unread,
)
from serving.catalog.picture import File
from serving.catalog.table import plain_values
from serving.errors import BadData, BadSetting
from tests.serving.test_parquet import make_parquet
from tests.serving.test_published import (
    GIVEN,
    draw,
    make_cars,
    make_cars_devkit,
    make_cub,
    make_inshop,
    make_sop,
    refused,
    write,
)
from tests.serving.test_webdataset import make_tar


def touch(root: Path, *paths: str) -> Path:
    """Make files that are no images: a catalogue does not look inside."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("not an image")
    return root


def labels(catalog: Catalog) -> dict[str, str]:
    return {row.key: row.label for row in catalog.rows}


def deny(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Let a folder be one that may not be read; root may read everything, so no mode bits."""
    real = os.scandir

    def scandir(path: Path) -> object:
        if str(path).endswith(folder):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_wrapping_folder_is_no_part_of_label_or_key(tmp_path: Path) -> None:
    touch(tmp_path, "Images/Tern/1.jpg", "Images/Wren/1.jpg", "Images/Wren/notes.txt", "parts/x.txt")
    assert labels(read(tmp_path)) == {"Tern/1.jpg": "Tern", "Wren/1.jpg": "Wren"}
    assert read(tmp_path).rows == read(tmp_path / "Images").rows
    assert labels(read(touch(tmp_path / "one", "Greek/a/1.png"))) == {"Greek/a/1.png": "Greek/a"}


def test_hidden_files_and_other_endings_are_passed_over_and_empty_class_folders_named(tmp_path: Path) -> None:
    images = ["a/1.JPG", "a/2.jPeG", "a/3.webp", "a/4.TIF", "a/5.avif", "a/6.HEIC"]
    touch(tmp_path, *images, "a/6.txt", "a/7.jpg.txt", "a/8", "b/readme.txt")
    touch(tmp_path, "a/._1.jpg", ".trash/2.jpg", "__MACOSX/a/1.jpg", "a/.DS_Store")
    (tmp_path / "c/d").mkdir(parents=True)
    catalog = read(tmp_path)
    assert [row.key for row in catalog.rows] == images
    assert catalog.empty == ("b", "c/d")
    assert catalog.passed_over == {".txt": 3, "without an ending": 1}
    touch(tmp_path, "caf\u00e9/1.jpg", "cafe\u0301/1.jpg")
    assert "the class 'cafe\u0301' has two folders" in read(tmp_path).notes[0]


def test_folders_of_systems_and_what_a_pattern_excludes_are_left_out_and_counted(tmp_path: Path) -> None:
    systems = ["@eaDir", "#recycle", "@Recycle", "$Recycle.Bin", "System Volume Information", ".Trash-1000"]
    touch(tmp_path, "a/1.jpg", "a/1_back.jpg", "b/2.jpg", "old/a/3.jpg", "a/@eaDir/1.jpg/L.jpg")
    touch(tmp_path, *(f"{name}/x.jpg" for name in systems))
    catalog = read(tmp_path, exclude=("*_back.jpg", "old/a", "b"))
    assert labels(catalog) == {"a/1.jpg": "a"}
    assert catalog.left_out == {"by --exclude": 3} | dict.fromkeys(systems, 1) | {"@eaDir": 2}
    assert catalog.empty == ()
    told = tell_unread({".heic": 20, ".txt": 1} | dict.fromkeys("1234567", 1), {})
    assert told == ["passed over: 20 .heic, 1 .txt, 1 1, 1 2, 1 3, 1 4, 1 5, 1 6, 1 others"]
    table(tmp_path, "path,label\na/1.jpg,a\nb/2.jpg,b\nold/gone.jpg,a\n")
    listed = read(tmp_path / "items.csv", exclude=("old", "b/"))
    assert (labels(listed), listed.missing, listed.left_out) == ({"a/1.jpg": "a"}, (), {"by --exclude": 1})
    assert (listed.notes, read(tmp_path / "items.csv", exclude=["*.jgp", "x"]).notes[-1:]) == (
        (),
        ("nothing fits *.jgp, x",),
    )
    for pattern, kind, message in (
        ("*.jpg", BadData, "all 2 images .* excluded"),
        ("./", BadSetting, "names noth"),
    ):
        with pytest.raises(kind, match=message):
            read(tmp_path / "items.csv", exclude=[pattern])


def test_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    root = touch(tmp_path / "data", "b/1.jpg")
    touch(tmp_path / "elsewhere", "2.jpg")
    (root / "a").symlink_to(root / "b")  # a second way to b: the real one counts
    (root / "b/up").symlink_to(root)
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "b/circle.jpg").symlink_to("circle.jpg")
    (root / "b/gone.jpg").symlink_to("nothing")
    catalog = read(root)
    assert labels(catalog) == {"b/1.jpg": "b", "c/2.jpg": "c"}
    assert catalog.missing == ("b/circle.jpg", "b/gone.jpg")
    assert select_missing(catalog, "train", SplitRule()) == catalog.missing
    assert select_missing(catalog, "test", SplitRule()) == ()


def test_name_that_is_not_utf8_gets_a_key_that_is_and_no_others(tmp_path: Path) -> None:
    names = [b"caf\xe9", rb"caf\xe9", rb"caf\x5cxe9", rb"caf\\xe9", rb"back\slash", rb"\x41"]
    try:
        for name in names:
            os.mkdir(os.fsencode(tmp_path) + b"/" + name)
            with open(os.fsencode(tmp_path) + b"/" + name + b"/1.jpg", "wb"):
                pass
    except OSError:  # macOS allows no such name
        pytest.skip("the file system allows UTF-8 names only")
    rows = {row.label: row for row in read(tmp_path).rows}
    plain = [r"back\slash", r"\x41"]  # which are no other name's
    assert {*rows} == {r"caf\xe9", r"caf\x5cxe9", r"caf\x5cx5cxe9", r"caf\\x5cxe9", *plain}
    assert (rows[r"caf\xe9"].key, rows[r"caf\xe9"].image.read_bytes()) == (r"caf\xe9/1.jpg", b"")


def test_stray_images_are_of_no_class_and_change_no_other_row(tmp_path: Path) -> None:
    touch(tmp_path, "data/images/a/1.jpg", "data/images/b/1.jpg", "data/images/c/1.jpg")
    before = read(tmp_path)
    touch(tmp_path, "0.jpg", "data/1.jpg", "data/images/2.jpg")
    after = read(tmp_path)
    assert (before.unlabelled, after.unlabelled) == (0, 3)
    assert [row for row in after.rows if row.label] == list(before.rows)
    assert {row.key for row in after.rows if not row.label} == {"../../0.jpg", "../1.jpg", "2.jpg"}
    assert [after.path_of(row) for row in after.rows] == [row.key for row in after.rows]
    for split in ("train", "test"):
        assert select(after, split, SplitRule()) == select(before, split, SplitRule())
    assert len(select(after, "all", SplitRule())) == 6


def test_cifar10_layout_names_the_split(tmp_path: Path) -> None:
    touch(tmp_path, "data/train/cat/1.jpg", "data/test/cat/1.jpg", "data/validation/dog/3.jpg")
    touch(tmp_path, "preview.png", "data/train/preview.png", "README.md")
    catalog = read(tmp_path)
    assert catalog.format == "cifar10"
    assert [(row.key, row.label, row.split) for row in catalog.rows] == [
        ("../preview.png", "", ""),
        ("test/cat/1.jpg", "cat", "test"),
        ("train/cat/1.jpg", "cat", "train"),
        ("train/preview.png", "", "train"),
        ("validation/dog/3.jpg", "dog", ""),
    ]
    assert [row.key for row in select(catalog, "train", GIVEN)] == ["train/cat/1.jpg"]
    assert read(tmp_path, "folder").rows[1].label == "test/cat"


@pytest.mark.parametrize("format", ["auto", "cifar10"])
def test_class_folders_beside_split_folders_are_refused(tmp_path: Path, format: str) -> None:
    touch(tmp_path, "train/cat/1.jpg", "test/cat/1.jpg", "ship/2.jpg", "boat/red/1.jpg")
    refused(tmp_path, r"the split folders test, train and beside them boat, ship: ", format)
    refused(tmp_path / "train", "not laid out as train/<class>/ and test/<class>/: .* below cat", "cifar10")
    assert {row.label for row in read(tmp_path, "folder").rows} >= {"train/cat", "test/cat", "ship"}


@pytest.mark.parametrize("locked", ["", "/a"])
def test_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg")
    deny(monkeypatch, f"{tmp_path}{locked}")
    refused(tmp_path, "cannot be read: Permission denied", "folder")


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.txt", "b/2.pdf", "@eaDir/1.jpg")
    refused(
        tmp_path, r"no image: looked .* \.jpg, .* 2 other files .*; passed over: 1 .*; left out: 1 @eaDir"
    )
    refused(tmp_path / "nowhere", r"nowhere cannot be read: No such file")
    refused(tmp_path / "a/1.txt", r"1\.txt cannot be read: Not a directory; give the folder")
    refused(tmp_path, r"holds no \.csv table with the columns path and label", "csv")
    with pytest.raises(BadSetting, match="'imagenet' is not known; give one of auto, folder, csv, cifar10"):
        read(tmp_path, "imagenet")


def table(root: Path, text: str, name: str = "items.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root


def test_csv_gives_labels_splits_and_typed_metadata(tmp_path: Path) -> None:
    touch(tmp_path, "photos/1.jpg", "photos/three")
    lines = ["\ufeffImage,Label,split,price,stock,sku,note", './photos/1.jpg,boot ,TEST,10,,012,"a, b"', ""]
    table(tmp_path, "\n".join([*lines, "photos/three,boot,,1e3,-4,x,"]))
    catalog = read(tmp_path)
    assert (catalog.format, catalog.table) == ("csv", tmp_path / "items.csv")
    first, third = (File(tmp_path / "photos" / name) for name in ("1.jpg", "three"))
    assert catalog.rows == (
        Row("photos/1.jpg", first, "boot", "test", {"price": 10.0, "sku": "012", "note": "a, b"}),
        Row("photos/three", third, "boot", "", {"price": 1e3, "stock": -4, "sku": "x"}),
    )


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (("true", "FALSE"), (True, False)),
        (("true", "1"), ("true", "1")),
        (("9" * 15, "-1"), (10**15 - 1, -1)),
        (("1" + "0" * 15, "1"), ("1" + "0" * 15, "1")),  # a double does not hold all of these
        (("007", "010"), ("007", "010")),
        (("1.10", "2"), (1.1, 2.0)),
        (("1" * 16, "1.5"), ("1" * 16, "1.5")),
        (("2024-01-31", ""), ("2024-01-31",)),
    ],
)
def test_a_column_is_of_one_type(
    tmp_path: Path, cells: tuple[str, str], expected: tuple[object, ...]
) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    table(tmp_path, f"path,label,x\n1.jpg,a,{cells[0]}\n2.jpg,a,{cells[1]}\n")
    found = [value for row in read(tmp_path).rows for value in row.metadata.values()]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in expected]


def test_a_number_of_any_length_is_kept() -> None:
    long = 10**400  # beyond a double
    assert plain_values({"n": long, "d": Decimal("-12345678901234567890.5"), "nan": Decimal("NaN")}) == {
        "n": str(long),
        "d": "-12345678901234567890.5",
    }


def test_a_field_is_text_where_that_is_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "0.jpg", "1.jpg")
    given = table(tmp_path, "path,label,ean,price\n0.jpg,a,4006381000070,9.50\n1.jpg,a,4006381000087,8")
    first, second = read(given, text=["ean", "price"]).rows
    assert first.metadata == {"ean": "4006381000070", "price": "9.50"}
    assert second.metadata == {"ean": "4006381000087", "price": "8"}


@pytest.mark.parametrize(
    ("cells", "decimal", "expected"),
    [
        ("7|9,99", ".", "column x is text because of '9,99' in line 3; give --decimal ,"),
        ("7.50|9,99", ".", "column x is text because of '9,99' in line 3"),  # which --decimal would not mend
        ("7|9,99", ",", (7.0, 9.99)),
        ("1.234,50|-8", ",", (1234.5, -8.0)),
        ("1.234|8", ",", "column x is text because of '1.234' in line 2"),  # a thousand, or one?
        ("7|n/a", ".", "column x is text because of 'n/a' in line 3"),
        ("L|M|7", ".", ""),
    ],
)
def test_what_makes_a_column_of_numbers_text_is_told(
    tmp_path: Path, cells: str, decimal: str, expected: object
) -> None:
    lines = [f'{i}.jpg,a,"{cell}"' for i, cell in enumerate(cells.split("|"))]
    touch(tmp_path, "0.jpg", "1.jpg", "2.jpg")
    catalog = read(table(tmp_path, "\n".join(["path,label,x", *lines])), decimal=decimal)  # type: ignore[arg-type]
    if isinstance(expected, str):
        assert catalog.texts == (expected,) * bool(expected)
        assert [row.metadata["x"] for row in catalog.rows] == cells.split("|")
    else:
        assert (catalog.texts, [row.metadata["x"] for row in catalog.rows]) == ((), [*expected])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sep=;\r\npath;label;n\r\na.jpg;shoe;1\r\n", {"n": 1}),
        ("path,label,n,,\na.jpg,shoe,1,,\n,,\n , ,,,\n", {"n": 1}),
        (",path,label,n\n0,a.jpg,shoe,1\n", {"n": 1}),
        (codecs.BOM_UTF16_LE + "path\tlabel\tn\r\na.jpg\tshoe\t1".encode("utf-16-le"), {"n": 1}),
        (codecs.BOM_UTF16_BE + "path\tlabel\r\na.jpg\tshoe".encode("utf-16-be"), {}),
    ],
)
def test_tables_as_excel_and_pandas_write_them(
    tmp_path: Path, text: str | bytes, expected: dict[str, object]
) -> None:
    (touch(tmp_path, "a.jpg") / "items.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    catalog = read(tmp_path)
    assert [(row.key, row.label, row.metadata) for row in catalog.rows] == [("a.jpg", "shoe", expected)]
    told = "items.csv without a name were left out; 1 lines have something there"
    assert told in "".join(catalog.notes) or text[0] != ","


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_table_finds_files_by_names_in_other_forms(tmp_path: Path, form: Literal["NFC", "NFD"]) -> None:
    other: Literal["NFC", "NFD"] = "NFD" if form == "NFC" else "NFC"
    touch(tmp_path, normalize(other, "\u00fc/caf\u00e9.jpg"), "sub/b.jpg", "odd\\c.jpg")
    lines = [
        "path,label,city",
        normalize(form, "\u00fc/caf\u00e9.jpg,\u00e9,\u00f6"),
        "sub\\b.jpg,b,",
        "odd\\c.jpg,c,",
    ]
    catalog = read(table(tmp_path, "\n".join([*lines, normalize(form, "\u00e4/gone.jpg,a,")])))
    assert labels(catalog) == {"\u00fc/caf\u00e9.jpg": "\u00e9", "sub/b.jpg": "b", "odd\\c.jpg": "c"}
    assert [row.image.read_bytes() for row in catalog.rows] == [b"not an image"] * 3
    assert (catalog.rows[2].metadata, catalog.missing) == ({"city": "\u00f6"}, ("\u00e4/gone.jpg",))


def test_csv_may_be_the_root_itself_or_be_named(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    table(tmp_path, "path;label;key\n1.jpg;a;K1\n", "one.csv")
    assert read(tmp_path).table == read(tmp_path / "one.csv").table == tmp_path / "one.csv"
    table(tmp_path, "path\tlabel\n2.jpg\tb\n", "two.csv")
    assert [row.key for row in read(tmp_path / "one.csv").rows] == ["K1"]
    named = Path(os.path.relpath(tmp_path / "two.csv"))
    assert [row.key for row in read(tmp_path, "csv", table=named).rows] == ["2.jpg"]
    refused(tmp_path, r"holds one\.csv, two\.csv with the columns path and label; give the one")
    with pytest.raises(BadSetting, match=r"one\.csv is of the format csv and not 'folder'"):
        read(tmp_path, "folder", table=tmp_path / "one.csv")
    table(touch(tmp_path / "other", "a/1.jpg"), "id,text\n1,a\n")
    table(tmp_path / "other/a", "path,label\n1.jpg,a\n")
    other = read(tmp_path / "other")
    assert other.format == "folder"
    assert "a/items.csv was not read; give it as the data set, as it names images" in other.notes[0]
    assert "names path (or image) and label, and this one id, text" in other.notes[1]


def test_rows_without_a_label_or_an_image_are_told_and_train_nothing(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{i}.jpg" for i in range(6)))
    lines = ["path,label,split", "0.jpg,,train", "1.jpg,a,train", "2.jpg,b,Query", "3.jpg,b,gallery"]
    lines += ["4.jpg,c,test", "5.jpg,c,val", "x.jpg,a,test", "y.jpg,b,train", "z.jpg,,train", "1.jpg/w,d,"]
    catalog = read(table(tmp_path, "\n".join(lines)))
    assert [row.split for row in catalog.rows] == ["train", "train", "query", "gallery", "test", ""]
    assert catalog.unlabelled == 1
    given = {"train": "a", "test": "bbc", "query": "b", "gallery": "b"}
    assert {each: side(catalog, each, GIVEN) for each in given} == given
    assert [side(catalog, each, SplitRule(train=1)) for each in ("train", "test")] == ["a", "bbcc"]
    assert len(select(catalog, "all", GIVEN)) == 6
    assert catalog.missing == select_missing(catalog, "all", GIVEN) == ("1.jpg/w", "x.jpg", "y.jpg", "z.jpg")
    assert select_missing(catalog, "train", GIVEN) == ("y.jpg",)
    assert select_missing(catalog, "test", GIVEN) == ("x.jpg",)
    assert select_missing(catalog, "train", SplitRule(train=1)) == ("x.jpg",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,name\n1.jpg,a\n", "lacks the column label; its first line names path, name"),
        ("", "lacks the column path or image and the column label; its first line names nothing"),
        ("path,label\n", "gives no image .* it has no rows"),
        ("path,label\ngone.jpg,a\n", "none of its 1 images is there: .'gone.jpg'."),
        ("path,label,Label\n1.jpg,a,b\n", "the column 'label' twice"),
        ("path,label\n../1.jpg,a\n", "line 2 .* names the image '../1.jpg', which is not below"),
        *(
            (f"path,label\n{path},a\n", "line 2 .* which is not below")
            for path in ("/etc/hosts", ".", "", "\0")
        ),
        ("path,label\n1.jpg\n", "line 2 .* has not 2 cells, as line 1 has"),
        ("path,label\n1.jpg,a,b\n", "line 2 .* has not 2 cells, as line 1 has"),
        ("path,label,split\n1.jpg,a,dev\n", "the split 'dev'; give train, test, query, gallery or none"),
        ("path,label\n1.jpg,a\n./1.jpg,b\n", "line 3 .* has the key '1.jpg' again; each row needs"),
        ("path,label,key\n1.jpg,a,\n", "line 2 .* has an empty key"),
        ('path,label\n1.jpg,"a\n', "is not a line of a table"),
    ],
)
def test_bad_table_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    refused(table(touch(tmp_path, "1.jpg"), text) / "items.csv", message)


MAKERS: dict[str, Callable[[Path], object]] = {
    "cub": make_cub,
    "cars": make_cars,
    "sop": make_sop,
    "inshop": make_inshop,
    "webdataset": lambda root: make_tar(root / "train-0.tar", {"1.jpg": b"x", "1.cls": "0"}),
    "parquet": lambda root: make_parquet(root / "data/train-0.parquet", image=[b"x"], label=["a"]),
    "csv": lambda root: write(draw(root, ["a/1.jpg", "b/1.jpg"]) / "items.csv", "path,label", "a/1.jpg,a"),
    "cifar10": lambda root: draw(root, ["train/a/1.jpg", "test/a/1.jpg"]),
    "folder": lambda root: draw(root, ["a/1.jpg", "b/1.jpg"]),
}


@pytest.mark.parametrize("format", FORMATS[1:])
def test_each_layout_is_found_and_is_read_again_from_its_own_root(tmp_path: Path, format: str) -> None:
    MAKERS[format](tmp_path)
    catalog = read(tmp_path)
    assert catalog.format == format
    assert read(catalog.root, format) == catalog
    assert all(row.image.read_bytes() for row in catalog.rows)
    assert [row.key for row in catalog.rows] == sorted(row.key for row in catalog.rows)
    if format not in ("webdataset", "parquet"):
        assert len(read(tmp_path, "folder").rows) >= len(catalog.rows)


@pytest.mark.parametrize(
    ("line", "beside"),
    [
        ("0, Black_footed_Albatross/0000.jpg", True),  # a subset of CUB with commas
        ("0000139e-21dc-4d0c-bfe1-4cae3c85c829 0817/0000139e21dc4d0cbfe14cae3c85c829.jpg", True),  # NABirds
        ("1 001.Black_footed_Albatross/1.jpg", False),  # beside none of the others
    ],
)
def test_lists_of_the_same_names_leave_a_folder_a_folder(tmp_path: Path, line: str, beside: bool) -> None:
    write(draw(tmp_path, ["images/0817/1.jpg", "images/0818/1.jpg"]) / "images.txt", line)
    if beside:
        write(tmp_path / "image_class_labels.txt", "0, 0", "1, 0")
    assert read(tmp_path).format == "folder"


def test_layout_that_could_be_two_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cub(tmp_path / "CUB_200_2011")
    draw(tmp_path, ["flowers/rose/1.jpg"])
    refused(tmp_path, r"fits the formats cub and folder; say which .* or give the folder within")
    assert (len(read(tmp_path, "cub").rows), len(read(tmp_path, "folder").rows)) == (10, 11)
    make_sop(tmp_path)
    write(tmp_path / "mine.csv", "path,label", "flowers/rose/1.jpg,a")
    refused(tmp_path, r"fits the formats cub and sop and csv and folder")
    deny(monkeypatch, "chair_final")
    refused(tmp_path, "chair_final cannot be read: Permission denied", "sop")


def test_only_counts_as_published_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected: dict[tuple[str, str], published_counts.Counts] = {
        ("CUB_200_2011", "cub"): {"train": (6, 3), "test": (4, 2)},
        ("Cars196", "cars"): {"train": (4, 2), "test": (6, 3)},
        ("Cars196/devkit", "cars"): {"cars_train": (5, 5), "cars_test": (5, 0)},
        ("Elsewhere", "sop"): {"train": (1, 1)},
    }
    make_cub(tmp_path / "CUB_200_2011")
    cars = tmp_path / "Cars196"
    make_cars_devkit(cars, labelled=False)
    for part, numbers in (("train", (1, 98, 1, 98)), ("test", (99, 174, 196, 99, 174, 196))):
        rows = (f"{i} {number} 1 car_ims/{part}{i}.jpg" for i, number in enumerate(numbers))
        write(cars / f"derived_cars196_{part}.txt", "image_id class_id super_class_id path", *rows)
    assert published_counts.main(str(tmp_path), expected) == 0
    told = capsys.readouterr().out
    assert "Cars196 as cars, by a cars_annos.mat made from the derived lists: as published" in told
    assert "Elsewhere: not there, not checked" in told
    assert published_counts.main(str(tmp_path), {("CUB_200_2011", "cub"): {"train": (6, 3)}}) == 1
    assert "  test            4 images       2 classes; published      0 and" in capsys.readouterr().out
    assert published_counts.main(str(cars), {("CUB_200_2011", "cub"): {}}) == 1  # nothing to count


def made(labels: list[str], splits: Sequence[str] = ()) -> Catalog:
    pairs = enumerate(zip(labels, splits or [""] * len(labels), strict=True))
    rows = (Row(str(i), File(Path("/x")), label, split) for i, (label, split) in pairs)
    return Catalog(Path("/data"), "folder", tuple(rows))


def side(catalog: Catalog, split: str, rule: SplitRule) -> str:
    return "".join(row.label for row in select(catalog, split, rule))  # type: ignore[arg-type]


def test_split_by_class_takes_sorted_names_from_the_front() -> None:
    catalog = made(list("dacba"))
    assert [side(catalog, each, SplitRule()) for each in ("train", "test", "all")] == ["aba", "dc", "dacba"]
    assert side(catalog, "train", SplitRule(train=3)) == "acba"
    names = [f"{i:03d}" for i in range(100)]
    assert len(select(made(names), "train", SplitRule(train=0.29))) == 29  # in spite of binary fractions
    assert len(select(made(names[:5]), "train", SplitRule(train=0.5))) == 2


def test_split_by_folder_keeps_alphabets_whole() -> None:
    catalog, rule = made(["Greek/a", "Greek/b", "Latin/a", "Tagalog/a"]), SplitRule(by="folder", train=1)
    assert side(catalog, "train", rule) == "Greek/aGreek/b"
    assert side(catalog, "test", rule) == "Latin/aTagalog/a"


def test_given_split_is_the_data_sets_own() -> None:
    catalog = made(list("aabb"), ["train", "test", "train", ""])
    assert [side(catalog, each, GIVEN) for each in ("train", "test")] == ["ab", "a"]
    for split in ("test", "query"):
        told = rf"no image with a label as {split} \(on no side 1, train 1\); take another split, or cut it"
        with pytest.raises(BadData, match=told):
            side(made(["a", "b"], ["train", ""]), split, GIVEN)
    queries = made(["a", "b"], ["query", "gallery"])
    with pytest.raises(BadData, match="no image with a label as query"):
        select(queries, "query", SplitRule())  # its class trains


@pytest.mark.parametrize(
    ("labels", "rule", "message"),
    [
        ("a", SplitRule(), "the class count of /data is 1, .* both sides need at least one"),
        ("abc", SplitRule(train=3), "would train on 3; both sides"),
        ("abc", SplitRule(train=0.2), "would train on 0; both sides"),
        ("ab", SplitRule(by="folder"), "no folders above its 2 class folders"),
        *(
            ([""] * 2, SplitRule(by=by), "none of the 2 images of /data has")
            for by in ("class", "folder", "given")
        ),
    ],
)
def test_data_set_that_cannot_be_cut_is_refused(labels: Sequence[str], rule: SplitRule, message: str) -> None:
    for cut in (select, select_missing):
        with pytest.raises(BadData, match=message):
            cut(made([*labels]), "train", rule)


@pytest.mark.parametrize("train", [0, -1, 0.0, 1.5, True, "many", float("nan")])
def test_split_rule_refuses_what_is_neither_share_nor_count(train: object) -> None:
    with pytest.raises(ValidationError):
        SplitRule.model_validate({"train": train})
