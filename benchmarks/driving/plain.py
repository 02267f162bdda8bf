"""What a server is compared with: the same images decoded and embedded in a loop in this process."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.driving.figures import percentile
from serving.model.encoder import Encoder

__all__ = ["BATCHES", "Plain"]

BATCHES: Final = (1, 4, 8, 16, 32, 64)


class Plain:
    """Decodes in a pool of threads and runs ONNX Runtime, with nothing between the two."""

    def __init__(self, encoder: Encoder, images: Sequence[bytes], *, threads: int) -> None:
        """Keep what is embedded over and over.

        Args:
            encoder: The model, with as many threads.
            images: Encoded images.
            threads: That decode.
        """
        self.encoder = encoder
        self.images = images
        self.batch, self.ahead = BATCHES[-1], True
        self._pool = ThreadPoolExecutor(threads)

    def tune(self, seconds: float) -> None:
        """Take the batch that is fastest, and whether to decode the next one while one is run.

        Args:
            seconds: That each is tried.
        """
        tried = []
        for self.batch, self.ahead in itertools.product(BATCHES, (False, True)):
            self.rate(0.0)  # the first run of a new size is slower
            tried.append((self.rate(seconds), self.batch, self.ahead))
        _, self.batch, self.ahead = max(tried)

    def rate(self, seconds: float) -> float:
        """Return the images a second, of whole batches for so long; one batch at least."""
        images = itertools.cycle(self.images)
        waiting: deque[Future[NDArray[np.uint8]]] = deque()
        done, began = 0, time.perf_counter()
        while not done or time.perf_counter() - began < seconds:
            while len(waiting) < self.batch * (2 if self.ahead else 1):
                waiting.append(self._pool.submit(self.encoder.preprocess, next(images)))
            pixels = [waiting.popleft().result() for _ in range(self.batch)]
            done += len(self.encoder.encode(np.stack(pixels)))
        rate = done / (time.perf_counter() - began)
        for each in waiting:
            each.cancel()
        return rate

    def latency(self, seconds: float) -> float:
        """Return the median of the seconds that one image takes, one after another."""
        taken: list[float] = []
        began = time.perf_counter()
        for image in itertools.cycle(self.images):
            start = time.perf_counter()
            self.encoder.encode(self.encoder.preprocess(image)[np.newaxis])
            taken.append(time.perf_counter() - start)
            if time.perf_counter() - began >= seconds:
                return percentile(taken, 50)
        raise ValueError("there are no images")

    def embed(self, images: Sequence[bytes]) -> NDArray[np.float32]:
        """Return the embeddings of images, float32 (B, d)."""
        return self.encoder.encode(np.stack([self.encoder.preprocess(image) for image in images]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
