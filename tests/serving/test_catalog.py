"""Data sets on disk as rows: every format, and each way in which a folder or a table can be wrong."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.catalog.catalog import Catalog, Row, SplitRule, read, select, select_missing
from serving.catalog.picture import File
from serving.catalog.rows import SPLITS
from serving.errors import BadData, BadSetting


def _touch(root: Path, *paths: str) -> Path:
    """Make files that are no images: a catalogue does not look inside."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("not an image")
    return root


def _labels(catalog: Catalog) -> dict[str, str]:
    return {row.key: row.label for row in catalog.rows}


def test_folder_labels_are_paths_and_rows_are_sorted(tmp_path: Path) -> None:
    _touch(tmp_path, "Latin/b/2.png", "Latin/b/10.png", "Greek/a/1.png", "top.PNG")
    catalog = read(tmp_path)
    assert catalog.format == "folder"
    assert list(_labels(catalog).items()) == [
        ("Greek/a/1.png", "Greek/a"),
        ("Latin/b/10.png", "Latin/b"),
        ("Latin/b/2.png", "Latin/b"),
        ("top.PNG", ""),
    ]
    assert all(
        row.image.path.is_absolute() and row.image.path.is_file() and row.split == "" for row in catalog.rows
    )


def test_wrapping_folder_is_no_part_of_label_or_key(tmp_path: Path) -> None:
    _touch(
        tmp_path,
        "Images/Tern/1.jpg",
        "Images/Wren/1.jpg",
        "Images/Wren/notes.txt",
        "classes.txt",
        "parts/x.txt",
    )
    above, inside = read(tmp_path), read(tmp_path / "Images")
    assert above == inside
    assert _labels(above) == {"Tern/1.jpg": "Tern", "Wren/1.jpg": "Wren"}


def test_single_class_folder_keeps_its_name(tmp_path: Path) -> None:
    assert _labels(read(_touch(tmp_path, "Greek/a/1.png"))) == {"Greek/a/1.png": "Greek/a"}


def test_suffixes_count_in_any_case_and_text_named_jpg_is_a_row(tmp_path: Path) -> None:
    _touch(
        tmp_path, "a/1.JPG", "a/2.jPeG", "a/3.webp", "a/4.TIF", "a/5.avif", "a/6.txt", "a/7.jpg.txt", "a/8"
    )
    assert [row.key for row in read(tmp_path).rows] == [
        "a/1.JPG",
        "a/2.jPeG",
        "a/3.webp",
        "a/4.TIF",
        "a/5.avif",
    ]


def test_hidden_and_macos_files_are_left_out(tmp_path: Path) -> None:
    _touch(tmp_path, "a/1.jpg", "a/._1.jpg", ".trash/2.jpg", "__MACOSX/a/1.jpg", "a/.DS_Store")
    assert [row.key for row in read(tmp_path).rows] == ["a/1.jpg"]


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    _touch(tmp_path, "images/a/1.jpg", "images/b/readme.txt")
    (tmp_path / "images/c/d").mkdir(parents=True)
    assert read(tmp_path).empty == ("b", "c/d")


def test_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    root = _touch(tmp_path / "data", "b/1.jpg")
    _touch(tmp_path / "elsewhere", "2.jpg")
    (root / "a").symlink_to(root / "b")  # a second way to b: the real one counts
    (root / "b/up").symlink_to(root)
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "b/circle.jpg").symlink_to("circle.jpg")
    (root / "b/gone.jpg").symlink_to("nothing")
    catalog = read(root)
    assert _labels(catalog) == {"b/1.jpg": "b", "c/2.jpg": "c"}
    assert catalog.missing == ("b/circle.jpg", "b/gone.jpg")


