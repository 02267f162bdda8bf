"""Ensembles of folds against naive concatenation, and the interval over repeats against its formula."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import oracles
from training.evaluation.ensemble import concatenate, mean_of, measure_ensemble, over_repeats
from training.evaluation.protocol import measure_retrieval

LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 3])


def _parts() -> list[Tensor]:
    rng = np.random.default_rng(3)
    # folds of quite different lengths: without normalising, the last one alone would decide
    return [torch.from_numpy(scale * rng.normal(size=(8, 4))) for scale in (1.0, 0.1, 50.0)]


def _naive(parts: list[Tensor]) -> np.ndarray:
    rows = []
    for i in range(len(LABELS)):
        row: list[float] = []
        for part in parts:
            vector = part[i].numpy()
            row += [float(value) / float(np.sqrt((vector**2).sum())) for value in vector]
        rows.append(np.array(row) / np.sqrt(sum(value**2 for value in row)))
    return np.array(rows)


def _measure(embeddings: Tensor) -> dict[str, Any]:
    return measure_retrieval(embeddings, LABELS)


def test_concatenation_is_the_naive_one() -> None:
    found = concatenate(_parts())
    assert found.shape == (8, 12)
    np.testing.assert_allclose(found.numpy(), _naive(_parts()), atol=1e-12)
    np.testing.assert_allclose(found.norm(dim=1).numpy(), 1, atol=1e-12)


def test_separate_is_the_mean_and_concatenated_the_whole() -> None:
    parts = _parts()
    found = measure_ensemble(parts, _measure)
    alone = [oracles.retrieval(part.numpy(), LABELS, (1,)) for part in parts]
    whole = oracles.retrieval(_naive(parts), LABELS, (1,))
    assert found["separate"] == pytest.approx(
        {
            "recall_at_1": np.mean([recall[1] for recall, *_ in alone]),
            "map_at_r": np.mean([value for _, value, *_ in alone]),
            "r_precision": np.mean([value for _, _, value, _ in alone]),
        }
    )
    assert found["concatenated"] == pytest.approx(
        {"recall_at_1": whole[0][1], "map_at_r": whole[1], "r_precision": whole[2]}
    )
    assert found["concatenated"] != found["by_fold"][2]
    assert len(found["by_fold"]) == 3
    assert (found["queries"], found["excluded"]) == (7, 1)


def test_one_fold_concatenated_is_itself() -> None:
    found = measure_ensemble(_parts()[:1], _measure)
    assert found["concatenated"] == found["separate"] == found["by_fold"][0]


def _figures(*values: float) -> list[dict[str, float]]:
    return [{"recall_at_1": value, "map_at_r": value / 2, "r_precision": 0.5} for value in values]


@pytest.mark.parametrize(
    ("values", "critical"),  # Student's t at 0.975, from a table
    [((0.50, 0.60), 12.706), ((0.50, 0.60, 0.64), 4.303), (tuple(np.linspace(0.5, 0.6, 10)), 2.262)],
)
def test_the_interval_over_repeats_is_student_t(values: tuple[float, ...], critical: float) -> None:
    found = over_repeats(_figures(*values))
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    expected = critical * deviation / len(values) ** 0.5
    assert found["recall_at_1"]["mean"] == pytest.approx(mean)
    assert found["recall_at_1"]["half_width"] == pytest.approx(expected, rel=1e-3)
    assert found["map_at_r"]["half_width"] == pytest.approx(expected / 2, rel=1e-3)
    assert found["r_precision"] == {"mean": 0.5, "half_width": 0.0}


def test_one_repeat_has_no_interval() -> None:
    assert over_repeats(_figures(0.5))["recall_at_1"] == {"mean": 0.5, "half_width": None}
    assert mean_of(_figures(0.2, 0.4))["recall_at_1"] == pytest.approx(0.3)
