"""The way of an image through the server: decode in threads, batch, encode."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.batcher import Batcher
from serving.errors import BadImage, DeadlineExceeded
from serving.rpc.limits import MAX_IMAGE_BYTES

__all__ = ["EncoderLike", "Outcome", "Pipeline", "SpecLike", "Stages", "check_size"]

Outcome: TypeAlias = NDArray[np.float32] | Exception
"""A unit vector float32 (d,), or why there is none."""


class SpecLike(Protocol):
    """What the server reads of a `serving.model.spec.ModelSpec`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def fp32_fingerprint(self) -> str | None: ...  # noqa: D102
    @property
    def dimension(self) -> int: ...  # noqa: D102
    @property
    def image_size(self) -> int: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102
    def model_dump_json(self) -> str: ...  # noqa: D102


class EncoderLike(Protocol):
    """What the server needs of a `serving.model.encoder.Encoder`."""

    @property
    def spec(self) -> SpecLike: ...  # noqa: D102

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        """Bytes of an encoded image to uint8 (S, S, 3); raises BadImage."""

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images uint8 (B, S, S, 3) to unit rows float32 (B, d)."""


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
    if len(image) > MAX_IMAGE_BYTES:
        raise BadImage(
            f"The image has {len(image):,} bytes and at most {MAX_IMAGE_BYTES:,} are read; shrink it."
        )


class Pipeline:
    """One encoder with its decoding threads and its batcher."""

    def __init__(
        self, encoder: EncoderLike, *, decode_threads: int, max_batch: int, max_wait: float, capacity: int
    ) -> None:
        """Store the limits.

        Args:
            encoder: Decodes single images and encodes batches.
            decode_threads: Threads that decode.
            max_batch: Most images in one run of the model.
            max_wait: Longest time in seconds that an image waits for company.
            capacity: Most decoded images that wait.

        Raises:
            ValueError: if a limit makes no sense.
        """
        self.encoder = encoder
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        self._batcher: Batcher[NDArray[np.uint8], NDArray[np.float32]] = Batcher(
            self._encode, max_batch=max_batch, max_wait=max_wait, capacity=capacity
        )
        self._warm_sizes = sorted({1, max_batch})

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
        """Finish what was accepted and end the threads."""
        await self._batcher.stop()
        self._decoders.shutdown(wait=True, cancel_futures=True)

    async def embed(self, images: Sequence[bytes], deadline: float | None, stages: Stages) -> list[Outcome]:
        """Embed each image for itself.

        Args:
            images: Encoded images, as many as have been admitted.
            deadline: The `time.monotonic()` after which nobody wants the result.
            stages: Takes up the times.

        Returns:
            One vector or exception an image, in order.

        Raises:
            asyncio.CancelledError: if the caller left; what has not begun is then not done.
        """
        return await asyncio.gather(*(self._embed_one(image, deadline, stages) for image in images))

    async def _embed_one(self, image: bytes, deadline: float | None, stages: Stages) -> Outcome:
        try:
            check_size(image)
            began = time.monotonic()
            loop = asyncio.get_running_loop()
            pixels = await loop.run_in_executor(self._decoders, self._decode, image, deadline)
            stages.decode = max(stages.decode, time.monotonic() - began)
            answer = await self._batcher.submit(pixels, deadline)
        except Exception as error:  # whatever it is, it is this image's alone; `to_status` sorts out the bugs
            return error
        stages.queue = max(stages.queue, answer.waited)
        stages.encode = max(stages.encode, answer.computed)
        return answer.result

    def _decode(self, image: bytes, deadline: float | None) -> NDArray[np.uint8]:
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("The deadline passed before the image was decoded.")
        return self.encoder.preprocess(image)

    def _encode(self, images: list[NDArray[np.uint8]]) -> list[NDArray[np.float32]]:
        """Images (S, S, 3) to rows (d,)."""
        return list(self.encoder.encode(np.stack(images)))
