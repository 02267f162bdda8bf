"""How a model is best run on this machine: tried when it is loaded."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.engine.plan import Plan

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder

__all__ = ["best_plan", "warm_up"]

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32)
BUDGET = 1.5
"""Seconds that the trial of one way to run a model may take, about."""
LEAST_RUNS, MOST_RUNS, ENOUGH = 3, 20, 0.1
"""Runs of one size: more of short ones, which tell little each, until they have taken these seconds."""
SLACK = 0.97
"""A size is good enough with this share of the best one's images a second."""
HANDING_OVER = 3e-4
"""Seconds that go by between two runs, in which the cores have nothing to do where there is one lane."""
APART = 0.9
"""Runs side by side are preferred with this share of the images a second of common ones: beside threads that
decode, which no trial sees, they lose less, since they do not wait for one another."""
WORTH_MEMORY = 1e-3
"""Seconds by which an image alone must come sooner for the model to be in memory twice."""


def best_plan(name: str, encoder: "Encoder", chosen: int = 0) -> Plan:
    """Find out how a model embeds most images a second; blocks.

    All threads may work on one batch, and wait for one another at each node of the graph; or each on a batch
    of its own. Of the sizes of a batch the smallest that does is taken: a smaller one leaves cores idle, or
    fetches the weights from memory too often; a larger one makes each of its images wait longer.

    Args:
        name: That the model is served by, for the log.
        encoder: The model.
        chosen: A size of batch that is taken as it is, with no trial; 0 tries.

    Returns:
        The way to run it.

    Raises:
        CrossbatchError: if the model cannot be run.
    """
    if chosen:
        return Plan(chosen)
    rates = _rates(encoder, lanes=1)
    plan = Plan(_smallest(rates))
    if encoder.most_lanes > 1:
        apart = _rates(encoder, lanes=encoder.most_lanes)
        if max(apart.values()) >= APART * max(rates.values()):
            plan = Plan(_smallest(apart), encoder.most_lanes, alone_on_all=_gains_alone(encoder))
            rates = apart
    logger.info(
        "model %s runs batches of up to %d images, %d at once",
        name,
        plan.max_batch,
        plan.lanes,
        extra={"images_per_second": {size: round(rate, 1) for size, rate in rates.items()}},
    )
    return plan


def warm_up(encoder: "Encoder", plan: Plan) -> None:
    """Run a model once in each way that a plan has, and in memory that no other way took; blocks.

    Raises:
        CrossbatchError: if the model cannot be run.
    """
    encoder.forget()
    for size in sorted({1, plan.max_batch}):
        if plan.alone_on_all:
            encoder.encode(_black(encoder, size))
        if plan.lanes > 1:
            encoder.encode(_black(encoder, size), threads=1)


def _rates(encoder: "Encoder", *, lanes: int) -> dict[int, float]:
    """Images a second by size of batch, of those that there is time to try."""
    until = time.monotonic() + BUDGET
    rates: dict[int, float] = {}
    with ThreadPoolExecutor(lanes) as pool:
        for size in SIZES:
            if rates and 2 * size * lanes / max(rates.values()) > until - time.monotonic():
                break
            run = partial(_run, encoder, _black(encoder, size), pool, lanes)
            run()  # the first one makes room in memory
            took = min(_seconds(run) for _ in _runs(until))
            rates[size] = size * lanes / (took + (HANDING_OVER if lanes == 1 else 0.0))
    return rates


def _run(encoder: "Encoder", images: NDArray[np.uint8], pool: ThreadPoolExecutor, lanes: int) -> None:
    """Run a batch in each lane at once."""
    if lanes == 1:
        encoder.encode(images)
    else:
        list(pool.map(lambda _: encoder.encode(images, threads=1), range(lanes)))


def _smallest(rates: dict[int, float]) -> int:
    return min(size for size, rate in rates.items() if rate >= SLACK * max(rates.values()))


def _gains_alone(encoder: "Encoder") -> bool:
    """Whether one image comes much sooner by all threads."""
    image = _black(encoder, 1)
    one, all_ = (
        min(_seconds(lambda: encoder.encode(image, threads=threads)) for _ in range(LEAST_RUNS))  # noqa: B023 - as above
        for threads in (1, 0)
    )
    return one - all_ > WORTH_MEMORY


def _runs(until: float) -> Iterator[None]:
    """Go on for the runs of one size, at least one."""
    began = time.monotonic()
    for run in range(MOST_RUNS):
        now = time.monotonic()
        if run and (now > until or (run >= LEAST_RUNS and now > began + ENOUGH)):
            return
        yield


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _black(encoder: "Encoder", count: int) -> NDArray[np.uint8]:
    side = encoder.spec.image_size
    return np.zeros((count, side, side, 3), np.uint8)
