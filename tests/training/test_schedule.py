"""Schedules of learning rates and of lambda, against their formulas."""

import math

import pytest

from training.loop.schedule import rate_factor, xml_weight
from training.recipes.recipe import Recipe


def test_warm_up_and_half_a_cosine() -> None:
    cosine = Recipe(warmup=0.2)
    factors = [rate_factor(step, 10, cosine) for step in range(10)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[6] == pytest.approx(0.5)
    assert factors == [*factors[:3], *sorted(factors[3:], reverse=True)]
    assert rate_factor(9, 10, Recipe(schedule="constant")) == 1


def test_rates_drop_after_the_epochs_that_are_named() -> None:
    recipe = Recipe(schedule="drops", drop_epochs=[2, 4], drop_factor=0.5, warmup=0.1)
    factors = [rate_factor(step, 20, recipe, per_epoch=4) for step in range(20)]
    assert factors[:2] == pytest.approx([1 / 3, 2 / 3])
    assert factors[2:] == [1] * 6 + [0.5] * 8 + [0.25] * 4
    unsorted = Recipe(schedule="drops", drop_epochs=[4, 2], drop_factor=0.5, warmup=0.1)
    assert factors == [rate_factor(step, 20, unsorted, per_epoch=4) for step in range(20)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lambda_rises_over_its_warm_up_and_then_follows_its_schedule(schedule: str) -> None:
    recipe = Recipe.model_validate({"xml_weight": 0.2, "xml_warmup": 0.3, "xml_schedule": schedule})
    weights = [xml_weight(step, 10, recipe) for step in range(10)]
    assert weights[:3] == pytest.approx([0.05, 0.1, 0.15])
    for step in range(3, 10):
        gone = (step - 3) / 7
        expected = {"constant": 1, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}
        assert weights[step] == pytest.approx(0.2 * expected[schedule])


def test_a_warm_up_as_long_as_the_training_never_reaches_the_rest() -> None:
    recipe = Recipe(xml_weight=0.5, xml_warmup=1.0, xml_schedule="cosine")
    assert [xml_weight(step, 4, recipe) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
