"""The report command: one page, whatever the run and its data set hold; its curves, tables and pictures."""

import io
import json
import os
import re
import shutil
from base64 import b64decode
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from PIL import Image

import crossbatch
from serving.catalog.catalog import Row
from serving.catalog.picture import File
from serving.errors import BadData, BadSetting, NotFound
from serving.look import COLOURS, PROTOTYPES
from tests.training.small import TINY, Train, draw_folder, read_table
from training.evaluation import evaluate
from training.loop.run import METRICS, read_record, write_record
from training.recipes.recipe import Recipe
from training.report import figures, findings, report
from training.report.findings import Findings
from training.report.report import Settings, render, run

EVIL = "<script>alert(1)</script>&\"'"


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
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / EVIL.replace("/", "_")
    train(out, *TINY, "validation=0.4", "split_train=5")
    return out


@pytest.fixture(scope="module")
def measured(trained: Path) -> dict[str, Any]:
    """Figures that are noted in the run."""
    return evaluate.run(evaluate.Settings(target=trained))


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture(scope="module")
def result(trained: Path, measured: dict[str, Any]) -> dict[str, Any]:
    return run(Settings(run_dir=trained, neighbours=3))


def parse(path: Path) -> Element:
    """Read a page, which is well-formed XML: every element is closed, and no attribute is there twice."""
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def one(node: Element, path: str) -> Element:
    found = node.find(f".//{path}")
    assert found is not None, path
    return found


def text(node: Element) -> str:
    return "".join(node.itertext())


@pytest.fixture(scope="module")
def page(result: dict[str, Any]) -> Element:
    return parse(Path(result["page"]))


def _section(page: Element, anchor: str) -> Element:
    return one(page, f"section[@id='{anchor}']")


def test_the_page_asks_for_nothing(page: Element, result: dict[str, Any]) -> None:
    for node in page.iter():
        assert node.tag not in ("script", "link", "iframe", "object", "form")
        for name, value in node.attrib.items():
            assert not name.startswith("on"), f"<{node.tag} {name}>"
            if name in ("href", "src", "srcset"):
                assert value.startswith(("#", "data:image/")), value
            assert name != "style" or "url" not in value
    assert not re.search(r"url\(|@import", text(one(page, "style")))
    policy = next(meta for meta in page.iter("meta") if "http-equiv" in meta.attrib)
    assert policy.attrib["content"].startswith("default-src 'none'")
    assert result["bytes"] < 1_000_000


