"""MAP_c and MAP_x against fits by `lstsq` and the naive MAP@R, with the class counts that are awkward."""

import math
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest

from serving.errors import BadData
from tests import oracles
from tests.oracles import Floats, Ints
from training.evaluation.fitted import draw_halvings, fitted_figures
from training.evaluation.metrics import retrieval_metrics


def images(labels: list[int], prototypes: int = 4, dimension: int = 6) -> tuple[Floats, Floats, Ints]:
    """Histograms (N, m) that tell a little of the class, embeddings (N, d) that follow from them, labels."""
    rng = np.random.default_rng(len(labels))
    names = np.array(labels)
    centres = rng.normal(size=(names.max() + 1, prototypes))
    scores = np.exp(centres[names] + 0.8 * rng.normal(size=(len(names), prototypes)))
    histograms = scores / scores.sum(axis=1, keepdims=True)
    embeddings = histograms @ rng.normal(size=(prototypes, dimension))
    return histograms, embeddings + 0.1 * rng.normal(size=embeddings.shape), names


def expected_x(histograms: Floats, embeddings: Floats, names: Ints, draws: int) -> tuple[float, int]:
    """Mean over each drawn halving, repeated ones too; and how many had a query."""
    values = []
    for half, times in draw_halvings(len(np.unique(names)), draws, seed=0).items():
        inside = np.isin(names, np.unique(names)[list(half)])
        rest = np.flatnonzero(~inside)
        vectors = oracles.expressed(histograms, embeddings, np.flatnonzero(inside), rest, 0.05)
        values += [oracles.map_at_r(vectors, names[rest])] * times
    there = [value for value in values if not math.isnan(value)]
    return float(np.mean(there)), len(there)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 2, 3] * 5,
        [0, 1, 2, 3, 4] * 4,  # an odd count
        [0, 0, 0, 1, 2, 2, 2, 2, 3, 3],  # a class of one image
        [5, 5, 9, 9, 9, 9],  # two classes, and fewer images than prototypes in a half
        [3, 3, 7],  # half of the halvings measure one image
    ],
)
@pytest.mark.parametrize("prototypes", [4, 9])  # fewer and more than the 6 dimensions
def test_figures_are_the_loop(labels: list[int], prototypes: int) -> None:
    histograms, embeddings, names = images(labels, prototypes)
    found = fitted_figures(histograms, embeddings, names, draws=9)
    everyone = np.arange(len(names))
    whole = oracles.expressed(histograms, embeddings, everyone, everyone, 0.05)
    assert found["map_c"] == pytest.approx(oracles.map_at_r(whole, names), abs=1e-9)
    expected, halvings = expected_x(histograms, embeddings, names, 9)
    assert (found["map_x"], found["halvings"]) == (pytest.approx(expected, abs=1e-9), halvings)


def test_each_halving_is_measured_once_and_weighs_as_often_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    histograms, embeddings, names = images([0, 1, 2, 3] * 3)
    counted = Mock(side_effect=retrieval_metrics)
    monkeypatch.setattr("training.evaluation.fitted.retrieval_metrics", counted)
    found = fitted_figures(histograms, embeddings, names, draws=200)
    assert (found["halvings"], found["distinct"], counted.call_count) == (200, 6, 7)  # one more for MAP_c
    assert found["map_x"] == pytest.approx(expected_x(histograms, embeddings, names, 200)[0], abs=1e-9)
    two = fitted_figures(*images([0, 0, 0, 1, 1, 1]), draws=9)  # one class is left to measure, and found
    assert (two["map_x"], two["halvings"], two["distinct"]) == (1, 9, 2)
    longer = embeddings * np.random.default_rng(0).uniform(0.1, 9, (len(names), 1))
    assert fitted_figures(histograms, longer, names, draws=200)["map_x"] == pytest.approx(found["map_x"])


@pytest.mark.parametrize(("classes", "fitted_to"), [(2, 1), (5, 2)])
def test_halves_are_drawn_alike_from_one_seed(classes: int, fitted_to: int) -> None:
    drawn = draw_halvings(classes, 1000, seed=3)
    assert sum(drawn.values()) == 1000
    assert {len(set(half)) for half in drawn} == {fitted_to}
    assert len(drawn) <= math.comb(classes, fitted_to)
    assert list(drawn.items()) == list(draw_halvings(classes, 1000, seed=3).items())
    assert drawn != draw_halvings(classes, 1000, seed=4)
    shares = Counter({c: sum(n for half, n in drawn.items() if c in half) / 1000 for c in range(classes)})
    assert all(abs(share - fitted_to / classes) < 0.06 for share in shares.values())


def test_what_cannot_be_measured_is_one_sentence() -> None:
    with pytest.raises(BadData, match="all images are of one"):
        fitted_figures(*images([2, 2, 2]), draws=9)
    with pytest.raises(BadData, match="every image is alone in its class"):
        fitted_figures(*images([0, 1, 2]), draws=9)
    histograms, embeddings, names = images([0, 0, 1])
    seed = next(s for s in range(99) if draw_halvings(2, 1, seed=s) == {(0,): 1})
    with pytest.raises(BadData, match="none of 1 halvings of 2 classes"):
        fitted_figures(histograms, embeddings, names, draws=1, seed=seed)
    embeddings[0, 0] = np.nan
    with pytest.raises(BadData, match="not finite"):
        fitted_figures(histograms, embeddings, names, draws=9)
