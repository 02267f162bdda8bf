"""Images that wait for a model: taken in turns, an image of each call, and refused when there is no room."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.errors import Draining, Overloaded, Unavailable
from serving.observability.call import Call

__all__ = ["LOOK_SECONDS", "InstanceLimits", "Outcome", "WaitingImages", "Work"]

Outcome: TypeAlias = NDArray[np.float32] | Exception
"""A unit vector float32 (d,), or why there is none."""

LOOK_SECONDS = 0.25
"""How often a call that waits looks whether anybody waits for it still."""
SMOOTHING = 0.2
MARGIN = 1.2
"""A wait is taken for so many times as long as it looks: a call that ends just too late is lost whole."""


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """How much a model takes on at once."""

    instances: int
    """Threads that decode and run the model, a batch each."""
    max_batch: int
    """Most images in one batch."""
    capacity: int
    """Most images that wait."""
    max_wait: float = 0.0
    """Longest time in seconds that an image waits for others to join it."""


class Work:
    """The images of one call, and what has become of each."""

    def __init__(self, images: Sequence[bytes | NDArray[np.uint8]], call: Call) -> None:
        """Take them up; none is looked at yet."""
        self.images = images
        self.call = call
        self.submitted = time.monotonic()
        self.next = 0
        """The image that is taken next."""
        self._outcomes: list[Outcome | None] = [None] * len(images)
        self._unsettled = len(images)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def settle(self, number: int, outcome: Outcome) -> None:
        """Note what became of an image, the first time."""
        with self._lock:
            if self._outcomes[number] is None:
                self._outcomes[number] = outcome
                self._unsettled -= 1
                if not self._unsettled:
                    self._done.set()

    def fail(self, error: Exception) -> None:
        """Let an error be what became of every image that nothing became of yet."""
        for number in range(len(self.images)):
            self.settle(number, error)

    def gone(self) -> Exception | None:
        """Tell why nobody waits for the images any more; None where somebody does."""
        try:
            self.call.check()
        except Exception as error:
            return error
        return None

    def wait(self) -> list[Outcome]:
        """Wait until something has become of every image.

        Raises:
            CrossbatchError: Nobody waits for them any more.
        """
        while not self._done.wait(self.call.remaining(LOOK_SECONDS)):
            self.call.check()
        return [outcome for outcome in self._outcomes if outcome is not None]


class WaitingImages:
    """A bounded queue that several threads take from; knows neither what an image nor what a model is."""

    def __init__(self, limits: InstanceLimits) -> None:
        """Begin with nothing."""
        self.limits = limits
        self.images = 0
        """How many wait."""
        self._works: deque[Work] = deque()  # the one whose turn is next comes first
        self._busy = 0  # threads that have a batch
        self._taken = 0  # images of their batches
        self._pace = 0.0  # seconds that an instance takes for an image
        self._changed = threading.Condition()
        self._closed = False
        self._failed = False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits, and one thread at most has a batch."""
        return self._busy <= 1 and not self._works

    def put(self, work: Work) -> None:
        """Add the images of a call.

        Raises:
            Overloaded: Too many wait, or those of other calls would make these late.
            Draining: It has been closed.
            Unavailable: It has failed.
        """
        with self._changed:
            self._check_room(work)
            self._works.append(work)
            self.images += len(work.images)
            self._changed.notify(len(work.images))

    def withdraw(self, work: Work) -> None:
        """Take the images of a call out that nobody has taken."""
        with self._changed:
            if work in self._works:
                self._works.remove(work)
                self.images -= len(work.images) - work.next

    def take(self) -> list[tuple[Work, int]]:
        """Wait for images and take the share of one thread, which says `done` to it.

        Returns:
            Works and the number of an image in each; nothing when it has been closed and is empty.
        """
        batch: list[tuple[Work, int]] = []
        with self._changed:
            while not batch:
                while not self._works:
                    if self._closed:
                        return []
                    self._changed.wait()
                if self.limits.max_wait and (pause := self._pause()) > 0:
                    self._changed.wait(pause)
                    continue
                free = self.limits.instances - self._busy
                share = min(self.limits.max_batch, math.ceil(self.images / free))
                while self._works and len(batch) < share:
                    self._take_one(batch)
            self._busy += 1
            self._taken += len(batch)
        return batch

    def done(self, images: int, seconds: float, *, typical: bool = True) -> None:
        """Note that a thread is free again, and for a typical batch of so many images how long that took."""
        with self._changed:
            self._busy -= 1
            self._taken -= images
            if typical:
                self._pace += (SMOOTHING if self._pace else 1.0) * (seconds / images - self._pace)

    def close(self) -> None:
        """Take no more, and let threads end when it is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self) -> None:
        """Take no more, and let what waits fail."""
        with self._changed:
            self._failed = True
            works, self._works, self.images = self._works, deque(), 0
        for work in works:
            work.fail(failure())

    def _check_room(self, work: Work) -> None:
        if self._failed:
            raise failure()
        if self._closed:
            raise Draining("The server is stopping and takes no new work; try another one.")
        images, call = len(work.images), work.call
        if self.images + images > self.limits.capacity:
            raise Overloaded(
                f"{self.images} images wait, and {self.limits.capacity} is the most; try again later."
            )
        if call.deadline is None or not self.images:
            return
        # Calls take turns: one with few images waits for no more than as many of each other call.
        others = min(self.images, images * len(self._works))
        wait = MARGIN * (self._taken + others + images) * self._pace / self.limits.instances
        if wait > (left := call.deadline - time.monotonic()):
            raise Overloaded(
                f"{self.images} images wait, for about {wait:.2f} s, and the call has {left:.2f} s left; "
                "try again later, or give it more time.",
                retry_after=wait,
            )

    def _take_one(self, batch: list[tuple[Work, int]]) -> None:
        """Take an image of the call whose turn it is, or all that are left of one that nobody waits for."""
        work = self._works.popleft()
        if (gone := work.gone()) is not None:
            self.images -= len(work.images) - work.next
            work.fail(gone)
            return
        batch.append((work, work.next))
        self.images -= 1
        work.next += 1
        if work.next < len(work.images):
            self._works.append(work)

    def _pause(self) -> float:
        """Tell how many seconds a batch that is not full may wait for more."""
        if self._closed or self.images >= self.limits.max_batch:
            return 0.0
        return min(work.submitted for work in self._works) + self.limits.max_wait - time.monotonic()


def failure() -> Unavailable:
    """Make the error of a model that has failed."""
    return Unavailable("The server can embed no image any more; its log tells why. Start it again.")
