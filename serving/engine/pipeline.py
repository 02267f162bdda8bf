"""The way of an image through the server: decode in threads, batch, encode."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.engine.batcher import Batcher
from serving.engine.explanation import Explanation, explained_at
from serving.engine.plan import Plan
from serving.engine.priority import step_back
from serving.engine.queue_time import Place, QueueTime
from serving.engine.runs import Runs
from serving.engine.trial import best_plan, warm_up
from serving.engine.workers import Threads
from serving.errors import BadImage, InvalidArgument, Mismatch
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.preprocess import MAX_BYTES, thumbnail
from serving.observability.call import Stages

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder
    from serving.model.spec import ModelSpec
    from serving.observability.metrics import Metrics

__all__ = ["Bounds", "Outcome", "Pipeline", "check_size"]

_EXPLAINED_AT_ONCE = 4

Outcome: TypeAlias = NDArray[np.float32] | Exception
"""A unit vector float32 (d,), or why there is none."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a model's pipeline takes on at once."""

    max_batch: int
    """Most images in one run; 0 takes what a trial finds best."""
    max_wait: float
    """Longest time in seconds that an image waits for one that is being decoded."""
    capacity: int
    """Most images that wait to be decoded, and most that are decoded and wait for a model."""
    plan: Plan | None = None
    """How a model is run; found out when None."""


def check_size(image: bytes) -> None:
    """Refuse an image by its bytes alone, before anything is spent on it.

    Raises:
        BadImage: if it is empty or too large.
    """
    if not image:
        raise BadImage(
            "The image is empty; send the bytes of a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file."
        )
    if len(image) > MAX_BYTES:
        raise BadImage(f"The image has {len(image):,} bytes and at most {MAX_BYTES:,} are read; shrink it.")


