"""In-shop Clothes Retrieval: queries and gallery are kept apart, and both are the unseen side."""

from pathlib import Path
from typing import Any

import pytest

from serving.catalog.catalog import Catalog, Row, SplitRule, read, select, select_missing
from serving.catalog.picture import File
from serving.errors import BadData
from serving.indexing.command import Settings, run
from tests.serving.published import INSHOP, draw, inshop_lines, make_inshop, write
from tests.tiny_model import write_tiny_model

GIVEN = SplitRule(by="given")


@pytest.mark.parametrize("below", ["", "Img"])
@pytest.mark.parametrize("list_below", ["Eval", "."])
def test_list_says_train_query_and_gallery_wherever_the_parts_lie(
    tmp_path: Path, below: str, list_below: str
) -> None:
    make_inshop(tmp_path, below=below)
    (tmp_path / "Eval" / "list_eval_partition.txt").rename(tmp_path / list_below / "list_eval_partition.txt")
    catalog = read(tmp_path)
    assert (catalog.format, catalog.root, len(catalog.rows)) == ("inshop", tmp_path, 6)
    assert {row.key: (row.label, row.split) for row in catalog.rows} == {
        f"img/{path}": (f"id_{number:08d}", split) for path, number, split in INSHOP
    }
    assert catalog.path_of(catalog.rows[0]) == f"{below}/{catalog.rows[0].key}".removeprefix("/")


def test_test_is_query_and_gallery_together(tmp_path: Path) -> None:
    catalog = read(make_inshop(tmp_path))
    query, gallery = select(catalog, "query", GIVEN), select(catalog, "gallery", GIVEN)
    assert ([row.label for row in query], len(gallery)) == (["id_00007982"], 2)
    assert select(catalog, "test", GIVEN) == tuple(sorted((*query, *gallery), key=lambda row: row.key))
    assert {row.split for row in select(catalog, "train", GIVEN)} == {"train"}


def test_query_and_gallery_of_a_rule_are_of_its_unseen_side(tmp_path: Path) -> None:
    catalog = read(make_inshop(tmp_path))
    rule = SplitRule(by="class", train=2)  # ids 2 and 11 train, of which 11 is gallery by the data set's word
    assert [row.label for row in select(catalog, "gallery", rule)] == ["id_00007982"]
    assert [row.label for row in select(catalog, "query", rule)] == ["id_00007982"]
    assert {row.split for row in select(catalog, "test", rule)} == {"train", "query", "gallery"}
    trained = Catalog(
        tmp_path, "csv", (Row("1", File(tmp_path), "a", "query"), Row("2", File(tmp_path), "b", "gallery"))
    )
    told = r"names no unseen image with a label as query \(gallery 1, query 1\); take the split test$"
    with pytest.raises(BadData, match=told):
        select(trained, "query", SplitRule(by="class", train=1))


def test_missing_images_are_told_by_part(tmp_path: Path) -> None:
    make_inshop(tmp_path)
    (tmp_path / "img/WOMEN/Dresses/id_00000011/02_1_front.jpg").unlink()
    (tmp_path / "img/WOMEN/Tees_Tanks/id_00007982/01_1_front.jpg").unlink()
    catalog = read(tmp_path)
    assert select_missing(catalog, "gallery", GIVEN) == ("img/WOMEN/Dresses/id_00000011/02_1_front.jpg",)
    assert select_missing(catalog, "query", GIVEN) == ("img/WOMEN/Tees_Tanks/id_00007982/01_1_front.jpg",)
    assert len(select_missing(catalog, "test", GIVEN)) == 2
    assert select_missing(catalog, "train", GIVEN) == ()


def test_data_set_without_queries_says_so_in_one_sentence(tmp_path: Path) -> None:
    draw(tmp_path, ["a/1.jpg", "b/1.jpg"])
    for rule in (SplitRule(), GIVEN):
        with pytest.raises(
            BadData, match=r"image with a label as query \(on no side 2\); take the split test$"
        ):
            select(read(tmp_path), "query", rule)


@pytest.mark.parametrize(
    ("split", "count"), [("query", 1), ("gallery", 2), ("test", 3), ("train", 3), ("all", 6)]
)
def test_each_part_can_be_indexed(tmp_path: Path, split: str, count: int) -> None:
    make_inshop(tmp_path / "data")
    write(tmp_path / "data" / "README.txt", "made up")
    (tmp_path / "data/img/WOMEN/Dresses/id_00000011/02_1_front.jpg").unlink()  # of the gallery
    model = write_tiny_model(tmp_path / "model.onnx", split=GIVEN)
    given: dict[str, Any] = {
        "gallery": str(tmp_path / "g"),
        "model": model,
        "data": tmp_path / "data",
        "split": split,
    }
    result = run(Settings.model_validate(given))
    lost = split in ("gallery", "test", "all")
    assert (result["images"], result["stored"], len(result["skipped"])) == (count, count - lost, lost)


def _rows(*changed: tuple[str, int, str]) -> list[str]:
    return inshop_lines([*INSHOP[:3], *changed])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            inshop_lines()[1:],
            "begins with 'image_name item_id evaluation_status' where 5, the count of its images",
        ),
        (["7", *inshop_lines()[1:]], "begins with '7' where 6, the count of its images"),
        (inshop_lines()[:-1], "begins with '6' where 5, the count of its images"),
        ([], "begins with '' where 0, the count"),
        (["0"], "begins with '0' where 0, the count|has the header ''"),
        (
            ["1", "image_pair_name_1 image_pair_name_2 item_id evaluation_status", "a b c d"],
            "has the header 'image_pair",
        ),
        (["1", inshop_lines()[1], "img/a.jpg id_00000001"], "line 3 of .* has 2 columns and not 3"),
        (
            ["1", inshop_lines()[1], "img/a.jpg id_00000001 val"],
            "line 3 of .* the status 'val', which is not one of",
        ),
        (
            ["1", inshop_lines()[1], "img/a.jpg 1 train"],
            "line 3 of .* the item '1', which is not of the form",
        ),
        (["1", inshop_lines()[1], "img/a.jpg id_000000001 train"], "line 3 of .* the item 'id_000000001'"),
        (_rows(INSHOP[2]), "names the image 'img/WOMEN/Tees_Tanks/id_00007982/01_1_front.jpg' twice"),
        (_rows((INSHOP[0][0], 7982, "gallery")), "names the image 'img/MEN/.*' twice"),
        (_rows(("new.jpg", 80, "gallery")), "has the class 'id_00000080' both in train and in test"),
        (_rows(("new.jpg", 7982, "train")), "has the class 'id_00007982' both in train and in test"),
        (_rows(("../../new.jpg", 1, "train")), "which is no plain path"),
    ],
)
def test_list_that_does_not_hold_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    make_inshop(tmp_path)
    write(tmp_path / "Eval" / "list_eval_partition.txt", *lines)
    with pytest.raises(BadData, match=message):
        read(tmp_path)


def test_where_no_image_is_there_every_place_is_named(tmp_path: Path) -> None:
    write(tmp_path / "Eval" / "list_eval_partition.txt", *inshop_lines())
    (tmp_path / "Img").mkdir()
    with pytest.raises(BadData) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"none of the 6 images that the lists of {tmp_path} name is there: looked below {tmp_path} and"
        f" {tmp_path}/Img for img/{INSHOP[0][0]}, img/{INSHOP[1][0]}, img/{INSHOP[2][0]} and so on"
    )
