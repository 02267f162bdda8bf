"""A model at work: threads that each take images that wait, decode them and run the model on them."""

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.engine.waiting import LOOK_SECONDS, InstanceLimits, Outcome, WaitingImages, Work, failure
from serving.errors import BadImage, InvalidArgument, Mismatch
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.preprocess import MAX_BYTES, thumbnail
from serving.observability.call import Call

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder
    from serving.model.spec import ModelSpec

__all__ = ["Explanation", "ModelInstances", "step_back"]

logger = logging.getLogger(__name__)

NICENESS = 10
EXPLAINED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What a model sees in an image."""

    histogram: NDArray[np.float32]
    """Share of each prototype, float32 (m,); sums to one."""
    assignments: NDArray[np.uint8]
    """The dominant prototype at each location, uint8 (h, w)."""


class ModelInstances:
    """One model and the threads that run it; every method may be called from several threads at once.

    What waits is shared among the threads that are free. On a CPU each runs the model by itself on one core;
    an image that is alone in the server gets all of them.
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
        self._limits = limits
        self._ran = ran
        self._failed = failed
        self._queue = WaitingImages(limits)
        self._threads: list[threading.Thread] = []
        self._gpu = threading.Lock()
        self._explaining = threading.BoundedSemaphore()
        self._decoding = threading.BoundedSemaphore(limits.instances)

    @property
    def waiting(self) -> int:
        """Images that wait."""
        return self._queue.images

    def start(self) -> None:
        """Warm the model up, then take images.

        Raises:
            CrossbatchError: The model cannot be run.
        """
        side = self.spec.image_size
        for threads, count in ((0, 1), (1, self._limits.max_batch)):
            self._encode(np.zeros((count, side, side, 3), np.uint8), threads)
        for number in range(self._limits.instances):
            thread = threading.Thread(target=self._live, name=f"{self.name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Refuse new images, finish those that wait, and end the threads."""
        self._queue.close()
        for thread in self._threads:
            thread.join()

    def embed(self, images: Sequence[bytes], call: Call) -> list[Outcome]:
        """Embed encoded images, each for itself.

        Returns:
            One unit vector float32 (d,) or exception an image, in order.

        Raises:
            Overloaded: Too many wait, or those of other calls would make them late.
            Draining: The model is stopping.
            Unavailable: The model can embed no image any more.
            CrossbatchError: Nobody waits for them any more.
        """
        return self._outcomes(images, call)

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
        return self._outcomes(list(pixels), call)

    def explain(
        self, images: Sequence[bytes] | NDArray[np.uint8], call: Call
    ) -> list[Explanation | Exception]:
        """Tell which prototypes the model sees in each image, and where; one call at a time.

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
        _acquire(self._explaining, call)
        try:
            call.stages.spent("queue", began, time.monotonic() - began)
            found: list[Explanation | Exception] = []
            for start in range(0, len(images), EXPLAINED_AT_ONCE):
                call.check()
                found += self._explained(images[start : start + EXPLAINED_AT_ONCE], call)
            return found
        finally:
            self._explaining.release()

    def thumbnails(self, images: Sequence[bytes], side: int, call: Call) -> list[bytes | Exception]:
        """Make a small JPEG picture of each image, `side` pixels at its longer side.

        Returns:
            One picture or exception an image, in order.

        Raises:
            CrossbatchError: Nobody waits for them any more.
        """
        made: list[bytes | Exception] = []
        for image in images:
            _acquire(self._decoding, call)
            try:
                made.append(thumbnail(image, side=side, most_bytes=MAX_THUMBNAIL_BYTES))
            except Exception as error:  # whatever it is, it is this image's; `to_status` sorts out the bugs
                made.append(error)
            finally:
                self._decoding.release()
        return made

    def _outcomes(self, images: Sequence[bytes | NDArray[np.uint8]], call: Call) -> list[Outcome]:
        call.check()
        if not images:
            return []
        work = Work(images, call)
        self._queue.put(work)
        try:
            return work.wait()
        except BaseException:
            self._queue.withdraw(work)
            raise

    def _live(self) -> None:
        """Take batch after batch, in a thread of its own, until told to stop."""
        batch: list[tuple[Work, int]] = []
        try:
            step_back()
            while batch := self._queue.take():
                self._run(batch)
        except BaseException as error:
            logger.critical("the model %s can embed no image any more", self.name, exc_info=error)
            self._queue.fail()
            for work, _ in batch:
                work.fail(failure())
            self._failed()

    def _run(self, batch: list[tuple[Work, int]]) -> None:
        """Decode a batch and run the model on what can be decoded and is still waited for."""
        began = time.monotonic()
        for work, _ in batch:
            work.call.stages.spent("queue", work.submitted, began - work.submitted)
        wanted: list[tuple[NDArray[np.uint8], Work, int]] = []
        decoded = [self._pixels(work.images[number], work.call) for work, number in batch]
        for (work, number), pixels in zip(batch, decoded, strict=True):
            if isinstance(pixels, Exception):
                work.settle(number, pixels)
            elif (gone := work.gone()) is not None:  # asked anew, as decoding takes time
                work.settle(number, gone)
            else:
                wanted.append((pixels, work, number))
        alone = len(batch) == 1 and self._queue.is_quiet
        started = time.monotonic()
        found: Sequence[Outcome]
        try:
            rows = [pixels for pixels, _, _ in wanted]
            found = list(self._encode(np.stack(rows), 0 if alone else 1)) if rows else []
        except Exception as error:  # whatever it is, it is theirs alone
            found = [error] * len(wanted)
        ended = time.monotonic()
        # By all cores it is quicker than any image is under load.
        self._queue.done(len(batch), ended - began, typical=not alone)
        for (_, work, number), outcome in zip(wanted, found, strict=True):
            work.call.stages.spent("encode", started, ended - started)
            work.settle(number, outcome)
        if wanted:
            self._ran(self.name, len(wanted), ended - started)

    def _encode(self, images: NDArray[np.uint8], threads: int) -> NDArray[np.float32]:
        """Run the model on images (B, S, S, 3), on all cores where `threads` is 0."""
        if self.encoder.device != "cpu":
            with self._gpu:  # runs side by side would each take memory of it
                return self.encoder.encode(images)
        if threads == 0 or self._limits.instances == 1:
            return self.encoder.encode(images)
        return self.encoder.encode(images, threads=threads)

    def _pixels(self, image: bytes | NDArray[np.uint8], call: Call) -> NDArray[np.uint8] | Exception:
        """Decode an image that is not decoded yet; returns why it cannot be, or need not."""
        if isinstance(image, np.ndarray):
            return image
        began = time.monotonic()
        try:
            call.check()
            _check_size(image)
            pixels = self.encoder.preprocess(image)
        except Exception as error:  # whatever it is, it is this image's alone
            return error
        call.stages.spent("decode", began, time.monotonic() - began)
        return pixels

    def _explained(
        self, images: Sequence[bytes] | NDArray[np.uint8], call: Call
    ) -> list[Explanation | Exception]:
        decoded = [self._pixels(image, call) for image in images]
        good = [each for each in decoded if not isinstance(each, Exception)]
        began = time.monotonic()
        explained: Iterator[Explanation | Exception] = iter(())
        try:
            if good:
                found = self.encoder.run(np.stack(good), "histograms", "assignments")
                explained = map(Explanation, found["histograms"], found["assignments"])
        except Exception as error:  # whatever it is, it is theirs alone
            explained = itertools.repeat(error)
        call.stages.spent("encode", began, time.monotonic() - began)
        return [each if isinstance(each, Exception) else next(explained) for each in decoded]


def step_back() -> None:
    """Let the calling thread leave the cores to those that answer calls: a busy server has to refuse at once.

    Linux gives each thread a niceness of its own; elsewhere it would be the whole process.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _acquire(permits: threading.BoundedSemaphore, call: Call) -> None:
    """Wait for a permit as long as somebody waits for the call."""
    call.check()
    while not permits.acquire(timeout=call.remaining(LOOK_SECONDS)):
        call.check()


def _check_size(image: bytes) -> None:
    """Refuse an image by its bytes alone, before anything is spent on it."""
    if not image:
        raise BadImage(
            "The image is empty; send the bytes of a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file."
        )
    if len(image) > MAX_BYTES:
        raise BadImage(f"The image has {len(image):,} bytes and at most {MAX_BYTES:,} are read; shrink it.")
