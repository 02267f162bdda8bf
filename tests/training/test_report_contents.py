"""What a report shows: curves, tables of figures and histograms, plots, thumbnails and maps."""

import io
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serving.catalog.catalog import Row
from serving.catalog.picture import File
from tests.training.drawn import draw_folder
from training.loop.logbook import History
from training.recipes.recipe import Recipe
from training.report.contents import plot_curves, tabulate_figures, tabulate_histograms
from training.report.figures import (
    COLOURS,
    MARKS,
    line_chart,
    map_colours,
    map_picture,
    scatter,
    strip,
    thumbnails,
)
from training.report.findings import Findings

EVIL = "<script>alert(1)</script>&\"'$\\frac{"


def pixels_of(uri: str) -> np.ndarray:
    head, _, body = uri.partition(",")
    assert head in ("data:image/jpeg;base64", "data:image/png;base64")
    return np.asarray(Image.open(io.BytesIO(b64decode(body))).convert("RGB")).astype(int)


def test_curves_of_a_history() -> None:
    rows = [{"epoch": 0.0, "map_at_r": 0.25}]
    rows += [
        {"epoch": i, "steps": 9.0, "loss": 1 / i, "xml": 0.0, "odd": i, "map_at_r": 0.5} for i in (1.0, 2.0)
    ]
    found = plot_curves(History(tuple(rows)))
    titles = [chart["title"] for chart in found["charts"]]
    assert titles == ["Loss and its parts", "On the validation classes", "Odd"]
    told = " ".join(chart["alt"] for chart in found["charts"])
    assert "MAP@R: from 25 at epoch 0 to 50 at epoch 2." in told
    assert "cross-batch" not in told  # all zeros: it has no weight
    assert found["names"] == ["epoch", "MAP@R", "steps", "whole loss", "cross-batch loss (xml)", "odd"]
    assert found["rows"][0] == ["0", "0.25", "–", "–", "–", "–"]
    assert len(found["rows"]) == 3


def test_the_term_has_its_panels() -> None:
    names = (
        "prototypes_in_use", "prototypes_an_image", "eigenvalues",
        "expressed_cosine", "rebuilt_cosine", "xml_gradient_share",
    )  # fmt: skip
    rows = [{"epoch": 0.0}, *({"epoch": float(i)} | dict.fromkeys(names, 0.5 + i) for i in (1, 2))]
    assert [chart["title"] for chart in plot_curves(History(tuple(rows)))["charts"]] == [
        "How many prototypes are at work",
        "Cosines of embeddings expressed by the other half",
        "How hard the cross-batch term pulls at the head",
    ]


def test_a_long_history_is_thinned() -> None:
    found = plot_curves(History(tuple({"epoch": float(i), "loss": 1.0} for i in range(1, 5001))))
    assert (found["drawn"], found["epochs"], len(found["rows"])) == (400, 5000, 60)
    assert len(found["charts"][0]["plot"]["light"]) < 100_000
    assert plot_curves(History(()))["charts"] == []


def test_figures_of_record_and_start() -> None:
    measured = {"recall_at": {"10": 0.75, "1": 0.5}, "map_at_r": 0.25, "r_precision": 0.3}
    measured |= {"images": 1234, "classes": 7}
    noted = measured | {"map_at_r": 0.125, "nmi": 0.12, "untrained": {"map_at_r": 0.03}}
    record: dict[str, Any] = {"metrics": {"epoch": 3, "test": noted, EVIL: {"map_at_r": "x"}, "a": []}}
    history = History(({"epoch": 0.0, "map_at_r": 0.0625},))
    found = tabulate_figures(record, history, measured, title="now")
    heads = ["R@1", "R@10", "MAP@R", "R-precision", "NMI", "images", "classes"]
    assert all(list(cells) == heads for cells in found.values())
    assert list(found) == [
        "now",
        "unseen classes (test), as noted in the run",
        "unseen classes (test), as noted in the run: the untrained backbone",
        f"{EVIL}, as noted in the run",
        "validation classes, before training",
    ]
    rows = [list(cells.values()) for cells in found.values()]
    assert rows[0] == ["50.00\xa0%", "75.00\xa0%", "25.00\xa0%", "30.00\xa0%", "–", "1,234", "7"]
    assert rows[1][4] == "12.00\xa0%"
    assert [row[2] for row in rows[1:]] == ["12.50\xa0%", "3.00\xa0%", "–", "6.25\xa0%"]


