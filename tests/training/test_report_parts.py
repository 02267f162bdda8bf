"""The parts of the report's page: markup, charts, histograms, maps."""

import io
import math
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from serving.catalog.catalog import Row
from serving.catalog.picture import File
from tests.training.drawn import draw_folder
from tests.training.page_tree import Node, parse
from training.loop.logbook import History
from training.recipes.recipe import Recipe
from training.report.curves import curves_section
from training.report.figures import figures_section
from training.report.histograms import class_histograms, histograms_section
from training.report.linechart import Series, line_chart, ticks
from training.report.maps import maps_section
from training.report.markup import Markup, clip, element
from training.report.picture import picture, thumbnails
from training.report.scatter import MARKS, scatter

EVIL = "<script>alert(1)</script>&\"'"


def _tree(section: object) -> Node:
    return parse("".join(section.parts))  # type: ignore[attr-defined]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_the_parser(text: str, value: str) -> None:
    def seen(given: str) -> str:
        return "".join(
            "\ufffd" if (ord(c) < 32 and c not in "\t\n\r") or 127 <= ord(c) < 160 else c for c in given
        )

    node = parse(element("p", text, title=value)).one("p")
    assert node.text == seen(text)
    assert node.attributes["title"] == seen(value)


def test_elements() -> None:
    assert element("p", "a<b", Markup("<b>c</b>")) == "<p>a&lt;b<b>c</b></p>"
    assert element("img", src="x", alt="") == '<img src="x" alt=""/>'
    drawn = element("rect", x=1.0, y=1 / 3, class_="a", fill_opacity=0.5, hidden=True, id=None, open=False)
    assert drawn == '<rect x="1" y="0.33" class="a" fill-opacity="0.5" hidden/>'
    assert element("meta", name="viewport") == '<meta name="viewport"/>'


@pytest.mark.parametrize("most", [4, 5, 60])
def test_a_long_name_keeps_both_ends(most: int) -> None:
    assert clip("x" * most, most) == "x" * most
    short = clip("ab" + "x" * 100 + "yz", most)
    assert len(short) == most
    assert (short[:2], short[-1]) == ("ab", "z")


@given(
    st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.integers(2, 8)
)  # fmt: skip
@example(0.0, 5e-324, 2)  # no float is half of it
@example(1e-323, 1e-323, 8)
@example(1.0, 1.0000000000000002, 5)  # nor is any between them
def test_ticks_are_round_and_enclose(one: float, other: float, wanted: int) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, wanted=wanted)
    reach = max(high - low, 1e-12, abs(low) * 1e-9)
    assert found[0] <= low + 1e-6 * reach
    assert found[-1] >= high - 1e-6 * reach
    assert 2 <= len(found) <= wanted + 3
    step = found[1] - found[0]
    assert step / 10 ** math.floor(math.log10(step * 1.000001)) == pytest.approx(
        min((1, 2, 5), key=lambda f: abs(step / 10 ** math.floor(math.log10(step * 1.000001)) - f)), rel=1e-3
    )


def test_a_chart_places_its_points() -> None:
    series = [Series("up", [(0, 0), (1, 50), (2, 100)]), Series("flat", [(2, 100)])]
    chart = parse(line_chart("Rise", series, unit="percent"))
    assert chart.one("h3").text == "Rise"
    points = [(float(dot.attributes["cx"]), float(dot.attributes["cy"])) for dot in chart.all("circle")]
    (x0, y0), (x1, y1), (x2, y2), flat = points
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1))
    assert x0 < x2
    assert y0 > y2
    assert flat == (x2, y2)
    path = chart.one("path").attributes["d"]
    assert path == f"M{x0:.1f} {y0:.1f} L{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}"
    label = chart.one("svg").attributes["aria-label"]
    assert "up: from 0 at epoch 0 to 100 at epoch 2, falling in 0 of 2 steps" in label
    assert "flat: 100 at epoch 2." in label
    texts = [text.text for text in chart.all("text")]
    assert {"epoch", "percent", "0", "1", "2", "100"} <= set(texts)


@pytest.mark.parametrize("points", [[(7, 0.0)], [(7, 3e-9)], [(1, 5.0), (2, 5.0)], [(1, -1e30), (3, 1e30)]])
def test_a_chart_of_little(points: list[tuple[float, float]]) -> None:
    chart = parse(line_chart("Little", [Series("a", points)], unit="x"))
    for dot in chart.all("circle"):
        assert 0 <= float(dot.attributes["cx"]) <= 380
        assert 0 <= float(dot.attributes["cy"]) <= 230
    assert str(points[0][0]) in [text.text for text in chart.all("text")]