def test_name_that_is_not_utf8_gets_a_key_that_is(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        os.mkdir(folder)
    except OSError:  # macOS allows no such name
        pytest.skip("the file system allows UTF-8 names only")
    with open(folder + b"/1.jpg", "wb"):
        pass
    (row,) = read(tmp_path).rows
    assert row.key == "caf\\xe9/1.jpg"
    assert row.label.encode() == b"caf\\xe9"
    assert row.image.read_bytes() == b""


def test_stray_images_are_of_no_class_and_change_no_other_row(tmp_path: Path) -> None:
    _touch(tmp_path, "data/images/a/1.jpg", "data/images/b/1.jpg", "data/images/c/1.jpg")
    before = read(tmp_path)
    _touch(tmp_path, "0.jpg", "data/1.jpg", "data/images/2.jpg")
    after = read(tmp_path)
    assert (before.unlabelled, after.unlabelled) == (0, 3)
    assert [row for row in after.rows if row.label] == list(before.rows)
    assert {row.key for row in after.rows if not row.label} == {"../../0.jpg", "../1.jpg", "2.jpg"}
    assert [after.path_of(row) for row in after.rows] == [row.key for row in after.rows]
    for split in ("train", "test"):
        assert select(after, split, SplitRule()) == select(before, split, SplitRule())
    assert len(select(after, "all", SplitRule())) == 6


def test_stray_images_do_not_unmake_cifar10(tmp_path: Path) -> None:
    _touch(tmp_path, "train/cat/1.jpg", "test/cat/1.jpg", "preview.png", "train/preview.png")
    catalog = read(tmp_path)
    assert (catalog.format, catalog.unlabelled) == ("cifar10", 2)
    assert [row.key for row in select(catalog, "train", SplitRule(by="given"))] == ["train/cat/1.jpg"]
    assert read(tmp_path, "cifar10") == catalog


def test_cifar10_layout_may_be_wrapped(tmp_path: Path) -> None:
    _touch(tmp_path, "data/train/cat/1.jpg", "data/test/cat/1.jpg")
    assert read(tmp_path) == read(tmp_path / "data")
    assert read(tmp_path).format == "cifar10"


def test_cifar10_layout_names_the_split(tmp_path: Path) -> None:
    _touch(tmp_path, "train/cat/1.jpg", "test/cat/1.jpg", "validation/dog/3.jpg", "README.md")
    catalog = read(tmp_path)
    assert catalog.format == "cifar10"
    assert [(row.key, row.label, row.split) for row in catalog.rows] == [
        ("test/cat/1.jpg", "cat", "test"),
        ("train/cat/1.jpg", "cat", "train"),
        ("validation/dog/3.jpg", "dog", ""),
    ]
    assert read(tmp_path, "folder").rows[0].label == "test/cat"


@pytest.mark.parametrize(
    "folders", [("train", "val"), ("Train", "TEST"), ("test", "valid"), ("train", "query", "gallery")]
)
def test_any_two_split_folders_hold_one_set_of_classes(tmp_path: Path, folders: tuple[str, ...]) -> None:
    """A copy of a class in another split folder is no class of its own, or the test would leak."""
    _touch(tmp_path, *(f"{folder}/{label}/1.jpg" for folder in folders for label in ("cat", "dog")))
    catalog = read(tmp_path)
    assert catalog.format == "cifar10"
    assert {row.key: (row.label, row.split) for row in catalog.rows} == {
        f"{folder}/{label}/1.jpg": (label, SPLITS[folder.lower()])
        for folder in folders
        for label in ("cat", "dog")
    }
    assert {row.label for row in select(catalog, "train", SplitRule())} == {"cat"}
    assert {row.label for row in select(catalog, "test", SplitRule())} == {"dog"}


def test_test_images_without_class_folders_are_of_no_class(tmp_path: Path) -> None:
    _touch(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "test/1.jpg")
    assert [(row.label, row.split) for row in read(tmp_path).rows] == [
        ("", "test"), ("cat", "train"), ("dog", "train"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "paths", [("train/1.jpg", "test/1.jpg", "car/1.jpg"), ("train/steam/1.jpg", "car/sports/1.jpg")]
)
def test_a_train_is_a_class_as_a_car_is(tmp_path: Path, paths: tuple[str, ...]) -> None:
    _touch(tmp_path, *paths)
    catalog = read(tmp_path)
    assert catalog.format == "folder"
    assert {row.label for row in catalog.rows} == {path.rpartition("/")[0] for path in paths}
    with pytest.raises(BadData, match=r"is not laid out as train/<class>/.* below car, "):
        read(tmp_path, "cifar10")


@pytest.mark.parametrize("format", ["auto", "cifar10"])
def test_class_folders_beside_split_folders_are_refused(tmp_path: Path, format: str) -> None:
    _touch(tmp_path, "train/cat/1.jpg", "test/cat/1.jpg", "ship/2.jpg", "boat/red/1.jpg")
    with pytest.raises(BadData, match=r"the split folders test, train and beside them .* boat, ship: "):
        read(tmp_path, format)
    assert {row.label for row in read(tmp_path, "folder").rows} == {
        "train/cat",
        "test/cat",
        "ship",
        "boat/red",
    }


# --- tables ----------------------------------------------------------------------------------------------


def _table(root: Path, text: str, name: str = "items.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root


def test_csv_gives_labels_splits_and_typed_metadata(tmp_path: Path) -> None:
    _touch(tmp_path, "photos/1.jpg", "photos/2.jpg", "photos/three")
    _table(
        tmp_path,
        "\ufeffImage,Label,split,price,stock,sku,note\n"
        "photos/2.jpg, shoe ,train,9.5,3,007,\n"
        './photos/1.jpg,boot,TEST,10,,012,"a, b"\n'
        "\n"
        "photos/three,boot,,1e3,-4,x,c\n",
    )
    catalog = read(tmp_path)
    assert catalog.format == "csv"
    assert catalog.rows == (
        Row(
            "photos/1.jpg",
            File(tmp_path / "photos/1.jpg"),
            "boot",
            "test",
            {"price": 10.0, "sku": "012", "note": "a, b"},
        ),
        Row(
            "photos/2.jpg",
            File(tmp_path / "photos/2.jpg"),
            "shoe",
            "train",
            {"price": 9.5, "stock": 3, "sku": "007"},
        ),
        Row(
            "photos/three",
            File(tmp_path / "photos/three"),
            "boot",
            "",
            {"price": 1e3, "stock": -4, "sku": "x", "note": "c"},
        ),
    )
    assert isinstance(catalog.rows[0].metadata["price"], float)  # 10 in a column of decimals


def test_numbers_with_leading_zeros_are_names(tmp_path: Path) -> None:
    _table(
        _touch(tmp_path, "1.jpg", "2.jpg"),
        "path,label,sku,big\n1.jpg,a,007,12345678901234567890\n2.jpg,a,010,1\n",
    )
    assert [row.metadata for row in read(tmp_path).rows] == [
        {"sku": "007", "big": "12345678901234567890"},
        {"sku": "010", "big": "1"},
    ]


@pytest.mark.parametrize(
    ("cell", "kind"),
    [("9" * 15, int), ("-" + "9" * 15, int), ("1" + "0" * 15, str), ("9" * 17, str), ("9" * 18, str)],
)
def test_whole_numbers_that_a_double_cannot_hold_stay_text(tmp_path: Path, cell: str, kind: type) -> None:
    _table(
        _touch(tmp_path, "1.jpg", "2.jpg"), f"path,label,ean,mixed\n1.jpg,a,{cell},{cell}\n2.jpg,a,1,1.5\n"
    )
    metadata = read(tmp_path).rows[0].metadata
    assert metadata["ean"] == kind(cell)
    assert type(metadata["ean"]) is kind
    assert kind is int or metadata["mixed"] == cell


def test_truths_and_dates_in_a_table(tmp_path: Path) -> None:
    _table(
        _touch(tmp_path, "1.jpg", "2.jpg", "3.jpg"),
        "path,label,new,mixed,day,at,bare\n"
        "1.jpg,a,true,true,2024-01-31,2024-01-31T12:00:00Z,20240131\n"
        "2.jpg,a,FALSE,1,1999-12-01,,\n"
        "3.jpg,a,,,,,\n",
    )
    first, second, third = (row.metadata for row in read(tmp_path).rows)
    assert first == {
        "new": True,
        "mixed": "true",
        "day": "2024-01-31",
        "at": "2024-01-31T12:00:00Z",
        "bare": 20240131,
    }
    assert first["new"] is True
    assert second == {"new": False, "mixed": "1", "day": "1999-12-01"}
    assert third == {}


def test_catalogue_names_the_table_that_was_read(tmp_path: Path) -> None:
    _table(_touch(tmp_path, "a/1.jpg"), "path,label\na/1.jpg,a\n", "one.csv")
    assert read(tmp_path).table == read(tmp_path / "one.csv").table == tmp_path / "one.csv"
    relative = os.path.relpath(tmp_path / "one.csv")
    assert read(tmp_path, table=Path(relative)).table == tmp_path / "one.csv"
    assert read(tmp_path, "folder").table is None


def test_csv_rows_without_a_label_train_nothing(tmp_path: Path) -> None:
    _touch(tmp_path, *(f"{i}.jpg" for i in range(5)))
    _table(
        tmp_path, "path,label,split\n0.jpg,,train\n1.jpg, ,test\n2.jpg,a,train\n3.jpg,b,train\n4.jpg,c,test\n"
    )
    catalog = read(tmp_path)
    assert catalog.unlabelled == 2
    given = SplitRule(by="given")
    assert [row.key for row in select(catalog, "train", SplitRule(train=1))] == ["2.jpg"]
    assert [row.key for row in select(catalog, "test", SplitRule(train=1))] == ["3.jpg", "4.jpg"]
    assert [row.key for row in select(catalog, "train", given)] == ["2.jpg", "3.jpg"]
    assert [row.key for row in select(catalog, "test", given)] == ["4.jpg"]
    assert len(select(catalog, "all", given)) == 5


def test_csv_may_name_queries_and_gallery(tmp_path: Path) -> None:
    _table(
        _touch(tmp_path, *(f"{i}.jpg" for i in range(5))),
        "path,label,split\n0.jpg,a,train\n1.jpg,b,Query\n2.jpg,b,gallery\n3.jpg,c,test\n4.jpg,c,val\n",
    )
    catalog, given = read(tmp_path), SplitRule(by="given")
    assert [row.split for row in catalog.rows] == ["train", "query", "gallery", "test", ""]
    assert _side(catalog, "query", given) == _side(catalog, "gallery", given) == "b"
    assert _side(catalog, "test", given) == "bbc"


def test_missing_images_are_told_by_side(tmp_path: Path) -> None:
    _table(
        _touch(tmp_path, "a.jpg", "b.jpg"),
        "path,label,split\na.jpg,a,train\nb.jpg,b,test\nx.jpg,a,test\ny.jpg,b,train\nz.jpg,,train\nw.jpg,c,\n",
    )
    catalog, given = read(tmp_path), SplitRule(by="given")
    assert select_missing(catalog, "all", given) == catalog.missing == ("w.jpg", "x.jpg", "y.jpg", "z.jpg")
    assert select_missing(catalog, "train", given) == ("y.jpg",)
    assert select_missing(catalog, "test", given) == ("x.jpg",)
    assert select_missing(catalog, "train", SplitRule()) == ("x.jpg",)
    assert select_missing(catalog, "test", SplitRule()) == ("w.jpg", "y.jpg")


def test_missing_links_are_told_by_side(tmp_path: Path) -> None:
    _touch(tmp_path, "images/a/1.jpg", "images/b/1.jpg")
    (tmp_path / "images/b/gone.jpg").symlink_to("nothing")
    (tmp_path / "gone.jpg").symlink_to("nothing")
    catalog = read(tmp_path)
    assert catalog.missing == ("../gone.jpg", "b/gone.jpg")
    assert select_missing(catalog, "train", SplitRule()) == ()
    assert select_missing(catalog, "test", SplitRule()) == ("b/gone.jpg",)


def test_csv_may_be_the_root_itself_or_be_named(tmp_path: Path) -> None:
    _touch(tmp_path, "1.jpg", "2.jpg")
    _table(tmp_path, "path;label;key\n1.jpg;a;K1\n", "one.csv")
    _table(tmp_path, "path\tlabel\n2.jpg\tb\n", "two.csv")
    assert [row.key for row in read(tmp_path / "one.csv").rows] == ["K1"]
    assert [row.key for row in read(tmp_path, "csv", table=tmp_path / "two.csv").rows] == ["2.jpg"]
    with pytest.raises(BadData, match=r"2 \.csv tables .*one\.csv, two\.csv"):
        read(tmp_path)
    with pytest.raises(BadSetting, match=r"one\.csv is of the format csv and not 'folder'"):
        read(tmp_path, "folder", table=tmp_path / "one.csv")


def test_csv_images_that_are_not_there_are_counted_and_named(tmp_path: Path) -> None:
    _table(_touch(tmp_path, "1.jpg"), "path,label\n1.jpg,a\ngone.jpg,a\n1.jpg/x,b\n")
    catalog = read(tmp_path)
    assert len(catalog.rows) == 1
    assert catalog.missing == ("1.jpg/x", "gone.jpg")


def test_other_csv_beside_folders_is_no_table(tmp_path: Path) -> None:
    _table(_touch(tmp_path, "a/1.jpg"), "id,text\n1,a\n")
    assert read(tmp_path).format == "folder"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,name\n1.jpg,a\n", "lacks the column label; its first line names path, name"),
        ("file,class\n1.jpg,a\n", "lacks the column path or image and the column label"),
        ("", "lacks the column path or image and the column label; its first line names nothing"),
        ("path,label\n", "gives no image .* it has no rows"),
        ("path,label\ngone.jpg,a\n", "none of its 1 images is there: .'gone.jpg'."),
        ("path,label,Label\n1.jpg,a,b\n", "the column 'label' twice"),
        ("path,label\n../1.jpg,a\n", "line 2 .* names the image '../1.jpg', which is not below"),
        ("path,label\n/etc/hosts,a\n", "line 2 .* which is not below"),
        ("path,label\n.,a\n", "line 2 .* which is not below"),
        ("path,label\n,a\n", "line 2 .* names the image '', which is not below"),
        ("path,label\n1.jpg\n", "line 2 .* has 1 cells; line 1 has 2"),
        ("path,label,split\n1.jpg,a,dev\n", "the split 'dev'; give train, test, query, gallery or none"),
        ("path,label\n\0,a\n", "line 2 .* which is not below"),
        ("path,label\n1.jpg,a\n./1.jpg,b\n", "line 3 .* has the key '1.jpg' again, as on line 2"),
        ("path,label,key\n1.jpg,a,\n", "line 2 .* has an empty key"),
        ('path,label\n1.jpg,"a\n', "is not a line of a table"),
    ],
)
def test_bad_table_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    _table(_touch(tmp_path, "1.jpg"), text)
    with pytest.raises(BadData, match=message):
        read(tmp_path, "csv")


def test_table_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_bytes("path,label\n1.jpg,café\n".encode("latin-1"))
    with pytest.raises(BadData, match="not UTF-8 text at byte 20"):
        read(tmp_path, "csv")


# --- what is not a data set ------------------------------------------------------------------------------


def test_missing_folder_file_and_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"nowhere cannot be read: no such file"):
        read(tmp_path / "nowhere")
    with pytest.raises(BadData, match=r"1\.jpg is a file; give the folder"):
        read(_touch(tmp_path, "1.jpg") / "1.jpg")
    with pytest.raises(BadSetting, match="'imagenet' is not known; give one of auto, folder, csv, cifar10"):
        read(tmp_path, "imagenet")
    with pytest.raises(BadData, match="cannot be read"):
        read(tmp_path / "none.csv")
    with pytest.raises(BadData, match=r"holds 0 \.csv tables"):
        read(tmp_path, "csv")


