"""Plans on their way through a pipe: the same on the other side, and nothing else is taken for one."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from serving.engine.plan import Kind, Plan, read_plans, written_plans

PLANS = {
    Kind("a", 224, "fp32", 128): Plan(24, 2, alone_on_all=False),
    Kind("b", 224, "int8", 128): Plan(1),
}


def sent() -> Any:
    return json.loads(json.dumps(written_plans(PLANS)))


def test_plans_come_over_a_pipe_as_they_are() -> None:
    assert read_plans(sent()) == PLANS
    assert read_plans([]) == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda kind, plan: plan.update(max_batch=0),
        lambda kind, plan: plan.update(lanes=True),
        lambda kind, plan: plan.update(lanes="2"),
        lambda kind, plan: plan.update(speed=1),
        lambda kind, plan: plan.pop("max_batch"),
        lambda kind, plan: kind.pop("name"),
        lambda kind, plan: kind.update(image_size=-1),
    ],
)
def test_what_is_no_plan_is_not_taken_for_one(damage: Callable[[Any, Any], object]) -> None:
    plans = sent()
    damage(*plans[0])
    with pytest.raises(ValueError, match="validation error"):
        read_plans(plans)


@pytest.mark.parametrize("said", [None, 3, {"a": 1}, [[]], "plans"])
def test_what_are_no_plans_at_all_is_refused(said: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read_plans(said)