def test_curves_of_a_history() -> None:
    rows = [{"epoch": 0.0, "map_at_r": 0.25}]
    rows += [
        {"epoch": i, "steps": 9.0, "loss": 1 / i, "xml": 0.0, "odd": i, "map_at_r": 0.5} for i in (1.0, 2.0)
    ]
    tree = _tree(curves_section(History(tuple(rows)), validated=True))
    assert [title.text for title in tree.all("h3")] == [
        "Loss and its parts",
        "On the validation classes",
        "Odd",
    ]
    told = " ".join(svg.attributes.get("aria-label", "") for svg in tree.all("svg"))
    assert "MAP@R: from 25 at epoch 0 to 50 at epoch 2" in told
    assert "cross-batch" not in told  # all zeros: it has no weight
    assert len(list(tree.one("tbody").all("tr"))) == 3
    assert "–" in tree.one("tbody").one("tr").text


def test_curves_of_no_history_and_of_a_long_one() -> None:
    text = _tree(curves_section(History(()), validated=False)).text
    assert "no figures of an epoch" in text
    assert "held out no classes" in text
    long = curves_section(History(tuple({"epoch": i, "loss": 1.0} for i in range(1, 5001))), validated=True)
    assert "400 of 5000 epochs are drawn" in _tree(long).text
    assert len("".join(long.parts)) < 100_000


def test_the_term_has_its_panels_and_a_dead_one_is_told() -> None:
    names = (
        "prototypes_in_use", "prototypes_an_image", "eigenvalues",
        "expressed_cosine", "rebuilt_cosine", "xml_gradient_share",
    )  # fmt: skip
    rows = [{"epoch": 0.0}, *({"epoch": float(i)} | dict.fromkeys(names, 0.5 + i) for i in (1, 2))]
    note = "The cross-batch term is dead at epoch 2"
    tree = _tree(curves_section(History(tuple(rows)), validated=True, note=note))
    assert [title.text for title in tree.all("h3")] == [
        "How many prototypes are at work",
        "Cosines of embeddings expressed by the other half",
        "How hard the cross-batch term pulls at the head",
    ]
    assert note in tree.text


def test_figures_of_record_and_start() -> None:
    measured = {
        "recall_at": {"10": 0.75, "1": 0.5},
        "map_at_r": 0.25,
        "r_precision": 0.3,
        "images": 1234,
        "classes": 7,
    }
    record = {
        "metrics": {
            "epoch": 3,
            "test": measured | {"map_at_r": 0.125, "nmi": 0.12, "untrained": {"map_at_r": 0.03}},
            EVIL: {"map_at_r": "x"},
            "a": [],
        }
    }
    history = History(({"epoch": 0.0, "map_at_r": 0.0625},))
    tree = _tree(figures_section(record, history, measured, title="now", note="note"))
    heads = [cell.text for cell in tree.one("thead").all("th")]
    assert heads == ["on", "R@1", "R@10", "MAP@R", "R-precision", "NMI", "images", "classes"]
    rows = [[cell.text for cell in row.all()] for row in tree.one("tbody").all("tr")]
    assert [row[0] for row in rows] == [
        "now",
        "unseen classes (test), as noted in the run",
        "unseen classes (test), as noted in the run: the untrained backbone",
        f"{EVIL}, as noted in the run",
        "validation classes, before training",
    ]
    assert rows[0][1:] == ["50.00\xa0%", "75.00\xa0%", "25.00\xa0%", "30.00\xa0%", "–", "1,234", "7"]
    assert rows[1][5] == "12.00\xa0%"
    assert [row[3] for row in rows[1:]] == ["12.50\xa0%", "3.00\xa0%", "–", "6.25\xa0%"]


def test_mean_histograms_by_hand() -> None:
    rng = np.random.default_rng(0)
    histograms = rng.dirichlet(np.ones(5), 20).astype(np.float32)
    labels = np.arange(20) % 3
    found = class_histograms(histograms, labels, 3)
    for c in range(3):
        for m in range(5):
            own = [float(histograms[i, m]) for i in range(20) if labels[i] == c]
            assert found[c, m] == pytest.approx(sum(own) / len(own))


def test_the_heat_map_shows_the_largest_strongest() -> None:
    histograms = np.array([[0.5, 0.25, 0.25, 0], [0, 0, 1, 0]], np.float32)
    tree = _tree(histograms_section(histograms, np.array([0, 1]), ["a", EVIL], trained=True))
    first, second = tree.one("tbody").all("tr")
    assert (first.one("th").text, second.one("th").text) == ("a", EVIL)
    shades = {
        int(bar.attributes["x"]): float(group.attributes["fill-opacity"])
        for group in first.all("g")
        for bar in group.all("rect")
    }
    assert shades == {0: 0.5, 1: 0.25, 2: 0.25}
    assert "0 (50\xa0%), 1 (25\xa0%), 2 (25\xa0%)" in first.text
    assert "to 100.0\xa0%" in tree.text
    assert "2 are the strongest" in tree.text
    assert "no result of training" not in tree.text


