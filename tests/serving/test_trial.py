"""The trial that finds how a model is best run, on a clock that only the model moves."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.engine import trial
from serving.engine.plan import Plan
from serving.engine.trial import best_plan, warm_up
from tests.serving.rpc_fakes import FakeSpec


class Machine:
    """A model whose run takes a known time, and the clock beside it."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.spec = FakeSpec()
        self.seconds = seconds
        self.sizes: list[int] = []
        self.now = 0.0
        self.most_lanes = 1

    def encode(self, images: NDArray[np.uint8]) -> None:
        self.sizes.append(len(images))
        self.now += self.seconds(len(images))

    def monotonic(self) -> float:
        return self.now


class Threads(Machine):
    """A model on two cores: alone on one, a run takes `one` seconds an image; on both, `both`."""

    def __init__(self, one: float, both: float) -> None:
        super().__init__(lambda size: size)
        self.most_lanes = 2
        self.one, self.both = one, both
        self.guard = threading.Lock()

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> None:
        with self.guard:  # two runs at once move the clock by half each
            side_by_side = threading.current_thread() is not threading.main_thread()
            self.now += len(images) * (self.both if not threads else self.one / (2 if side_by_side else 1))


def planned(machine: Any, chosen: int = 0) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "time", machine)
        return best_plan("m", machine, chosen)


def found(machine: Any, chosen: int = 0) -> int:
    return planned(machine, chosen).max_batch


@pytest.mark.parametrize(
    ("one", "both", "plan"),
    [
        (0.0030, 0.0024, Plan(1, 2, alone_on_all=False)),  # no batch is worth the wait for one another
        (0.0800, 0.0420, Plan(1, 2, alone_on_all=True)),  # nor here, but an image alone comes much sooner
        (0.0100, 0.0040, Plan(4, 1, alone_on_all=True)),  # both cores together are faster
    ],
)
def test_each_thread_has_a_batch_of_its_own_where_that_is_faster(one: float, both: float, plan: Plan) -> None:
    assert planned(Threads(one, both)) == plan


def test_a_plan_that_is_known_is_warmed_up_in_each_way_that_it_has() -> None:
    ran: list[object] = []

    class Told:
        spec = FakeSpec()

        def forget(self) -> None:
            ran.append("forgotten")

        def encode(self, images: NDArray[np.uint8], threads: int = 0) -> None:
            ran.append((len(images), threads))

    warm_up(Told(), Plan(4, 2, alone_on_all=True))  # type: ignore[arg-type]
    assert ran == ["forgotten", (1, 0), (1, 1), (4, 0), (4, 1)]
    ran.clear()
    warm_up(Told(), Plan(1, 2, alone_on_all=False))  # type: ignore[arg-type]
    assert ran == ["forgotten", (1, 1)]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        (lambda size: 0.010 * size, 1),  # nothing gained by company
        (lambda size: 0.004 + 0.001 * size, 32),  # much gained
        (lambda size: 0.010 * max(4, size), 4),  # four cores, one image each
        (lambda size: 0.001 * size * (1 if size <= 8 else 1.5), 8),  # too much for the cache
    ],
)
def test_the_smallest_batch_that_is_about_as_fast_as_any_is_taken(
    seconds: Callable[[int], float], best: int
) -> None:
    assert found(Machine(seconds)) == best


def test_each_size_is_run_before_it_is_measured() -> None:
    """The first run of a size makes room in memory, and on a GPU searches for kernels (onnxruntime#19838)."""
    machine = Machine(lambda size: 0.010 * max(4, size) + (0.1 if machine.sizes.count(size) == 1 else 0.0))
    assert found(machine) == 4


@given(each=st.floats(1e-4, 3.0), fixed=st.floats(0, 1.0))
def test_a_trial_takes_about_two_seconds_or_one_image_twice(each: float, fixed: float) -> None:
    machine = Machine(lambda size: fixed + each * size)
    assert found(machine) in trial.SIZES
    assert machine.sizes[:2] == [1, 1]
    assert machine.now <= max(2 * trial.BUDGET, 2 * (fixed + each) + trial.BUDGET)


def test_the_log_names_a_model_as_it_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found(Machine(lambda size: 0.010 * size))
    assert caplog.messages == ["model m runs batches of up to 1 images, 1 at once"]


def test_a_size_that_was_said_is_taken_without_a_trial() -> None:
    machine = Machine(lambda size: 0.001)
    assert found(machine, 24) == 24
    assert machine.sizes == []
