"""How many images a model should take in one run: tried when it is loaded, on the machine that runs it."""

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder

__all__ = ["best_batch"]

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32)
BUDGET = 2.0
"""Seconds that the trial of one model may take, about."""
RUNS = 3
SLACK = 0.97
"""A size is good enough with this share of the best one's images a second."""
HANDING_OVER = 3e-4
"""Seconds a run that go by between two of them, in which the model has nothing to do."""


def best_batch(encoder: "Encoder", chosen: int = 0) -> int:
    """Warm a model up and find the smallest batch that it embeds about as fast as any; blocks.

    A smaller batch than needed leaves cores idle; a larger one only makes each of its images wait longer.

    Args:
        encoder: The model.
        chosen: A size that is taken as it is, with no trial; 0 tries.

    Returns:
        The most images that a run should have.

    Raises:
        CrossbatchError: if the model cannot be run.
    """
    if chosen:
        for size in sorted({1, chosen}):
            encoder.encode(_black(encoder, size))
        return chosen
    until = time.monotonic() + BUDGET
    rates: dict[int, float] = {}
    for size in SIZES:
        if rates and 2 * size / max(rates.values()) > until - time.monotonic():
            break
        images = _black(encoder, size)
        encoder.encode(images)  # the first one makes room in memory
        took = min(_seconds(encoder, images) for _ in _runs(until))
        rates[size] = size / (took + HANDING_OVER)
    best = max(rates.values())
    found = min(size for size, rate in rates.items() if rate >= SLACK * best)
    logger.info(
        "model %s runs batches of up to %d images",
        encoder.spec.name,
        found,
        extra={"images_per_second": {size: round(rate, 1) for size, rate in rates.items()}},
    )
    return found


def _runs(until: float) -> Iterator[int]:
    """Count the runs of one size, at least one."""
    for run in range(RUNS):
        if run and time.monotonic() > until:
            return
        yield run


def _seconds(encoder: "Encoder", images: NDArray[np.uint8]) -> float:
    began = time.monotonic()
    encoder.encode(images)
    return time.monotonic() - began


def _black(encoder: "Encoder", count: int) -> NDArray[np.uint8]:
    side = encoder.spec.image_size
    return np.zeros((count, side, side, 3), np.uint8)