def test_many_classes_are_capped_and_idle_prototypes_told() -> None:
    histograms = np.full((100, 4), 0.25, np.float32)
    names = [f"c{i:03}" for i in range(100)]
    tree = _tree(histograms_section(histograms, np.arange(100), names, trained=False))
    shown = [row.one("th").text for row in tree.one("tbody").all("tr")]
    assert (len(shown), shown[0], shown[-1]) == (40, "c000", "c099")
    assert "40 of 100 classes are shown" in tree.text
    assert "no result of training" in tree.text


def test_a_scatter_marks_its_classes() -> None:
    points = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 4.0], [0.0, 4.0]])
    drawing = parse(
        scatter(points, ["a", EVIL, "c", "d"], ["1", EVIL, "3", "4"], [EVIL, "c"], axes=("u", "v"))
    )
    marks = list(drawing.all("path", "mark"))
    assert [mark.text for mark in marks[:2]] == [EVIL, "3"]
    assert [mark.attributes["d"] for mark in marks[:2]] == list(MARKS[:2])
    dots = list(drawing.one("g", "rest").all("circle"))
    (x1, y1), (x2, y2) = (map(float, m.attributes["transform"][10:-1].split()) for m in marks[:2])
    (x0, y0), (_, y3) = ((float(dot.attributes["cx"]), float(dot.attributes["cy"])) for dot in dots)
    assert (x1 - x0) / 2 == pytest.approx(-(y1 - y0), abs=0.2)  # one scale, and up is up
    assert (x2 - x0, y2 - y3) == pytest.approx(((x1 - x0) / 2, 0), abs=0.2)
    assert min(y1, y2, y3) >= 0
    assert max(x1, y0) <= 400
    assert "2 other classes" in drawing.text
    parse(scatter(np.zeros((2, 2)), ["a", "a"], ["", ""], [], axes=("u", "v")))


def test_a_map_covers_the_image() -> None:
    found = np.array([[5, 5, 7, 5, 9, 9]], np.uint8)  # 2 x 3
    rows = [Row(EVIL, File(Path("x")), EVIL)]
    tree = _tree(maps_section(rows, found, (2, 3), {EVIL: "data:x"}))
    tiles = [[float(tile.attributes[k]) for k in ("x", "y", "width", "height")] for tile in tree.all("rect")]
    third = 100 / 3
    expected = [
        [0, 0, 2 * third, 50],
        [2 * third, 0, third, 50],
        [0, 50, third, 50],
        [third, 50, 2 * third, 50],
    ]
    np.testing.assert_allclose(tiles, expected, atol=0.01)
    fills = [tile.attributes["fill"] for tile in tree.all("rect")]
    assert fills[0] == fills[2]
    assert len(set(fills)) == 3
    assert [text.text for text in tree.all("text")] == ["5", "7", "5", "9"]
    assert "5 (50\xa0%), 9 (33\xa0%), 7 (17\xa0%)" in tree.one("figcaption").text
    assert tree.one("use").attributes["href"] == f"#{tree.one('image').attributes['id']}"
    assert tree.one("image").attributes["href"] == "data:x"
    assert "can no longer be read" in _tree(maps_section(rows, found, (2, 3), {})).text


def test_thumbnails_are_small_and_what_the_model_sees(tmp_path: Path) -> None:
    draw_folder(tmp_path, classes=1, images=1, size=50)
    good, gone = tmp_path / "class00" / "0.png", tmp_path / "gone.png"
    picture_of = Image.new("RGB", (100, 50), (255, 0, 0))
    picture_of.paste((0, 0, 255), (37, 12, 63, 38))  # only the middle is seen
    picture_of.save(good)
    found = thumbnails(
        [Row("good", File(good), "a"), Row("gone", File(gone), "a")], Recipe(crop_fraction=0.5), side=24
    )
    assert list(found) == ["good"]
    head, _, body = found["good"].partition(",")
    assert head == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(b64decode(body)))
    assert image.size == (24, 24)
    assert all(abs(a - b) < 12 for a, b in zip(image.getpixel((2, 12)), (0, 0, 255), strict=True))  # type: ignore[arg-type]
    assert "x: can no longer be read" in picture(found.get("gone"), "x", 24)
