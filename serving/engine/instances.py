"""A model at work: images wait their turn for threads that decode them and run the model on them."""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.cores import lower_priority
from serving.errors import CrossbatchError, Draining, Mismatch, Overloaded, Unavailable
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.encoder import Encoder
from serving.model.preprocess import thumbnail
from serving.observability.call import Call

__all__ = ["InstanceLimits", "ModelInstances", "Outcome", "Prototypes", "permit"]

logger = logging.getLogger(__name__)

Image: TypeAlias = bytes | NDArray[np.uint8]
"""An image file, or its pixels uint8 (S, S, 3), RGB."""
Outcome: TypeAlias = NDArray[np.float32] | Exception
"""A unit vector float32 (d,), or why there is none."""
Prototypes: TypeAlias = tuple[NDArray[np.float32], NDArray[np.uint8]] | Exception
"""The share of each prototype in an image, float32 (m,), which sum to one, and the dominant one at each
location, uint8 (h, w); or why there are none."""

LOOK_SECONDS = 0.25  # how often a call that waits for a permit looks whether anybody waits for it still
SMOOTHING = 0.2
MARGIN = 1.2
"""A wait is taken for so many times as long as it looks: a call that ends just too late is lost whole."""
EXPLAINED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """How much a model takes on at once."""

    instances: int  # threads that decode and run the model, a batch each
    max_batch: int  # most images in one batch
    capacity: int  # most images that wait
    max_wait: float = 0.0  # longest time in seconds that an image waits for others to join it


@dataclass(slots=True, eq=False)
class Work:
    """The images of one call, and what has become of each."""

    images: Sequence[Image]
    call: Call
    taken: int = 0  # how many a thread has taken; the next one is that of this number
    submitted: float = field(default_factory=time.monotonic)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    unsettled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unsettled = list(range(len(self.images)))

    def settle(self, number: int, outcome: Outcome) -> None:
        """Note what became of an image; the first time counts."""
        first = self.outcomes.setdefault(number, outcome) is outcome
        if first and self.unsettled.pop() == 0:  # of several threads, one alone is the last
            self.call.news.put(None)


Batch: TypeAlias = list[tuple[Work, int]]
"""Works, and the number of an image in each."""


class WaitingImages:
    """A bounded queue that several threads take from: an image of each call in turn."""

    def __init__(self, limits: InstanceLimits) -> None:
        self.limits = limits
        self.images = 0
        """How many wait."""
        self.busy = 0
        """Threads that have a batch."""
        self._works: deque[Work] = deque()  # the one whose turn is next comes first
        self._taken = 0  # images in the batches that run
        self._pace = 0.0  # seconds that an instance takes for an image
        self._changed = threading.Condition()
        self._refusal: Callable[[], CrossbatchError] | None = None  # of those who come once it is closed

    def put(self, work: Work) -> None:
        """Add the images of a call; raises if there is no room, or no time until the call's deadline."""
        images, deadline = len(work.images), work.call.deadline
        with self._changed:
            if self._refusal:
                raise self._refusal()
            if self.images + images > self.limits.capacity:
                raise Overloaded(
                    f"{self.images} images wait, and {self.limits.capacity} is the most; try again later."
                )
            if deadline is not None and self.images:
                # Calls take turns: one with few images waits for no more than as many of each other call.
                ahead = self._taken + min(self.images, images * len(self._works))
                wait = MARGIN * (ahead + images) * self._pace / self.limits.instances
                if wait > (left := deadline - time.monotonic()):
                    raise Overloaded(
                        f"{self.images} images wait, for about {wait:.2f} s, and the call has {left:.2f} s "
                        "left; try again later, or give it more time.",
                        retry_after=wait,
                    )
            self._works.append(work)
            self.images += images
            self._changed.notify(images)

    def withdraw(self, work: Work) -> None:
        """Take out the images of a call that no thread has taken."""
        with self._changed:
            if work in self._works:
                self._works.remove(work)
                self.images -= len(work.images) - work.taken

    def take(self) -> Batch:
        """Wait for images and take a thread's share of them; nothing once it is closed and empty."""
        batch: Batch = []
        with self._changed:
            while not self._works or (pause := self._pause()) > 0:
                if not self._works and self._refusal:
                    return batch
                self._changed.wait(pause if self._works else None)
            share = math.ceil(self.images / (self.limits.instances - self.busy))
            while self._works and len(batch) < min(share, self.limits.max_batch):
                work = self._works.popleft()
                batch.append((work, work.taken))
                work.taken += 1
                if work.taken < len(work.images):
                    self._works.append(work)
            self.images -= len(batch)
            self._taken += len(batch)
            self.busy += 1
        return batch

    def done(self, images: int, pace: float | None) -> None:
        """Note that a thread is free again, and how many seconds an image took it, if that was typical."""
        with self._changed:
            self.busy -= 1
            self._taken -= images
            if pace is not None:
                self._pace += (SMOOTHING if self._pace else 1.0) * (pace - self._pace)

    def close(self, refusal: Callable[[], CrossbatchError]) -> None:
        """Take no more, and let the threads end when it is empty."""
        with self._changed:
            self._refusal = refusal
            self._changed.notify_all()

    def _pause(self) -> float:
        """Tell how many seconds a batch that is not full may wait for more."""
        if self._refusal or not self.limits.max_wait or self.images >= self.limits.max_batch:
            return 0.0
        return min(work.submitted for work in self._works) + self.limits.max_wait - time.monotonic()