def test_folder_without_images_says_what_it_found(tmp_path: Path) -> None:
    _touch(tmp_path, "a/1.txt", "b/2.pdf")
    with pytest.raises(BadData, match=r"holds no image: looked .* \.jpg, .* 2 other files"):
        read(tmp_path)


@pytest.mark.parametrize("locked", ["", "a"])
def test_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str) -> None:
    _touch(tmp_path, "a/1.jpg", "b/1.jpg")
    real = os.scandir

    def scandir(path: Path) -> object:  # root may read everything, so no mode bits
        if Path(path) == tmp_path / locked:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadData, match="cannot be read: permission denied"):
        read(tmp_path, "folder")


# --- the split -------------------------------------------------------------------------------------------


def _catalog(labels: list[str], splits: list[str] | None = None) -> Catalog:
    rows = (
        Row(str(i), File(Path("/x")), label, split)
        for i, (label, split) in enumerate(zip(labels, splits or [""] * len(labels), strict=True))
    )
    return Catalog(Path("/data"), "folder", tuple(rows))


def _side(catalog: Catalog, split: str, rule: SplitRule) -> str:
    return "".join(row.label for row in select(catalog, split, rule))  # type: ignore[arg-type]


def test_split_by_class_takes_sorted_names_from_the_front() -> None:
    catalog = _catalog(list("dacba"))
    assert _side(catalog, "train", SplitRule()) == "aba"
    assert _side(catalog, "test", SplitRule()) == "dc"
    assert _side(catalog, "train", SplitRule(train=3)) == "acba"
    assert _side(catalog, "all", SplitRule()) == "dacba"