def test_the_page_can_be_read_by_all(page: Element) -> None:
    assert page.attrib["lang"] == "en"
    assert "width=device-width" in str([meta.attrib for meta in page.iter("meta")])
    assert len(list(page.iter("h1"))) == 1
    levels = [int(node.tag[1]) for node in page.iter() if re.fullmatch("h[1-6]", node.tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [node.attrib["id"] for node in page.iterfind(".//*[@id]")]
    assert len(ids) == len(set(ids))
    targets = [link.attrib["href"][1:] for link in page.iter("a")]
    assert len(targets) == 7
    assert set(targets) <= set(ids)
    assert all(image.attrib["alt"] for image in page.iter("img"))
    for drawing in page.iter("picture"):
        assert one(drawing, "source").attrib["media"] == "(prefers-color-scheme: dark)"
        assert one(drawing, "source").attrib["srcset"] != one(drawing, "img").attrib["src"]
    for table in page.iter("table"):
        assert text(one(table, "caption"))
        assert all(head.attrib["scope"] in ("col", "row") for head in table.iter("th"))
        assert all(one(row, "th").attrib["scope"] == "row" for row in one(table, "tbody").iter("tr"))


def test_contrast_by_wcag(page: Element) -> None:
    least_of = {"ink": 7, "soft": 4.5, "right": 4.5, "wrong": 4.5, "rest": 3} | {f"s{i}": 3 for i in range(8)}
    themes = re.findall(r":root \{(.*?)\}", text(one(page, "style")), re.DOTALL)
    assert len(themes) == 2  # light and dark
    for theme in themes:
        luminance = {}
        for name, colour in re.findall(r"--(\w+): #(\w{6})", theme):
            channels = (value / 255 for value in bytes.fromhex(colour))
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
            luminance[name] = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
        for name, least in least_of.items():
            darker, lighter = sorted((luminance[name], luminance["paper"]))
            assert (lighter + 0.05) / (darker + 0.05) >= least, name


def test_names_are_text_whatever_they_are(page: Element, trained: Path) -> None:
    keys = [figure.attrib.get("title", "") for figure in page.iter("figure")]
    assert f"z{EVIL}/\\xff\\xfe.png" in keys
    heat = [text(one(row, "th")) for row in one(one(page, "table[@class='heat']"), "tbody").iter("tr")]
    assert heat == ["class06", "class07", "z" + EVIL]
    assert str(trained) in text(_section(page, "about"))
    maps = list(_section(page, "maps").iter("img"))
    assert len(maps) == 8  # of every query
    assert all("under its map of prototypes" in image.attrib["alt"] for image in maps)
    assert all("prototypes " in text(figure) for figure in _section(page, "maps").iter("figure"))


def test_figures_are_those_of_evaluate(
    page: Element, result: dict[str, Any], measured: dict[str, Any], trained: Path
) -> None:
    for name in ("images", "classes", "recall_at", "map_at_r", "r_precision", "queries", "excluded"):
        assert result[name] == measured[name]
    assert (result["images"], result["of_images"], result["excluded"]) == (9, 10, 1)
    start = read_table(trained / METRICS)[0]
    validation, untrained = read_record(trained)["metrics"]["validation"], measured["untrained"]
    noted, before = "unseen classes (test), as noted in the run", {"recall_at": {"1": start["recall_at_1"]}}
    expected = {
        "validation classes, of the epoch that is kept": validation,
        noted: measured,
        f"{noted}: the untrained backbone": untrained,
        "validation classes, before training": before | start,
        "unseen classes (test), now": measured,
        "unseen classes (test), now: the untrained backbone": untrained,
    }
    assert {name: result["untrained"][name] for name in untrained} == untrained
    headlines = [text(each) for each in one(page, "dl[@class='key']").iter("div")]
    for place, noted in enumerate(("map_at_r", "recall_at")):
        shares = [found[noted] if place == 0 else found[noted]["1"] for found in (untrained, measured)]
        was, now = (f"{100 * share:.2f}\xa0%" for share in shares)
        assert headlines[place] == f"{('MAP@R', 'R@1')[place]}untrained {was}{now}"
    rows = {
        text(one(row, "th")): [text(cell) for cell in row.iter("td")]
        for row in one(_section(page, "figures"), "tbody").iter("tr")
    }
    assert rows.keys() == expected.keys()
    heads = [text(head) for head in one(_section(page, "figures"), "thead").iter("th")][1:]
    for name, found in expected.items():
        cells = dict(zip(heads, rows[name], strict=True))
        for head, share in (("R@1", found["recall_at"]["1"]), ("MAP@R", found["map_at_r"])):
            assert cells[head] == f"{100 * float(share):.2f}\xa0%"
        assert cells["images"] == ("9" if found is measured or "now" in name else "–")
    told = text(_section(page, "figures"))
    embedded = "9 images of 3 classes were embedded; 1 could not be read"
    for words in (embedded, "class06/text.jpg", "1 are alone in their class"):
        assert words in told
    assert "sample" not in told
    score = f"MAP@R {100 * result['map_at_r']:.1f}"
    for words in ("skipped class06/text.jpg", f"Wrote {result['page']}", score):
        assert words in render(result)


def test_neighbours_are_marked_right_and_wrong(page: Element) -> None:
    section = _section(page, "neighbours")
    grids = list(section.iterfind(".//div[@class='query']"))
    assert len(grids) == 8  # of the 9 images one is alone
    for grid in grids:
        own = text(one(grid, "h4")).split(": average")[0]
        trained, before = ([*each.iter("li")] for each in grid.iter("ol"))
        assert (len(trained), text(one(trained[0], "b"))) == (4, "query")
        assert (len(before), text(before[0])) == (4, "untrained backbone")
        for item in [*trained[1:], *before[1:]]:
            right = text(one(item, "span")) == own
            assert item.attrib["class"] == ("right" if right else "wrong")
            assert text(one(item, "b")).startswith("✓" if right else "✗")
            assert ("right" if right else "wrong") in one(item, "img").attrib["alt"]
    shares = [float(re.findall(r"([\d.]+)\xa0%", text(one(grid, "h4")))[0]) for grid in grids]
    assert (max(shares), min(shares)) == (shares[0], shares[5])  # 3 best, 2 typical, 3 worst


def test_a_sample_is_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", str(copy), "--images", "6", "--queries", "2", "--split", "all"]
    assert crossbatch.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["page"], result["images"], result["of_images"]) == (str(copy / "report.html"), 6, 30)
    assert "a sample of 30 drawn class by class (seed 0)" in (copy / "report.html").read_text()
    assert "6 of 30 images" in render(result)
    assert crossbatch.main(["report", str(copy), "--queries", "0"]) == 2


def test_a_run_that_measured_nothing(copy: Path) -> None:
    record = read_record(copy)
    keep = {name: record["data"][name] for name in record["data"] if not name.startswith("validation")}
    write_record(copy, {"name": EVIL, "data": keep, "metrics": {"epoch": 1}})
    (copy / METRICS).write_text("epoch,loss,dml\n0,,\n1,nan,2\n2,inf,\n")
    run(Settings(run_dir=copy, queries=1, neighbours=30))
    page = parse(copy / "report.html")
    assert text(one(page, "h1")) == text(one(page, "title")) == EVIL
    assert "held out no classes" in text(_section(page, "curves"))


def test_one_class_with_queries_and_a_gallery_and_no_xml(train: Train, tmp_path: Path) -> None:
    data = draw_folder(tmp_path / "data", classes=3, images=3, size=18)
    sides = ["train"] * 6 + ["query", "gallery", "gallery"]
    lines = [f"class{i // 3:02d}/{i % 3}.png,{i // 3},{side}" for i, side in enumerate(sides)]
    (data / "table.csv").write_text("\n".join(["path,label,split", *lines, ""]))
    trained = tmp_path / "run"
    train(trained, *TINY, "xml_weight=0", "split_by=given", "classes_per_batch=1", data=data)
    (trained / METRICS).write_text("")
    result = run(Settings(run_dir=trained))
    assert (result["classes"], result["queries"], result["gallery"], result["map_at_r"]) == (1, 1, 2, 1.0)
    page = parse(trained / "report.html")
    assert not list(page.iterfind(".//li[@class='wrong']"))
    for told in ("no result of training", "Each query is searched in the gallery", "no figures of an epoch"):
        assert told in text(page)


def test_queries_and_a_gallery_of_a_run_that_was_cut_by_class(train: Train, tmp_path: Path) -> None:
    data, trained = draw_folder(tmp_path / "data", classes=4, images=4, size=18), tmp_path / "run"
    lines = [
        f"class{c:02d}/{i}.png,{c},{'query' if i == 0 else 'gallery'}" for c in range(4) for i in range(4)
    ]
    (data / "table.csv").write_text("\n".join(["path,label,split", *lines, ""]))
    train(trained, *TINY, data=data)
    assert (run(Settings(run_dir=trained))["queries"], run(Settings(run_dir=trained))["gallery"]) == (8, 0)
    assert "--protocol query-gallery shows those" in text(parse(trained / "report.html"))
    result = run(Settings(run_dir=trained, protocol="query-gallery", neighbours=2))
    assert (result["queries"], result["gallery"], result["untrained"]["gallery"]) == (2, 6, 6)
    page = parse(trained / "report.html")
    assert "what they find is of its gallery" in text(_section(page, "neighbours"))
    shown = [figure.attrib["title"] for figure in _section(page, "neighbours").iter("figure")]
    assert sum(key.endswith("/0.png") for key in shown) == 2  # the queries, and nothing that was found


def test_a_backbone_that_is_gone_leaves_the_run_alone(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise NotFound(f"the weights {EVIL} are not there")

    monkeypatch.setattr(findings, "open_start", gone)
    result = run(Settings(run_dir=copy))
    assert result["untrained"] is None
    assert "untrained" not in render(result)
    section = _section(parse(copy / "report.html"), "neighbours")
    assert f"is not shown: the weights {EVIL} are not there" in text(section)
    assert not list(section.iterfind(".//ol[@class='row before']"))


def test_what_cannot_be_shown_is_told(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "embed_split", None)  # nothing is embedded first
    for asked, told in (
        ({"out": tmp_path}, "a folder: give --out a file"),
        ({"out": tmp_path / "no/a.html"}, "there is no folder"),
        ({"data": tmp_path / "nowhere"}, "nowhere"),
    ):
        with pytest.raises((BadSetting, BadData), match=told):
            run(Settings.model_validate({"run_dir": copy} | asked))


def pixels_of(uri: str) -> np.ndarray:
    head, _, body = uri.partition(",")
    assert head in ("data:image/jpeg;base64", "data:image/png;base64")
    return np.asarray(Image.open(io.BytesIO(b64decode(body))).convert("RGB")).astype(int)


def test_curves_of_a_history() -> None:
    both = {"steps": 9.0, "loss": 0.5, "xml": 0.0, "odd": 1.0, "map_at_r": 0.5, "eigenvalues": 2.0}
    start, first, second = {"epoch": 0.0, "map_at_r": 0.25}, both | {"epoch": 1.0}, both | {"epoch": 2.0}
    found = report.plot_curves([start, first, second])
    frames = ["Loss and its parts", "On the validation classes", "How many prototypes are at work", "Odd"]
    assert [chart["title"] for chart in found["charts"]] == frames
    told = " ".join(chart["alt"] for chart in found["charts"])
    assert "MAP@R: from 25 at epoch 0 to 50 at epoch 2." in told
    assert "cross-batch" not in told  # all zeros: it has no weight
    assert {"epoch", "MAP@R", "steps", "whole loss", "cross-batch loss (xml)", "odd"} < set(found["names"])
    assert (len(found["rows"]), found["rows"][0]) == (3, ["0", "0.25", *["–"] * 5])

    # a long history is thinned
    found = report.plot_curves([{"epoch": float(i), "loss": 1.0} for i in range(1, 5001)])
    assert (found["drawn"], found["epochs"], len(found["rows"])) == (400, 5000, 60)
    assert report.plot_curves([])["charts"] == []


def _findings(histograms: np.ndarray, labels: np.ndarray, classes: list[str]) -> Findings:
    return Findings((), (), tuple(classes), labels, None, np.zeros((len(labels), 2), np.float32), histograms)


def test_histograms_name_the_strongest() -> None:
    histograms = np.array([[0.5, 0.25, 0.25, 0], [0, 0, 1, 0]])
    found = figures.tabulate_histograms(_findings(histograms, np.array([0, 1]), ["a", EVIL]))
    assert (found["count"], found["used"], found["largest"], found["classes"]) == (4, 2, 1, 2)
    assert [line["name"] for line in found["lines"]] == ["a", EVIL]
    assert found["lines"][0]["strongest"] == [
        (PROTOTYPES[0], "0 (50\xa0%)"), (PROTOTYPES[1], "1 (25\xa0%)"), (PROTOTYPES[2], "2 (25\xa0%)")
    ]  # fmt: skip
    drawn = np.asarray(Image.open(io.BytesIO(b64decode(found["lines"][0]["bars"].partition(",")[2]))))
    assert drawn.shape == (24, 4, 4)  # a bar a prototype, as high as its share of the largest one
    assert (drawn[..., 3] == 255).sum(axis=0).tolist() == [12, 6, 6, 0]
    assert (drawn[-1, :3, 3] == 255).all()  # from below
    assert [f"#{bytes(each).hex()}" for each in drawn[-1, :, :3].tolist()] == list(PROTOTYPES[:4])

    names = [f"c{i:03}" for i in range(100)]
    lines = figures.tabulate_histograms(_findings(np.full((100, 4), 0.25), np.arange(100), names))["lines"]
    assert (len(lines), lines[0]["name"], lines[-1]["name"]) == (40, "c000", "c099")


def test_a_chart_of_little_in_both_themes() -> None:
    series = {EVIL + "$\\frac{": [(7.0, 3e-9)], "日本": [(1.0, -1e30), (3.0, 1e30)]}
    found = figures.line_chart(series, unit=EVIL)
    for theme in ("light", "dark"):
        drawn = b64decode(found[theme].partition(",")[2]).decode()
        assert COLOURS[theme]["paper"] in drawn
        assert COLOURS[theme]["s0"] in drawn
    assert found == figures.line_chart(series, unit=EVIL)  # the same bytes each time


def test_a_scatter_marks_its_classes() -> None:
    points = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 4.0], [0.0, 4.0]])
    found = figures.scatter(points, ["a", EVIL, "c", "d"], [EVIL, "c"], axes=("u", "v"))
    for theme in ("light", "dark"):
        shown = np.unique(pixels_of(found[theme]).reshape(-1, 3), axis=0).tolist()
        colours = {f"#{bytes(each).hex()}" for each in shown}
        assert {COLOURS[theme][name] for name in ("paper", "s0", "s1")} <= colours
        assert COLOURS[theme]["s2"] not in colours
    figures.scatter(np.zeros((2, 2)), ["a", "a"], [], axes=("u", "v"))
    assert len(figures.MARKS) == 8


