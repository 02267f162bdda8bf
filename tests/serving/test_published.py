"""CUB, Cars196, SOP and In-shop by their own lists: which images there are, of which class, on which side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from serving.catalog.catalog import Catalog, SplitRule, read, select, select_missing
from serving.catalog.published import parse
from serving.errors import BadData, BadSetting
from tests.pictures import encoded, picture

CUB = {1: "Black_footed_Albatross", 2: "Laysan_Albatross", 100: "Pelican", 101: "White_Pelican", 200: "Wren"}
CARS = {1: "Hummer SUV 2000", 98: "Eagle Talon", 99: "FIAT 500", 174: "Ram C/V Cargo Van", 196: "smart"}
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


SOP = "image_id class_id super_class_id path"


def sides(catalog: Catalog) -> dict[str, str]:
    return {row.label: row.split for row in catalog.rows}


def test_the_first_hundred_classes_of_cub_train_whatever_its_own_split_says(tmp_path: Path) -> None:
    catalog = read(make_cub(tmp_path))
    assert (catalog.format, catalog.root, len(catalog.rows)) == ("cub", tmp_path, 10)
    assert sides(catalog) == {
        f"{number:03d}.{name}": "train" if number <= 100 else "test" for number, name in CUB.items()
    }
    first = catalog.rows[0]
    assert first.key == "001.Black_footed_Albatross/Black_footed_Albatross_1.jpg"
    assert catalog.path_of(first) == f"images/{first.key}"
    (tmp_path / "classes.txt").unlink()
    assert list(sides(read(tmp_path))) == ["001", "002", "100", "101", "200"]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("image_class_labels.txt", ["1 1", "1 2"], "line 2 of .*labels.txt names image 1 again"),
        ("image_class_labels.txt", ["1 1"], "image 2 is not in both .*images.txt and .*labels.txt"),
        ("image_class_labels.txt", ["1 one", "2 1"], "image 1 of .* 'one', which is not one of 1 to 200"),
        ("image_class_labels.txt", ["1 1", "2 201"], "image 2 of .* the class number '201'"),
        ("image_class_labels.txt", ["1 1", "2 ²"], "image 2 of .* the class number '²'"),
        ("image_class_labels.txt", ["1 1 1", "2 1"], "line 1 of .* 3 columns and not 2 .image number, value"),
        ("images.txt", ["1 001.a/1.jpg", "2 001.a/1.jpg"], "names the image '001.a/1.jpg' twice"),
    ],
)
def test_bad_lists_of_cub_are_refused_by_line(
    tmp_path: Path, name: str, lines: list[str], message: str
) -> None:
    write(tmp_path / "images.txt", "1 001.a/1.jpg", "2 001.a/2.jpg")
    write(tmp_path / "image_class_labels.txt", "1 1", "2 1")
    write(tmp_path / name, *lines)
    refused(tmp_path, message)


def test_list_that_is_lost_or_empty_and_images_that_are_elsewhere_are_named(tmp_path: Path) -> None:
    make_cub(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    assert [each.split for each in parse(tmp_path, "cub")[1]].count("test") == 4
    refused(tmp_path, r"none of the 10 images .* looked below \S+/images for 001\.B.*, .* and so on$")
    (tmp_path / "image_class_labels.txt").unlink()
    refused(tmp_path, r"image_class_labels\.txt is not there; give the folder of the published")
    write(tmp_path / "image_class_labels.txt")
    write(tmp_path / "images.txt")
    refused(tmp_path, "the lists of .* name no image", "cub")


def test_lists_of_sop_say_the_split_and_labels_sort_as_numbers(tmp_path: Path) -> None:
    make_sop(tmp_path / "Stanford_Online_Products")
    catalog = read(tmp_path)
    assert catalog == read(tmp_path / "Stanford_Online_Products")
    assert (catalog.format, len(catalog.rows)) == ("sop", 10)
    assert sides(catalog) == {
        "00001": "train", "00009": "train", "11318": "train", "11319": "test", "22634": "test",
    }  # fmt: skip
    assert catalog.rows[0].key == "bicycle_final/11319_7.JPG"
    assert {row.split for row in select(catalog, "test", SplitRule(by="class", train=3))} == {"test"}
    for path in tmp_path.rglob("*.txt"):  # as on Windows
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(tmp_path) == catalog


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["image_id class_id path", "1 7 a/1.JPG"], "begins with 'image_id class_id path' where 'image_id"),
        ([SOP, "1 seven 1 a/1.JPG"], "line 2 of .* number 'seven', which is not one of 1 to 99999"),
        ([SOP, "1 1 1 a/1.JPG"], "has the class '00001' both in train and in test"),
        ([SOP, "1 7 1 /a/1.JPG"], "the image '/a/1.JPG', which is no plain path"),
        ([SOP, "1 7 1 caf\xe9.JPG"], r"Ebay_test\.txt is not UTF-8 text at byte 47"),
    ],
)
def test_lists_of_sop_that_do_not_hold_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    write(tmp_path / "Ebay_train.txt", SOP, "1 1 1 a/0.JPG")
    (tmp_path / "Ebay_test.txt").write_text("".join(f"{line}\n" for line in lines), "latin-1")
    refused(tmp_path, message)


def test_list_that_is_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "Ebay_train.txt", SOP, "1 1 1 a/0.JPG")
    (tmp_path / "Ebay_test.txt").mkdir()
    refused(tmp_path, r"Ebay_test\.txt cannot be read: Is a directory")


@pytest.mark.parametrize(("below", "list_below"), [("", "Eval"), ("Img", "."), ("Img", "Eval")])
def test_list_says_the_split_wherever_the_parts_lie(tmp_path: Path, below: str, list_below: str) -> None:
    make_inshop(tmp_path, below=below)
    (tmp_path / "Eval" / "list_eval_partition.txt").rename(tmp_path / list_below / "list_eval_partition.txt")
    catalog = read(tmp_path)
    assert (catalog.format, catalog.root, len(catalog.rows)) == ("inshop", tmp_path, 6)
    assert {row.key: (row.label, row.split) for row in catalog.rows} == {
        f"img/{path}": (f"id_{number:08d}", split) for path, number, split in INSHOP
    }
    assert catalog.path_of(catalog.rows[0]) == f"{below}/{catalog.rows[0].key}".removeprefix("/")


def test_query_and_gallery_are_parts_of_the_unseen_side(tmp_path: Path) -> None:
    make_inshop(tmp_path)
    (tmp_path / "img/WOMEN/Dresses/id_00000011/02_1_front.jpg").unlink()
    catalog = read(tmp_path)
    query, gallery = select(catalog, "query", GIVEN), select(catalog, "gallery", GIVEN)
    assert [row.label for row in query] == [row.label for row in gallery] == ["id_00007982"]
    assert select(catalog, "test", GIVEN) == tuple(sorted((*query, *gallery), key=lambda row: row.key))
    gone = ("img/WOMEN/Dresses/id_00000011/02_1_front.jpg",)
    assert select_missing(catalog, "gallery", GIVEN) == select_missing(catalog, "test", GIVEN) == gone
    assert select_missing(catalog, "query", GIVEN) == select_missing(catalog, "train", GIVEN) == ()
    rule = SplitRule(by="class", train=1)  # ids 2 trains, whatever the list says
    assert {row.split for row in select(catalog, "test", rule)} == {"train", "query", "gallery"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (inshop_lines()[1:], "begins with 'image_name .* where '5 image_name .* expected, the count of its"),
        (["7", *inshop_lines()[1:]], "begins with '7 image_name .* where '6 image_name"),
        (["1", "image_pair_name_1 item_id evaluation_status", "a b c d"], "begins with '1 image_pair"),
        (["1", inshop_lines()[1], "img/a.jpg id_00000001"], "line 3 of .* has 2 columns and not 3"),
        (["1", inshop_lines()[1], "img/a.jpg id_00000001 dev"], "line 3 of .* the split 'dev'; give"),
        (inshop_lines([*INSHOP, ("new.jpg", 80, "gallery")]), "the class 'id_00000080' both in train and in"),
    ],
)
def test_list_of_inshop_that_does_not_hold_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    write(tmp_path / "Eval" / "list_eval_partition.txt", *lines)
    refused(tmp_path, message)


CAR_SIDES = {
    "001.Hummer SUV 2000": "train",
    "098.Eagle Talon": "train",
    "099.FIAT 500": "test",
    "174.Ram C-V Cargo Van": "test",  # a slash would part a folder from a class
    "196.smart": "test",
}


def test_one_file_of_annotations_beside_its_images_or_in_the_devkit(tmp_path: Path) -> None:
    make_cars(tmp_path)
    (tmp_path / "devkit").mkdir()
    (tmp_path / "cars_annos.mat").rename(tmp_path / "devkit" / "cars_annos.mat")
    catalog = read(tmp_path)
    assert (catalog.format, len(catalog.rows), catalog.unlabelled) == ("cars", 10, 0)
    assert sides(catalog) == CAR_SIDES
    assert (catalog.rows[0].key, catalog.rows[0].label) == ("car_ims/000001.jpg", next(iter(CAR_SIDES)))


def test_devkit_cuts_by_class_and_its_unlabelled_test_images_are_of_no_class(tmp_path: Path) -> None:
    make_cars_devkit(tmp_path, labelled=True)
    catalog = read(tmp_path)
    assert sides(catalog) == CAR_SIDES
    train = [f"cars_{part}/0000{i}.jpg" for part in ("test", "train") for i in (1, 2)]
    assert [row.key for row in select(catalog, "train", GIVEN)] == train
    labelled = tmp_path / "devkit" / "cars_test_annos_withlabels.mat"
    make_cars_devkit(tmp_path, labelled=False)
    assert read(tmp_path).unlabelled == 0  # as there are labels
    labelled.rename(tmp_path / labelled.name)  # where it is downloaded to
    (tmp_path / "cars_annos.mat").touch()  # whose images are not there
    assert read(tmp_path).unlabelled == 0
    (tmp_path / labelled.name).unlink()
    (tmp_path / "devkit" / "cars_meta.mat").unlink()
    catalog = read(tmp_path)
    assert (len(catalog.rows), catalog.unlabelled) == (10, 5)
    assert {row.key[:9] for row in catalog.rows if not row.label} == {"cars_test"}
    assert set(sides(catalog)) == {"", "001", "098", "099", "174", "196"}
    (tmp_path / "devkit" / "cars_test_annos.mat").unlink()
    refused(tmp_path, r"neither cars_annos\.mat nor devkit/cars_test_annos\.mat", "cars")


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (annotated([("a/1.jpg", 1), ("a/2.jpg", 1.5)]), r"annotation 2 of .* number '1\.5', which is"),
        (annotated([("a/1.jpg", 1)]), "has 3 class names and not 196"),
        (annotated([("../1.jpg", 1)]), "the image '../1.jpg', which is no plain path"),
        (annotated([]), "annotation 1 of .* lacks the field class or relative_im_path"),
        (np.eye(2), "lacks the field class or relative_im_path"),
    ],
)
def test_annotations_that_do_not_hold_are_refused(tmp_path: Path, annotations: object, message: str) -> None:
    names = car_names(3 if "class names" in message else 196)
    savemat(tmp_path / "cars_annos.mat", {"annotations": annotations, "class_names": names})
    refused(tmp_path, message)


def one_byte(data: bytes) -> bytes:
    """Damage on which SciPy's reader ends its process."""
    return data[:4089] + b"\xaa" + data[4090:]


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], one_byte, lambda _: b"<html>not found</html>"]
)
def test_damaged_file_is_a_message(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = make_cars(tmp_path) / "cars_annos.mat"
    path.write_bytes(damage(path.read_bytes()))
    refused(tmp_path, r"cars_annos\.mat is damaged or no \.mat file, and cannot be read; take the published")


def test_without_scipy_one_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cars_annos.mat").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BadSetting, match=r"needs SciPy, which is not installed; install crossbatch\[train\]"):
        read(tmp_path)