class Pipeline:
    """One model with its batcher; the threads that decode are those of all models."""

    def __init__(
        self,
        name: str,
        encoder: "Encoder",
        threads: Threads,
        bounds: Bounds,
        *,
        metrics: "Metrics",
        failed: Callable[[], None],
    ) -> None:
        """Store the limits.

        Args:
            name: That the model is served by.
            encoder: Decodes single images and encodes batches.
            threads: Those that all models share.
            bounds: How much is taken on at once.
            metrics: Is told of each run.
            failed: Called once, in the event loop, should no image be embedded any more.

        Raises:
            ValueError: if a limit makes no sense.
        """
        self.plan = bounds.plan or Plan(bounds.max_batch or 1)
        self.name = name
        self.encoder = encoder
        self.spec: ModelSpec = encoder.spec
        self._threads = threads
        self.queue_time = QueueTime()
        self._bounds = bounds
        self._runs = Runs(encoder, self.plan, partial(metrics.batch, name))
        self.batcher: Batcher[NDArray[np.uint8], NDArray[np.float32]] = Batcher(
            # Without this object, so that the model's memory is free as soon as nobody has the object.
            self._runs,
            max_batch=self.plan.max_batch,
            max_wait=bounds.max_wait,
            capacity=bounds.capacity,
            begin=step_back,
            failed=failed,
        )

    async def start(self) -> None:
        """Warm the model up, find out how it is best run if that is not known, then accept images.

        Raises:
            CrossbatchError: if the model cannot be run.
        """
        bounds, encoder = self._bounds, self.encoder
        if bounds.plan is None:
            self.plan = await self._threads.load(best_plan, self.name, encoder, bounds.max_batch)
        else:
            self.plan = bounds.plan
        await self._threads.load(warm_up, encoder, self.plan)
        self._runs.plan = self.plan
        self.batcher.max_batch, self.batcher.lanes = self.plan.max_batch, self.plan.lanes
        await self.batcher.start()

    async def stop(self) -> None:
        """Finish what was accepted."""
        await self.batcher.stop()

    async def embed(self, images: Sequence[bytes], deadline: float | None, stages: Stages) -> list[Outcome]:
        """Embed each image for itself.

        Args:
            images: Encoded images, as many as have been admitted.
            deadline: The `time.monotonic()` after which nobody wants the result.
            stages: Takes up the times.

        Returns:
            One vector or exception an image, in order.

        Raises:
            Overloaded: if those of other calls would make them late.
        """
        with self.queue_time.place(len(images), deadline) as place:
            call = _Call(deadline, stages, asyncio.Semaphore(self._threads.window), place)
            if len(images) == 1:  # as most calls have it, and needs no task of its own
                return [await self._embed_one(images[0], call)]
            return await asyncio.gather(*(self._embed_one(image, call) for image in images))

    async def encode(
        self, pixels: NDArray[np.uint8], deadline: float | None, stages: Stages
    ) -> list[Outcome]:
        """Embed images that are decoded already, each for itself, in batches with those of other calls.

        Args:
            pixels: uint8 (B, S, S, 3), RGB, as many as have been admitted.
            deadline: The `time.monotonic()` after which nobody wants the result.
            stages: Takes up the times.

        Returns:
            One vector or exception an image, in order.

        Raises:
            InvalidArgument: if the pixels have another shape or type.
            Overloaded: if those of other calls would make them late.
        """
        side = self.spec.image_size
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (side, side, 3):
            raise InvalidArgument(
                f"The model {self.name} takes images as uint8 (B, {side}, {side}, 3), and was given "
                f"{pixels.dtype} {pixels.shape}."
            )
        with self.queue_time.place(len(pixels), deadline) as place:
            call = _Call(deadline, stages, asyncio.Semaphore(self._threads.window), place)
            return await asyncio.gather(*(self._encode_one(image, call) for image in pixels))

    async def explain(
        self, images: Sequence[bytes] | NDArray[np.uint8], deadline: float | None, stages: Stages
    ) -> list[Explanation | Exception]:
        """Tell which prototypes the model sees in each image, and where.

        What this needs of the model is loaded the first time, and shares no batch with what is embedded; few
        ask for it, so that one thread does for all.

        Args:
            images: Encoded images, or pixels uint8 (B, S, S, 3), RGB, as many as have been admitted.
            deadline: The `time.monotonic()` after which nobody wants the result.
            stages: Takes up the times.

        Returns:
            One explanation or exception an image, in order.

        Raises:
            Mismatch: if the model has no prototypes.
        """
        if not self.spec.prototypes:
            raise Mismatch(
                f"The model {self.name} has no prototypes to explain images by; serve one that was trained "
                "with the XML loss."
            )
        call = _Call(deadline, stages, asyncio.Semaphore(self._threads.window))
        found: list[Explanation | Exception] = []
        for start in range(0, len(images), _EXPLAINED_AT_ONCE):
            some = images[start : start + _EXPLAINED_AT_ONCE]
            found += await self._explain_some(some, call)
        return found

    async def thumbnails(
        self, images: Sequence[bytes], side: int, deadline: float | None
    ) -> list[bytes | Exception]:
        """Make a small JPEG picture of each image, in the threads that decode.

        Args:
            images: Encoded images, as many as have been admitted.
            side: Of the pictures, the longer one, in pixels.
            deadline: The `time.monotonic()` after which nobody wants the result.

        Returns:
            One picture or exception an image, in order.
        """
        call = _Call(deadline, Stages(), asyncio.Semaphore(self._threads.window))
        return await asyncio.gather(*(self._thumbnail_of(image, side, call) for image in images))

    async def _thumbnail_of(self, image: bytes, side: int, call: "_Call") -> bytes | Exception:
        make = partial(thumbnail, image, side=side, most_bytes=MAX_THUMBNAIL_BYTES)
        try:
            async with call.window:
                return await self._threads.decode.run(call.deadline, make)
        except Exception as error:  # as in `_decode`
            return error

    async def _embed_one(self, image: bytes, call: "_Call") -> Outcome:
        with self.batcher.expecting():
            pixels = await self._decode(image, call)
        if isinstance(pixels, Exception):
            return pixels
        return await self._encode_one(pixels, call)

    async def _decode(self, image: bytes, call: "_Call") -> NDArray[np.uint8] | Exception:
        began = time.monotonic()
        try:
            check_size(image)
            async with call.window:
                pixels = await self._threads.decode.run(call.deadline, self.encoder.preprocess, image)
        except Exception as error:  # whatever it is, it is this image's alone; `to_status` sorts out the bugs
            return error
        call.stages.spent("decode", began, time.monotonic() - began)
        return pixels

    async def _encode_one(self, pixels: NDArray[np.uint8], call: "_Call") -> Outcome:
        submitted = time.monotonic()
        try:
            answer = await self.batcher.submit(pixels, call.deadline, flow=call)
        except Exception as error:  # as in `_decode`
            return error
        call.stages.spent("queue", submitted, answer.waited)
        call.stages.spent("encode", submitted + answer.waited, answer.computed)
        if call.place is not None:
            call.place.embedded()
        return answer.result

    async def _explain_some(
        self, images: Sequence[bytes] | NDArray[np.uint8], call: "_Call"
    ) -> list[Explanation | Exception]:
        decoded: Sequence[NDArray[np.uint8] | Exception]
        if isinstance(images, np.ndarray):
            decoded = list(images)
        else:
            decoded = await asyncio.gather(*(self._decode(image, call) for image in images))
        good = [each for each in decoded if not isinstance(each, Exception)]
        explained: Iterator[Explanation | Exception] = iter(())
        if good:
            began = time.monotonic()
            explain = partial(explained_at, self.encoder, np.stack(good))
            try:
                found, started, took = await self._threads.explain.run(call.deadline, explain)
            except Exception as error:  # as in `_decode`
                explained = repeat(error)
            else:
                explained = iter(found)
                call.stages.spent("queue", began, started - began)
                call.stages.spent("encode", started, took)
        return [each if isinstance(each, Exception) else next(explained) for each in decoded]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call on its way, which takes turns with the others."""

    deadline: float | None
    stages: Stages
    window: asyncio.Semaphore
    place: Place | None = None
    """Among the images that wait for the model."""