def test_a_map_covers_the_image() -> None:
    found = np.array([[5, 5, 7], [5, 9, 9]], np.uint8)
    white = np.full((90, 90, 3), 255, np.uint8)
    shown = pixels_of(figures.map_picture(white, found))
    assert shown.shape == (90, 184, 3)
    assert (shown[:, :85] > 240).all()
    colours = figures.map_colours(found)
    assert f"#{bytes(colours[0, 2].tolist()).hex()}" == PROTOTYPES[7]
    assert bytes(figures.map_colours(np.array(5 + 128)).tolist()) == bytes(colours[0, 0].tolist())
    for (y, x), _ in np.ndenumerate(found):  # beside the number, which stands in the middle of the place
        expected = 0.3 * 255 + 0.7 * colours[y, x].astype(float)
        corner = shown[y * 45 + 4 : y * 45 + 10, 94 + x * 30 + 4 : 94 + x * 30 + 10].mean(axis=(0, 1))
        np.testing.assert_allclose(corner, expected, atol=12)


def test_thumbnails_are_what_the_model_sees(tmp_path: Path) -> None:
    good, gone = tmp_path / "0.png", tmp_path / "gone.png"
    picture = Image.new("RGB", (100, 50), (255, 0, 0))
    picture.paste((0, 0, 255), (37, 12, 63, 38))  # only the middle is seen
    picture.save(good)
    rows = [Row("good", File(good), "a"), Row("gone", File(gone), "a")]
    found = figures.thumbnails(rows, Recipe(crop_fraction=0.5), side=24)
    assert [(key, pixels.shape) for key, pixels in found.items()] == [("good", (24, 24, 3))]
    np.testing.assert_allclose(found["good"][12, 2].astype(int), (0, 0, 255), atol=12)