def test_share_rounds_down_but_not_for_binary_fractions() -> None:
    names = [f"{i:03d}" for i in range(100)]
    assert len(select(_catalog(names), "train", SplitRule(train=0.29))) == 29
    assert len(select(_catalog(names[:5]), "train", SplitRule(train=0.5))) == 2


def test_split_by_folder_keeps_alphabets_whole() -> None:
    catalog = _catalog(["Greek/a", "Greek/b", "Latin/a", "Tagalog/a"])
    rule = SplitRule(by="folder", train=1)
    assert [row.label for row in select(catalog, "train", rule)] == ["Greek/a", "Greek/b"]
    assert [row.label for row in select(catalog, "test", rule)] == ["Latin/a", "Tagalog/a"]
    with pytest.raises(BadData, match="no folders above its 2 class folders"):
        select(_catalog(["a", "b"]), "train", rule)


def test_given_split_is_the_data_sets_own() -> None:
    catalog = _catalog(list("aabb"), ["train", "test", "train", ""])
    assert _side(catalog, "train", SplitRule(by="given")) == "ab"
    assert _side(catalog, "test", SplitRule(by="given")) == "a"
    with pytest.raises(
        BadData, match=r"names no image with a label as test \(on no side 1, train 1\); cut it by class"
    ):
        select(_catalog(["a", "b"], ["train", ""]), "test", SplitRule(by="given"))


