"""The benchmark of a training step, in short."""

import csv
import math
from pathlib import Path

import pytest

from benchmarks import train_step


def test_steps_with_and_without_the_term_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "steps.csv"
    train_step.main(["--size", "small", "--pairs", "3", "--csv", str(rows)])
    assert "bound 5 %" in capsys.readouterr().out
    with rows.open() as file:
        (row,) = csv.DictReader(file)
    quick, slow = float(row["without_ms"]), float(row["with_ms"])
    assert 0 < quick < math.inf and 0 < slow < math.inf  # noqa: PT018
    assert float(row["first_quartile"]) <= float(row["cost"]) <= float(row["third_quartile"])


def test_the_term_is_in_the_loss_that_is_timed() -> None:
    (case,) = train_step.CASES["small"]
    without = case.recipe.model_copy(update={"xml_weight": 0.0})
    heavy = case.recipe.model_copy(update={"xml_weight": 0.9})
    first, second = (train_step.measure(recipe, 2).first for recipe in (without, heavy))
    assert math.isfinite(first) and math.isfinite(second)  # noqa: PT018
    assert first != second
