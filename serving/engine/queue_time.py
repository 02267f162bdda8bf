"""How long images wait behind those of other calls, so that what would come too late is refused at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import Overloaded

__all__ = ["Place", "QueueTime"]

SPELL = 0.25
"""Seconds of work, at least, over which the images a second are counted."""
SMOOTHING = 0.5
MARGIN = 1.2
"""A wait is taken for so many times as long as it looks: a call that ends just too late is lost whole."""


class QueueTime:
    """Counts the images that are on their way to a model; belongs to one event loop.

    Without it, a queue that is longer than its callers wait would be worked off for nobody: each image would
    get its turn just before its time runs out.
    """

    def __init__(self) -> None:
        """Begin with nothing on its way."""
        self.images = 0
        self.calls = 0
        self._rate = 0.0
        self._since = 0.0
        self._done = 0

    @contextmanager
    def place(self, images: int, deadline: float | None) -> "Iterator[Place]":
        """Hold a place for the images of a call while the block runs.

        Args:
            images: How many.
            deadline: The `time.monotonic()` after which nobody wants them.

        Yields:
            What is told of each that has been embedded.

        Raises:
            Overloaded: if they would come too late, and only since those of other calls come first.
        """
        now = time.monotonic()
        if deadline is not None and self.images:
            wait, left = MARGIN * self.seconds(images), deadline - now
            if wait > left:
                raise Overloaded(
                    f"{self.images} images wait, for about {wait:.2f} s, and the call has {left:.2f} s left; "
                    "try again later, or give it more time.",
                    retry_after=wait,
                )
        if not self.images:
            self._since, self._done = now, 0
        place = Place(self, images)
        self.calls += 1
        self.images += images
        try:
            yield place
        finally:
            self.calls -= 1
            self.images -= place.images

    def seconds(self, images: int) -> float:
        """Tell how long a call with so many images would take now; 0 as long as nobody knows."""
        if not self._rate:
            return 0.0
        # Calls take turns, an image each: one with few waits for no more than as many of each other call.
        others = min(self.images, images * self.calls)
        return (others + images) / self._rate

    def count(self) -> None:
        """Count an image that has been embedded, of a spell in which there was always something to do."""
        self.images -= 1
        self._done += 1
        now = time.monotonic()
        if now - self._since < SPELL:
            return
        rate = self._done / (now - self._since)
        self._rate += (SMOOTHING if self._rate else 1.0) * (rate - self._rate)
        self._since, self._done = now, 0


class Place:
    """The images of one call that are on their way."""

    __slots__ = ("_queue", "images")

    def __init__(self, queue: QueueTime, images: int) -> None:
        """Take them up."""
        self._queue = queue
        self.images = images

    def embedded(self) -> None:
        """Note that one has been embedded; not at the call's end, to which a large one gives many at once."""
        self.images -= 1
        self._queue.count()