@pytest.mark.parametrize(("labels", "train"), [("a", 0.5), ("abc", 3), ("abc", 0.2)])
def test_split_that_leaves_a_side_empty_is_refused(labels: str, train: float) -> None:
    with pytest.raises(BadData, match=r"both sides need at least one|cannot be cut in two"):
        select(_catalog(list(labels)), "train", SplitRule(train=train))


@pytest.mark.parametrize("by", ["class", "folder", "given"])
def test_data_set_without_a_class_cannot_be_cut(by: str) -> None:
    rule = SplitRule.model_validate({"by": by})
    for cut in (select, select_missing):
        with pytest.raises(BadData, match="none of the 2 images of /data has a class"):
            cut(_catalog(["", ""], ["train", "test"]), "train", rule)


@pytest.mark.parametrize("train", [0, -1, 0.0, 1.5, True, "many", float("nan")])
def test_split_rule_refuses_what_is_neither_share_nor_count(train: object) -> None:
    with pytest.raises(ValidationError):
        SplitRule.model_validate({"train": train})


def test_split_rule_survives_json() -> None:
    for rule in (SplitRule(), SplitRule(by="folder", train=5), SplitRule(train=0.29)):
        again = SplitRule.model_validate_json(rule.model_dump_json())
        assert again == rule
        assert type(again.train) is type(rule.train)


@given(
    st.lists(st.sampled_from(["a/x", "a/y", "b/x", "c/x", "d/x"]), min_size=1),
    st.sampled_from(["class", "folder"]),
)
def test_train_and_test_part_the_rows_and_share_no_group(labels: list[str], by: str) -> None:
    catalog = _catalog(labels)
    rule = SplitRule.model_validate({"by": by})
    if len({label if by == "class" else label[0] for label in labels}) < 2:
        return
    train, test = select(catalog, "train", rule), select(catalog, "test", rule)
    assert sorted(train + test, key=lambda row: int(row.key)) == list(catalog.rows)
    assert not {row.label for row in train} & {row.label for row in test}
