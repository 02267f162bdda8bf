"""Runs of one model, in the way that its plan has them."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.engine.plan import Plan

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder

__all__ = ["Runs"]


class Runs:
    """Called with a batch, in as many threads at once as the plan has lanes."""

    def __init__(self, encoder: "Encoder", plan: Plan, ran: Callable[[int, float], None]) -> None:
        """Keep what is called.

        Args:
            encoder: The model.
            plan: How it is run; may be changed as long as it does not run.
            ran: Is told the number of images of each run, and its seconds.
        """
        self.plan = plan
        self._encoder = encoder
        self._ran = ran
        self._running = 0
        self._guard = threading.Lock()

    def __call__(self, images: list[NDArray[np.uint8]]) -> list[NDArray[np.float32]]:
        """Embed images (S, S, 3); blocks.

        Returns:
            A row float32 (d,) for each.

        Raises:
            CrossbatchError: as `Encoder.encode` does.
        """
        batch = np.stack(images)
        with self._guard:
            self._running += 1
            alone = self._running == len(images) == 1
        began = time.monotonic()
        try:
            if self.plan.lanes == 1 or (alone and self.plan.alone_on_all):
                rows = self._encoder.encode(batch)
            else:
                rows = self._encoder.encode(batch, threads=1)
        finally:
            with self._guard:
                self._running -= 1
        self._ran(len(images), time.monotonic() - began)
        return list(rows)
