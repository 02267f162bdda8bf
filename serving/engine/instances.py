"""A model at work: threads that each take images that wait, decode them and run the model on them."""

import copy
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadImage, Draining, InvalidArgument, Mismatch, Overloaded, Unavailable
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.preprocess import MAX_BYTES, thumbnail
from serving.observability.call import Call

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder
    from serving.model.spec import ModelSpec

__all__ = ["Explanation", "InstanceLimits", "ModelInstances", "Outcome", "step_back"]

logger = logging.getLogger(__name__)

Outcome: TypeAlias = NDArray[np.float32] | Exception
"""A unit vector float32 (d,), or why there is none."""

NICENESS = 10
LOOK_SECONDS = 0.25
"""How often a call that waits looks whether anybody waits for it still."""
SMOOTHING = 0.2
MARGIN = 1.2
"""A wait is taken for so many times as long as it looks: a call that ends just too late is lost whole."""
EXPLAINED_AT_ONCE = 4


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


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What a model sees in an image."""

    histogram: NDArray[np.float32]
    """Share of each prototype, float32 (m,); sums to one."""
    assignments: NDArray[np.uint8]
    """The dominant prototype at each location, uint8 (h, w)."""


class _Work:
    """The images of one call, and what has become of each."""

    def __init__(self, images: "Sequence[bytes | NDArray[np.uint8]]", call: Call) -> None:
        self.images = images
        self.call = call
        self.submitted = time.monotonic()
        self.next = 0  # the image that is taken next
        self.outcomes: list[Any] = [None] * len(images)
        self._left = len(images)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def settle(self, number: int, outcome: Outcome) -> None:
        """Note what became of an image, the first time."""
        with self._lock:
            if self.outcomes[number] is not None:
                return
            self.outcomes[number] = outcome
            self._left -= 1
            if not self._left:
                self._done.set()

    def wait(self) -> list[Outcome]:
        """Wait until every image has an outcome.

        Raises:
            CrossbatchError: Nobody waits for them any more.
        """
        while not self._done.wait(self.call.remaining(LOOK_SECONDS)):
            self.call.check()
        return self.outcomes


class ModelInstances:
    """One model and the threads that run it.

    What waits is shared among the threads that are free. Calls take turns, an image each, so that one with
    many holds up none with few. On a CPU each thread runs the model by itself on one core; an image that is
    alone in the server gets all of them.
    """

    def __init__(
        self,
        name: str,
        encoder: "Encoder",
        limits: InstanceLimits,
        *,
        ran: Callable[[str, int, float], None] = lambda *_: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start nothing yet.

        Args:
            name: That the model is served by.
            encoder: The model.
            limits: How much is taken on at once.
            ran: Is told the name, the number of images and the seconds of each run.
            failed: Called once should no image be embedded any more.
        """
        self.name = name
        self.encoder = encoder
        self.spec: ModelSpec = encoder.spec
        self.limits = limits
        self._ran = ran
        self._failed = failed
        self._works: deque[_Work] = deque()
        self.waiting = 0
        """Images that wait."""
        self._busy = 0
        self._pace = 0.0  # seconds that an instance takes for an image
        self._changed = threading.Condition()
        self._stopping = False
        self._broken = False
        self._threads: list[threading.Thread] = []
        self._explaining = threading.Lock()
        self._decoding = threading.BoundedSemaphore(limits.instances)

    def start(self) -> None:
        """Warm the model up, then take images; blocks.

        Raises:
            CrossbatchError: The model cannot be run.
        """
        side = self.spec.image_size
        for threads, count in ((0, 1), (1, self.limits.max_batch)):
            self._encode(np.zeros((count, side, side, 3), np.uint8), threads)
        for number in range(self.limits.instances):
            thread = threading.Thread(target=self._live, name=f"{self.name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Refuse new images, finish those that wait, and end the threads; blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def embed(self, images: Sequence[bytes], call: Call) -> list[Outcome]:
        """Embed encoded images, each for itself; blocks.

        Returns:
            One unit vector float32 (d,) or exception an image, in order.

        Raises:
            Overloaded: Too many wait, or those of other calls would make them late.
            Draining: The model is stopping.
            Unavailable: The model can embed no image any more.
            CrossbatchError: Nobody waits for them any more.
        """
        return self._submit(images, call)

    def encode(self, pixels: NDArray[np.uint8], call: Call) -> list[Outcome]:
        """Embed images that are decoded already, uint8 (B, S, S, 3), RGB; else as `embed`.

        Raises:
            InvalidArgument: The pixels have another shape or type.
        """
        side = self.spec.image_size
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (side, side, 3):
            raise InvalidArgument(
                f"The model {self.name} takes images as uint8 (B, {side}, {side}, 3), and was given "
                f"{pixels.dtype} {pixels.shape}."
            )
        return self._submit(list(pixels), call)

    def explain(
        self, images: Sequence[bytes] | NDArray[np.uint8], call: Call
    ) -> list[Explanation | Exception]:
        """Tell which prototypes the model sees in each image, and where; blocks. One call at a time.

        Args:
            images: Encoded images, or pixels uint8 (B, S, S, 3), RGB.
            call: Takes up the times.

        Returns:
            One explanation or exception an image, in order.

        Raises:
            Mismatch: The model has no prototypes.
            CrossbatchError: Nobody waits for them any more.
        """
        if not self.spec.prototypes:
            raise Mismatch(
                f"The model {self.name} has no prototypes to explain images by; serve one that was trained "
                "with the XML loss."
            )
        began = time.monotonic()
        while not self._explaining.acquire(timeout=call.remaining(LOOK_SECONDS)):
            call.check()
        try:
            call.stages.spent("queue", began, time.monotonic() - began)
            found: list[Explanation | Exception] = []
            for start in range(0, len(images), EXPLAINED_AT_ONCE):
                found += self._explain(images[start : start + EXPLAINED_AT_ONCE], call)
            return found
        finally:
            self._explaining.release()

    def thumbnails(self, images: Sequence[bytes], side: int, call: Call) -> list[bytes | Exception]:
        """Make a small JPEG picture of each image, `side` pixels at its longer side; blocks.

        Returns:
            One picture or exception an image, in order.

        Raises:
            CrossbatchError: Nobody waits for them any more.
        """
        made: list[bytes | Exception] = []
        for image in images:
            while not self._decoding.acquire(timeout=call.remaining(LOOK_SECONDS)):
                call.check()
            try:
                call.check()
                made.append(_outcome(partial(thumbnail, image, side=side, most_bytes=MAX_THUMBNAIL_BYTES)))
            finally:
                self._decoding.release()
        return made

    def _submit(self, images: "Sequence[bytes | NDArray[np.uint8]]", call: Call) -> list[Outcome]:
        call.check()
        if not images:
            return []
        work = _Work(images, call)
        with self._changed:
            self._check_room(work)
            self._works.append(work)
            self.waiting += len(images)
            self._changed.notify(len(images))
        try:
            return work.wait()
        except BaseException:
            with self._changed:
                if work in self._works:
                    self._works.remove(work)
                    self.waiting -= len(images) - work.next
            raise

    def _check_room(self, work: _Work) -> None:
        """Refuse what has no place, or would only wait until it is too late."""
        if self._broken:
            raise _failure()
        if self._stopping or not self._threads:
            raise Draining("The server is stopping and takes no new work; try another one.")
        images, call = len(work.images), work.call
        if self.waiting + images > self.limits.capacity:
            raise Overloaded(
                f"{self.waiting} images wait, and {self.limits.capacity} is the most; try again later."
            )
        if call.deadline is None or not self.waiting:
            return
        # Calls take turns: one with few images waits for no more than as many of each other call.
        others = min(self.waiting, images * len(self._works))
        wait = MARGIN * (others + images) * self._pace / self.limits.instances
        if wait > (left := call.deadline - time.monotonic()):
            raise Overloaded(
                f"{self.waiting} images wait, for about {wait:.2f} s, and the call has {left:.2f} s left; "
                "try again later, or give it more time.",
                retry_after=wait,
            )

    def _live(self) -> None:
        """Take batch after batch, in a thread of its own, until told to stop."""
        batch: list[tuple[_Work, int]] = []
        try:
            step_back()
            while batch := self._take():
                self._run(batch)
                with self._changed:
                    self._busy -= 1
        except BaseException as error:
            self._break(error, batch)

    def _take(self) -> list[tuple[_Work, int]]:
        """Wait for images and take this thread's share; nothing when the model stops."""
        batch: list[tuple[_Work, int]] = []
        with self._changed:
            while not batch:
                while not self._works:
                    if self._stopping:
                        return []
                    self._changed.wait()
                if (pause := self._pause()) > 0:
                    self._changed.wait(pause)
                    continue
                free = self.limits.instances - self._busy
                share = min(self.limits.max_batch, math.ceil(self.waiting / free))
                while self._works and len(batch) < share:
                    work = self._works.popleft()
                    if (gone := _gone(work.call)) is not None:
                        self.waiting -= len(work.images) - work.next
                        for number in range(work.next, len(work.images)):
                            work.settle(number, gone)
                        continue
                    batch.append((work, work.next))
                    self.waiting -= 1
                    work.next += 1
                    if work.next < len(work.images):
                        self._works.append(work)
            self._busy += 1
        return batch

    def _pause(self) -> float:
        """Tell how many seconds a batch that is not full may wait for more."""
        if not self.limits.max_wait or self._stopping or self.waiting >= self.limits.max_batch:
            return 0.0
        oldest = min(work.submitted for work in self._works)
        return oldest + self.limits.max_wait - time.monotonic()

    def _run(self, batch: list[tuple[_Work, int]]) -> None:
        """Decode a batch and run the model on what can be decoded and is still waited for."""
        began = time.monotonic()
        for work, _ in batch:
            work.call.stages.spent("queue", work.submitted, began - work.submitted)
        decoded: list[NDArray[np.uint8]] = []
        owners: list[tuple[_Work, int]] = []
        for work, number in batch:
            pixels = self._pixels(work.images[number], work.call)
            if isinstance(pixels, Exception):
                work.settle(number, pixels)
            else:
                decoded.append(pixels)
                owners.append((work, number))
        gone = [_gone(work.call) for work, _ in owners]  # asked anew, as decoding takes time
        wanted = [row for row, reason in zip(decoded, gone, strict=True) if reason is None]
        alone = len(batch) == self._busy == 1 and not self._works
        started = time.monotonic()
        found = _outcome(lambda: self._encode(np.stack(wanted), 0 if alone else 1)) if wanted else []
        ended = time.monotonic()
        rows = itertools.repeat(found) if isinstance(found, Exception) else iter(found)
        for (work, number), reason in zip(owners, gone, strict=True):
            if reason is None:
                work.call.stages.spent("encode", started, ended - started)
            work.settle(number, _own(next(rows)) if reason is None else reason)
        if wanted:
            self._ran(self.name, len(wanted), ended - started)
        if not alone:  # by all cores it is quicker than any is under load
            pace = (ended - began) / len(batch)
            self._pace += (SMOOTHING if self._pace else 1.0) * (pace - self._pace)

    def _encode(self, images: NDArray[np.uint8], threads: int) -> NDArray[np.float32]:
        """Run the model on images (B, S, S, 3), on all cores where `threads` is 0."""
        if threads == 0 or self.limits.instances == 1 or self.encoder.device != "cpu":
            return self.encoder.encode(images)
        return self.encoder.encode(images, threads=threads)

    def _pixels(self, image: "bytes | NDArray[np.uint8]", call: Call) -> "NDArray[np.uint8] | Exception":
        if isinstance(image, np.ndarray):
            return image
        if (gone := _gone(call)) is not None:
            return gone
        began = time.monotonic()
        pixels: NDArray[np.uint8] | Exception = _outcome(lambda: _decoded(self.encoder, image))
        call.stages.spent("decode", began, time.monotonic() - began)
        return pixels

    def _explain(
        self, images: "Sequence[bytes] | NDArray[np.uint8]", call: Call
    ) -> list[Explanation | Exception]:
        call.check()
        decoded = [self._pixels(image, call) for image in images]
        good = [each for each in decoded if not isinstance(each, Exception)]
        if not good:
            return [each for each in decoded if isinstance(each, Exception)]
        began = time.monotonic()
        found = _outcome(lambda: self.encoder.run(np.stack(good), "histograms", "assignments"))
        call.stages.spent("encode", began, time.monotonic() - began)
        if isinstance(found, Exception):
            return [each if isinstance(each, Exception) else found for each in decoded]
        pairs: Iterator[Any] = zip(found["histograms"], found["assignments"], strict=True)
        return [each if isinstance(each, Exception) else Explanation(*next(pairs)) for each in decoded]

    def _break(self, error: BaseException, batch: list[tuple[_Work, int]]) -> None:
        """Leave nobody waiting for a model whose thread has died."""
        logger.critical("the model %s has failed and can embed no image any more", self.name, exc_info=error)
        with self._changed:
            first, self._broken = not self._broken, True
            waiting, self._works, self.waiting = self._works, deque(), 0
        for work in {*waiting, *(work for work, _ in batch)}:
            for number in range(len(work.images)):
                work.settle(number, _failure())
        if first:
            self._failed()


def _gone(call: Call) -> Exception | None:
    """Say why nobody waits for a call any more; None where somebody does."""
    try:
        call.check()
    except Exception as error:
        return error
    return None


def _own(outcome: Outcome) -> Outcome:
    """One exception for each image: a shared one would gather every thread's traceback."""
    if not isinstance(outcome, Exception):
        return outcome
    try:
        twin = copy.copy(outcome)
    except Exception:
        return outcome
    twin.__cause__ = outcome
    return twin


def _outcome(work: Callable[[], Any]) -> Any:
    """What work returns or raises: it is these images' alone, and `to_status` sorts out the bugs."""
    try:
        return work()
    except Exception as error:
        return error


def _decoded(encoder: "Encoder", image: bytes) -> NDArray[np.uint8]:
    if not image:
        raise BadImage(
            "The image is empty; send the bytes of a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file."
        )
    if len(image) > MAX_BYTES:
        raise BadImage(f"The image has {len(image):,} bytes and at most {MAX_BYTES:,} are read; shrink it.")
    return encoder.preprocess(image)


def _failure() -> Unavailable:
    return Unavailable("The server can embed no image any more; its log tells why. Start it again.")


def step_back() -> None:
    """Let the calling thread leave the cores to those that answer calls: a busy server has to refuse at once.

    Linux gives each thread a niceness of its own; elsewhere it would be the whole process.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