def _findings(histograms: np.ndarray, labels: np.ndarray, classes: list[str]) -> Findings:
    roles, vectors = np.array([""] * len(labels)), np.zeros((len(labels), 2), np.float32)
    return Findings((), (), tuple(classes), labels, roles, vectors, histograms.astype(np.float32))


def test_histograms_name_the_strongest() -> None:
    histograms = np.array([[0.5, 0.25, 0.25, 0], [0, 0, 1, 0]])
    found = tabulate_histograms(_findings(histograms, np.array([0, 1]), ["a", EVIL]))
    assert (found["count"], found["used"], found["largest"], found["classes"]) == (4, 2, 1, 2)
    assert [line["name"] for line in found["lines"]] == ["a", EVIL]
    assert found["lines"][0]["strongest"] == "0 (50\xa0%), 1 (25\xa0%), 2 (25\xa0%)"
    colours = pixels_of(found["lines"][0]["strip"])[0].sum(axis=1)  # the brighter, the larger
    assert colours[0] > colours[1] == colours[2] > colours[3]


def test_many_classes_are_capped() -> None:
    names = [f"c{i:03}" for i in range(100)]
    lines = tabulate_histograms(_findings(np.full((100, 4), 0.25), np.arange(100), names))["lines"]
    assert (len(lines), lines[0]["name"], lines[-1]["name"]) == (40, "c000", "c099")


def test_a_strip_has_a_pixel_a_prototype() -> None:
    assert pixels_of(strip(np.linspace(0, 1, 7))).shape == (1, 7, 3)


@pytest.mark.parametrize("points", [[(7, 0.0)], [(7, 3e-9)], [(1, 5.0), (2, 5.0)], [(1, -1e30), (3, 1e30)]])
def test_a_chart_of_little_in_both_themes(points: list[tuple[float, float]]) -> None:
    found = line_chart({EVIL: points, "日本": points}, unit=EVIL)
    light, dark = (b64decode(found[theme].partition(",")[2]).decode() for theme in ("light", "dark"))
    for theme, text in (("light", light), ("dark", dark)):
        assert COLOURS[theme]["paper"] in text
        assert COLOURS[theme]["s0"] in text
    assert found == line_chart({EVIL: points, "日本": points}, unit=EVIL)  # the same bytes each time


def test_a_scatter_marks_its_classes() -> None:
    points = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 4.0], [0.0, 4.0]])
    found = scatter(points, ["a", EVIL, "c", "d"], [EVIL, "c"], axes=("u", "v"))
    for theme in ("light", "dark"):
        colours = {
            f"#{bytes(each).hex()}"
            for each in np.unique(pixels_of(found[theme]).reshape(-1, 3), axis=0).tolist()
        }
        assert {COLOURS[theme][name] for name in ("paper", "s0", "s1")} <= colours
        assert COLOURS[theme]["s2"] not in colours
    scatter(np.zeros((2, 2)), ["a", "a"], [], axes=("u", "v"))
    assert len(MARKS) == 8


def test_a_map_covers_the_image() -> None:
    found = np.array([[5, 5, 7], [5, 9, 9]], np.uint8)
    white = np.full((90, 90, 3), 255, np.uint8)
    shown = pixels_of(map_picture(white, found))
    assert shown.shape == (90, 184, 3)
    assert (shown[:, :85] > 240).all()
    colours = map_colours(found)
    assert len(np.unique(colours.reshape(-1, 3), axis=0)) == 3
    for (y, x), _ in np.ndenumerate(found):  # beside the number, which stands in the middle of the place
        expected = 0.45 * 255 + 0.55 * colours[y, x].astype(float)
        corner = shown[y * 45 + 4 : y * 45 + 10, 94 + x * 30 + 4 : 94 + x * 30 + 10].mean(axis=(0, 1))
        np.testing.assert_allclose(corner, expected, atol=12)


def test_thumbnails_are_what_the_model_sees(tmp_path: Path) -> None:
    draw_folder(tmp_path, classes=1, images=1, size=50)
    good, gone = tmp_path / "class00" / "0.png", tmp_path / "gone.png"
    picture = Image.new("RGB", (100, 50), (255, 0, 0))
    picture.paste((0, 0, 255), (37, 12, 63, 38))  # only the middle is seen
    picture.save(good)
    rows = [Row("good", File(good), "a"), Row("gone", File(gone), "a")]
    found = thumbnails(rows, Recipe(crop_fraction=0.5), side=24)
    assert list(found) == ["good"]
    assert found["good"].shape == (24, 24, 3)
    np.testing.assert_allclose(found["good"][12, 2].astype(int), (0, 0, 255), atol=12)
