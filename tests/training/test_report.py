"""The report command: one page, whatever the run and its data set hold."""

import csv
import json
import os
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import crossbatch
from serving.catalog import catalog
from serving.catalog.catalog import Row
from serving.errors import BadArtifact, BadData, BadSetting, NotFound
from tests.training.drawn import draw_folder
from tests.training.page_tree import Node, parse
from training import train
from training.evaluation.evaluate import Settings as EvaluateSettings
from training.evaluation.evaluate import run as evaluate
from training.loop.run import METRICS, load_run, read_record, write_record
from training.report import report
from training.report.report import Settings, render, run

EVIL = "<script>alert(1)</script>&\"'"
RECIPE = (
    "image_size: 16\ndimension: 8\nprototypes: 4\nclasses_per_batch: 2\nimages_per_class: 2\nepochs: 1\n"
    "validation: 0.4\nsplit_train: 5\n"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes to train on, then an evil one, one alone, an unreadable image, a name that is not UTF-8."""
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=8, images=4, size=18)
    (root / "class05").rename(root / "zz")
    evil = root.joinpath(*("z" + EVIL).split("/"))
    evil.parent.mkdir()
    (root / "zz").rename(evil)
    (evil / "0.png").rename(evil / os.fsdecode(b"\xff\xfe.png"))
    (root / "class06" / "text.jpg").write_text("no image")
    for i in range(1, 4):
        (root / "class07" / f"{i}.png").unlink()
    return root


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / EVIL.replace("/", "_")
    folder.mkdir()
    (folder / "tiny.yaml").write_text(RECIPE)
    train.run(train.Settings(recipe=str(folder / "tiny.yaml"), data=data, out=folder / "run"))
    return folder / "run"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture(scope="module")
def result(trained: Path) -> dict[str, Any]:
    return run(Settings(run_dir=trained, neighbours=3))


@pytest.fixture(scope="module")
def page(result: dict[str, Any]) -> Node:
    return parse(Path(result["page"]).read_text(encoding="utf-8"))


def _section(page: Node, anchor: str) -> Node:
    return next(part for part in page.all("section") if part.attributes["id"] == anchor)


def test_the_page_asks_for_nothing(page: Node, result: dict[str, Any]) -> None:
    assert not [node.tag for node in page.all() if node.tag in ("script", "link", "iframe", "object", "form")]
    for node in page.all():
        for name, value in node.attributes.items():
            assert not name.startswith("on"), f"<{node.tag} {name}>"
            if name in ("href", "src", "srcset"):
                assert value.startswith(("#", "data:image/")), value
            assert name != "style" or "url" not in value
    style = page.one("style").text
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    policy = next(meta for meta in page.all("meta") if "http-equiv" in meta.attributes)
    assert policy.attributes["content"].startswith("default-src 'none'")
    assert result["bytes"] < 1_000_000


def test_the_page_can_be_read_by_all(page: Node) -> None:
    assert page.one("html").attributes["lang"] == "en"
    assert "width=device-width" in str([meta.attributes for meta in page.all("meta")])
    assert len(list(page.all("h1"))) == 1
    levels = [int(node.tag[1]) for node in page.all() if re.fullmatch("h[1-6]", node.tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    targets = [link.attributes["href"][1:] for link in page.all("a")]
    assert len(targets) == 7
    assert set(targets) <= set(ids)
    assert all(image.attributes["alt"] for image in page.all("img"))
    for drawing in page.all("picture"):
        assert drawing.one("source").attributes["media"] == "(prefers-color-scheme: dark)"
        assert drawing.one("source").attributes["srcset"] != drawing.one("img").attributes["src"]
    for table in page.all("table"):
        assert table.one("caption").text
        assert all(head.attributes["scope"] in ("col", "row") for head in table.all("th"))
        assert all(row.one("th").attributes["scope"] == "row" for row in table.one("tbody").all("tr"))


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_by_wcag(page: Node) -> None:
    least_of = {"ink": 7, "soft": 4.5, "right": 4.5, "wrong": 4.5, "rest": 3}
    least_of |= {f"s{i}": 3 for i in range(8)}
    themes = re.findall(r":root \{(.*?)\}", page.one("style").text, re.DOTALL)
    assert len(themes) == 2  # light and dark
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        for name, least in least_of.items():
            one, other = sorted((_luminance(colours[name]), _luminance(colours["paper"])))
            assert (other + 0.05) / (one + 0.05) >= least, (name, colours[name])


def test_names_are_text_whatever_they_are(page: Node, trained: Path) -> None:
    keys = [figure.attributes.get("title", "") for figure in page.all("figure")]
    assert f"z{EVIL}/\\xff\\xfe.png" in keys
    heat = [row.one("th").text for row in page.one("table", "heat").one("tbody").all("tr")]
    assert heat == ["class06", "class07", "z" + EVIL]
    assert str(trained) in _section(page, "about").text


def test_figures_are_those_of_evaluate(page: Node, result: dict[str, Any], trained: Path, copy: Path) -> None:
    measured = evaluate(EvaluateSettings(target=copy))
    for name in ("images", "classes", "recall_at", "map_at_r", "r_precision", "queries", "excluded"):
        assert result[name] == measured[name]
    assert (result["images"], result["of_images"], result["excluded"]) == (9, 10, 1)
    rows = [row.text for row in _section(page, "figures").one("tbody").all("tr")]
    assert len(rows) == 3
    assert rows[0].startswith(f"unseen classes (test), now{100 * measured['recall_at']['1']:.2f}")
    assert rows[1].startswith("validation classes, of the epoch that is kept")
    assert rows[2].startswith("validation classes, before training")
    text = _section(page, "figures").text
    assert "9 images of 3 classes were embedded; 1 could not be read" in text
    assert "class06/text.jpg" in text
    assert "1 are alone in their class" in text
    assert "sample" not in text


def test_neighbours_are_marked_right_and_wrong(page: Node) -> None:
    section = _section(page, "neighbours")
    grids = list(section.all("div", "query"))
    assert len(grids) == 8  # of the 9 images one is alone
    for grid in grids:
        own = grid.one("h4").text.split(": average")[0]
        items = list(grid.all("li"))
        assert len(items) == 4
        assert items[0].one("b").text == "query"
        for item in items[1:]:
            right = item.one("span").text == own
            assert item.attributes["class"] == ("right" if right else "wrong")
            assert item.one("b").text.startswith("✓" if right else "✗")
            assert ("right" if right else "wrong") in item.one("img").attributes["alt"]
    shares = [float(re.findall(r"([\d.]+)\xa0%", grid.one("h4").text)[0]) for grid in grids]
    assert (max(shares), min(shares)) == (shares[0], shares[5])  # 3 best, 2 typical, 3 worst


def test_every_query_has_its_map(page: Node) -> None:
    maps = list(_section(page, "maps").all("img"))
    assert len(maps) == 8
    assert all("under its map: prototypes " in image.attributes["alt"] for image in maps)


def test_two_reports_are_the_same(trained: Path, result: dict[str, Any], tmp_path: Path) -> None:
    again = run(Settings(run_dir=trained, neighbours=3, out=tmp_path / "again.html"))

    def dateless(path: str) -> str:
        return re.sub(r"\d{4}-\d\d-\d\d", "", Path(path).read_text(encoding="utf-8"))

    assert dateless(again["page"]) == dateless(result["page"])


def test_a_sample_is_told(copy: Path) -> None:
    result = run(Settings(run_dir=copy, images=6, queries=2, split="all"))
    assert (result["images"], result["of_images"]) == (6, 30)
    text = (copy / "report.html").read_text()
    assert "a sample of 30 drawn class by class (seed 0)" in text
    assert "6 of 30 images" in render(result)


def test_rendered(result: dict[str, Any]) -> None:
    text = render(result)
    assert "skipped class06/text.jpg" in text
    assert f"Wrote {result['page']}" in text
    assert f"MAP@R {100 * result['map_at_r']:.1f}" in text


def test_runs_of_which_little_is_known(copy: Path) -> None:
    record = read_record(copy)
    keep = {name: record["data"][name] for name in record["data"] if not name.startswith("validation")}
    write_record(copy, {"name": EVIL, "data": keep, "metrics": {"test": {"map_at_r": [1]}}})
    for text in ("", "epoch,loss,dml\n0,,\n1,nan,2\n2,inf,\n"):
        (copy / METRICS).write_text(text)
        run(Settings(run_dir=copy, queries=1, neighbours=30))
        page = parse((copy / "report.html").read_text())
        assert page.one("h1").text == page.one("title").text == EVIL
        assert "held out no classes" in _section(page, "curves").text
    (copy / METRICS).unlink()
    run(Settings(run_dir=copy))
    assert "no figures of an epoch" in (copy / "report.html").read_text()
    (copy / METRICS).write_bytes(b"epoch\n\xff")
    with pytest.raises(BadArtifact, match=r"metrics\.csv is damaged"):
        run(Settings(run_dir=copy))


def test_one_class_to_search_and_no_xml(tmp_path: Path) -> None:
    data = draw_folder(tmp_path / "data", classes=3, images=3, size=18)
    (tmp_path / "tiny.yaml").write_text(
        "image_size: 16\ndimension: 8\nprototypes: 4\nclasses_per_batch: 1\nimages_per_class: 2\nepochs: 1\n"
        "xml_weight: 0\nsplit_train: 2\n"
    )
    train.run(train.Settings(recipe=str(tmp_path / "tiny.yaml"), data=data, out=tmp_path / "run"))
    result = run(Settings(run_dir=tmp_path / "run"))
    assert (result["classes"], result["map_at_r"]) == (1, 1.0)
    page = parse((tmp_path / "run" / "report.html").read_text())
    assert not list(page.all("li", "wrong"))
    assert "no result of training" in page.text


@pytest.mark.parametrize(
    ("split", "rule", "apart"),
    [("test", "given", True), ("test", "class", False), ("all", "given", False), ("train", "given", False)],
)
def test_roles_are_of_the_data_sets_own_test_alone(
    trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, split: Any, rule: str, apart: bool
) -> None:
    def select(found: catalog.Catalog, side: Any, _: object) -> list[Row]:
        return [
            replace(row, split="query" if row.key.endswith("1.png") else "gallery")
            for row in catalog.select(found, side, catalog.SplitRule())
        ]

    def load(path: Path) -> Any:
        loaded = load_run(path)
        return replace(loaded, recipe=loaded.recipe.model_copy(update={"split_by": rule}))

    monkeypatch.setattr("training.report.report.select", select)
    monkeypatch.setattr("training.report.report.load_run", load)
    result = run(Settings(run_dir=trained, split=split, out=tmp_path / "a.html"))
    text = (tmp_path / "a.html").read_text()
    assert (result["queries"] + result["excluded"] < result["images"]) == apart
    assert "alone in their class" not in text or not apart


def test_a_previous_page_stays_where_a_new_one_fails(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "report.html").write_text("before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Exception, match=r"report\.html cannot be written \(no space left on device\)"):
        run(Settings(run_dir=copy))
    assert (copy / "report.html").read_text() == "before"
    assert not list(copy.glob(".report*"))


def test_what_cannot_be_shown_is_told(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="not a run folder"):
        run(Settings(run_dir=tmp_path))
    monkeypatch.setattr(report, "embed_split", None)  # nothing is embedded first
    with pytest.raises(BadSetting, match=r"is a folder: give --out a file"):
        run(Settings(run_dir=copy, out=tmp_path))
    with pytest.raises(BadSetting, match=r"there is no folder .*nowhere"):
        run(Settings(run_dir=copy, out=tmp_path / "nowhere" / "a.html"))
    with pytest.raises(BadData, match="nowhere"):
        run(Settings(run_dir=copy, data=tmp_path / "nowhere"))
    monkeypatch.undo()
    singles = draw_folder(tmp_path / "singles", classes=7, images=1)
    with pytest.raises(BadData, match="none of the 2 queries"):
        run(Settings(run_dir=copy, data=singles))
    for file in singles.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(BadData, match=r"none of the 2 images can be read \(first: class05"):
        run(Settings(run_dir=copy, data=singles))


def test_from_the_command_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crossbatch.main(["report", str(copy), "--queries", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(copy / "report.html")
    assert crossbatch.main(["report", str(copy), "--queries", "0"]) == 2
    with (copy / METRICS).open() as lines:
        assert "loss" in next(csv.reader(lines))
