"""What a model sees in an image."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder

__all__ = ["Explanation", "explained_at"]


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What a model sees in an image."""

    histogram: NDArray[np.float32]
    """Share of each prototype, float32 (m,); sums to one."""
    assignments: NDArray[np.uint8]
    """The dominant prototype at each location, uint8 (h, w)."""


def explained_at(encoder: "Encoder", images: NDArray[np.uint8]) -> tuple[list[Explanation], float, float]:
    """Run a model on images uint8 (B, S, S, 3) for what it sees in them; blocks.

    Returns:
        One explanation an image, the `time.monotonic()` at which the run began, and its seconds.
    """
    began = time.monotonic()
    found = encoder.run(images, "histograms", "assignments")
    pairs = zip(found["histograms"], found["assignments"], strict=True)
    return [Explanation(*pair) for pair in pairs], began, time.monotonic() - began
