"""The way of an image through the server: decode in threads, batch, encode."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.batcher import Batcher
from serving.errors import BadImage
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.preprocess import MAX_BYTES, thumbnail
from serving.rpc.work.workers import Workers

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder
    from serving.model.spec import ModelSpec

__all__ = ["Bounds", "Outcome", "Pipeline", "Stages", "check_size"]

Outcome: TypeAlias = NDArray[np.float32] | Exception
"""A unit vector float32 (d,), or why there is none."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a model's pipeline takes on at once."""

    max_batch: int
    """Most images in one run; 0 takes what a trial finds best."""
    max_wait: float
    """Longest time in seconds that an image waits for company."""
    capacity: int
    """Most images that wait to be decoded, and most that are decoded and wait for a model."""


@dataclass(slots=True)
class Stages:
    """Seconds that the slowest input of a call spent in each stage."""

    began: float = field(default_factory=time.monotonic)
    decode: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    gallery: float = 0.0


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
        self, name: str, encoder: "Encoder", decoders: Workers, bounds: Bounds, failed: Callable[[], None]
    ) -> None:
        """Store the limits.

        Args:
            name: That the model is served by.
            encoder: Decodes single images and encodes batches.
            decoders: Threads that decode.
            bounds: How much is taken on at once.
            failed: Called once, in the event loop, should no image be embedded any more.

        Raises:
            ValueError: if a limit makes no sense.
        """
        self.name = name
        self.encoder = encoder
        self._decoders = decoders
        max_batch = bounds.max_batch or 32
        self._batcher: Batcher[NDArray[np.uint8], NDArray[np.float32]] = Batcher(
            self._encode,
            max_batch=max_batch,
            max_wait=bounds.max_wait,
            capacity=bounds.capacity,
            failed=failed,
        )
        self._warm_sizes = sorted({1, max_batch})

    @property
    def spec(self) -> "ModelSpec":
        """What the model is."""
        return self.encoder.spec

    async def start(self) -> None:
        """Run the model once for the smallest and the largest batch, then accept images.

        Raises:
            CrossbatchError: if the model cannot be run.
        """
        size = self.encoder.spec.image_size
        for batch in self._warm_sizes:
            await asyncio.to_thread(self.encoder.encode, np.zeros((batch, size, size, 3), np.uint8))
        await self._batcher.start()

    async def stop(self) -> None:
        """Finish what was accepted."""
        await self._batcher.stop()

    async def embed(self, images: Sequence[bytes], deadline: float | None, stages: Stages) -> list[Outcome]:
        """Embed each image for itself.

        Args:
            images: Encoded images, as many as have been admitted.
            deadline: The `time.monotonic()` after which nobody wants the result.
            stages: Takes up the times.

        Returns:
            One vector or exception an image, in order.
        """
        return await asyncio.gather(*(self._embed_one(image, deadline, stages) for image in images))

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
        return await asyncio.gather(*(self._thumbnail_of(image, side, deadline) for image in images))

    async def _thumbnail_of(self, image: bytes, side: int, deadline: float | None) -> bytes | Exception:
        make = partial(thumbnail, image, side=side, most_bytes=MAX_THUMBNAIL_BYTES)
        try:
            return await self._decoders.run(deadline, make)
        except Exception as error:  # as in `_embed_one`
            return error

    async def _embed_one(self, image: bytes, deadline: float | None, stages: Stages) -> Outcome:
        try:
            check_size(image)
            began = time.monotonic()
            pixels = await self._decoders.run(deadline, self.encoder.preprocess, image)
            stages.decode = max(stages.decode, time.monotonic() - began)
            answer = await self._batcher.submit(pixels, deadline)
        except Exception as error:  # whatever it is, it is this image's alone; `to_status` sorts out the bugs
            return error
        stages.queue = max(stages.queue, answer.waited)
        stages.encode = max(stages.encode, answer.computed)
        return answer.result

    def _encode(self, images: list[NDArray[np.uint8]]) -> list[NDArray[np.float32]]:
        """Images (S, S, 3) to rows (d,)."""
        return list(self.encoder.encode(np.stack(images)))