class ModelInstances:
    """One model and the threads that run it; every method may be called from several threads at once.

    On a CPU each thread runs the model by itself on one core; an image that is alone in the server gets all
    of them.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        limits: InstanceLimits,
        *,
        ran: Callable[[str, int, float], None] = lambda *_: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start nothing yet; `ran` is told the name, the images and the seconds of each run of the model."""
        self.name, self.encoder, self.spec = name, encoder, encoder.spec
        self._limits, self._ran, self._failed = limits, ran, failed
        self._queue = WaitingImages(limits)
        self._threads: list[threading.Thread] = []
        self._gpu = threading.Lock()
        self._explaining = threading.BoundedSemaphore()
        self._shrinking = threading.BoundedSemaphore(limits.instances)

    @property
    def waiting(self) -> int:
        """Images that wait."""
        return self._queue.images

    def start(self) -> None:
        """Warm the model up, then take images; raises if it cannot be run."""
        side = self.spec.image_size
        for count, all_cores in ((1, True), (self._limits.max_batch, False)):
            self._encode(np.zeros((count, side, side, 3), np.uint8), all_cores=all_cores)
        for number in range(self._limits.instances):
            thread = threading.Thread(target=self._live, name=f"{self.name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Refuse new images, finish those that wait, and end the threads."""
        self._queue.close(_stopping)
        for thread in self._threads:
            thread.join()

    def embed(self, images: Sequence[Image], call: Call) -> list[Outcome]:
        """Embed images, each for itself: one outcome an image, in order.

        Overloaded tells that too many wait, or that those of other calls would make them late.
        """
        call.check()
        if not images:
            return []
        work = Work(images, call)
        self._queue.put(work)
        try:
            call.wait()
        except BaseException:
            self._queue.withdraw(work)
            raise
        return [work.outcomes[number] for number in range(len(images))]

    def explain(self, images: Sequence[Image], call: Call) -> list[Prototypes]:
        """Tell which prototypes the model sees in each image, and where; raises Mismatch if it has none."""
        if not self.spec.prototypes:
            raise Mismatch(
                f"The model {self.name} has no prototypes to explain images by; serve one that was trained "
                "with the XML loss."
            )
        began = time.monotonic()
        with permit(self._explaining, call):
            call.stages.spent("queue", began, time.monotonic() - began)
            found: list[Prototypes] = []
            for start in range(0, len(images), EXPLAINED_AT_ONCE):
                call.check()
                found += self._explained(images[start : start + EXPLAINED_AT_ONCE], call)
            return found

    def thumbnails(self, images: Sequence[bytes], side: int, call: Call) -> list[bytes | Exception]:
        """Make a small JPEG picture of each image, `side` pixels at its longer side."""
        made: list[bytes | Exception] = []
        for image in images:
            with permit(self._shrinking, call):
                try:
                    made.append(thumbnail(image, side=side, most_bytes=MAX_THUMBNAIL_BYTES))
                except Exception as error:  # whatever it is, it is this image's alone
                    made.append(error)
        return made

    def _live(self) -> None:
        """Take batch after batch, in a thread of its own, until told to stop."""
        batch: Batch = []
        try:
            lower_priority()  # a busy server refuses at once
            while batch := self._queue.take():
                self._run(batch)
        except BaseException as error:
            logger.critical("the model %s can embed no image any more", self.name, exc_info=error)
            self._queue.close(_failure)
            while batch:  # and all that wait
                for work, number in batch:
                    work.settle(number, _failure())
                self._queue.done(len(batch), None)
                batch = self._queue.take()
            self._failed()

    def _run(self, batch: Batch) -> None:
        """Decode a batch, and run the model on what can be decoded and is still waited for."""
        began = time.monotonic()
        ready: list[tuple[NDArray[np.uint8], Work, int]] = []
        for work, number in batch:
            work.call.stages.spent("queue", work.submitted, began - work.submitted)
            pixels = self._decoded(work.images[number], work.call)
            if isinstance(pixels, Exception):
                work.settle(number, pixels)
            else:
                ready.append((pixels, work, number))
        alone = len(batch) == 1 == self._queue.busy and not self._queue.images
        started = time.monotonic()
        found: Sequence[Outcome] = ()
        try:
            if ready:
                found = list(self._encode(np.stack([pixels for pixels, _, _ in ready]), all_cores=alone))
        except Exception as error:  # whatever it is, it is theirs alone
            found = [error] * len(ready)
        ended = time.monotonic()
        # On all cores it is quicker than any image is under load.
        typical = len(ready) == len(batch) and not alone
        self._queue.done(len(batch), (ended - began) / len(batch) if typical else None)
        for (_, work, number), outcome in zip(ready, found, strict=True):
            work.call.stages.spent("encode", started, ended - started)
            work.settle(number, outcome)
        if ready:
            self._ran(self.name, len(ready), ended - started)

    def _encode(self, images: NDArray[np.uint8], *, all_cores: bool) -> NDArray[np.float32]:
        """Run the model on images (B, S, S, 3)."""
        if self.encoder.on_gpu:
            with self._gpu:
                return self.encoder.encode(images)
        return self.encoder.encode(images, threads=0 if all_cores or self._limits.instances == 1 else 1)

    def _decoded(self, image: Image, call: Call) -> NDArray[np.uint8] | Exception:
        """Return the pixels of an image, or why they cannot be had or nobody waits for them any more."""
        try:
            call.check()
            if isinstance(image, np.ndarray):
                return image
            began = time.monotonic()
            try:
                pixels = self.encoder.preprocess(image)
            finally:
                call.stages.spent("decode", began, time.monotonic() - began)
            call.check()  # anew, as decoding takes time
        except CrossbatchError as error:
            # Tracebacks lead to frames that hold the image, and from there back to the error.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except Exception as error:  # whatever it is, it is this image's alone
            return error
        return pixels

    def _explained(self, images: Sequence[Image], call: Call) -> list[Prototypes]:
        decoded = [self._decoded(image, call) for image in images]
        good = [each for each in decoded if not isinstance(each, Exception)]
        began = time.monotonic()
        explained: Iterator[Prototypes] = iter(())
        try:
            if good:
                with self._gpu if self.encoder.on_gpu else nullcontext():
                    found = self.encoder.run(np.stack(good), "histograms", "assignments")
                explained = zip(found["histograms"], found["assignments"], strict=True)
        except Exception as error:  # whatever it is, it is theirs alone
            explained = itertools.repeat(error)
        call.stages.spent("encode", began, time.monotonic() - began)
        return [each if isinstance(each, Exception) else next(explained) for each in decoded]


@contextmanager
def permit(permits: threading.BoundedSemaphore, call: Call) -> Iterator[None]:
    """Wait for a permit as long as somebody waits for the call, and hold it."""
    call.check()
    while not permits.acquire(timeout=call.remaining(LOOK_SECONDS)):
        call.check()
    try:
        yield
    finally:
        permits.release()


def _stopping() -> CrossbatchError:
    return Draining("The server is stopping and takes no new work; try another one.")


def _failure() -> CrossbatchError:
    return Unavailable("The server can embed no image any more; its log tells why. Start it again.")
