"""A model in another server's process: decoding in threads and ONNX Runtime, set as crossbatch sets them.

It runs in that server's own virtual environment and needs of crossbatch the preprocessing only.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from serving.model.preprocess import preprocess

__all__ = ["OnnxModel", "Order"]


@dataclass(frozen=True)
class Order:
    """What such a server is to serve, and how."""

    model: str
    """The ONNX file."""
    threads: int
    """Of a run, and that decode."""
    size: int
    crop_fraction: float
    resampling: str
    encoded: bool
    """Whether it takes encoded images; else uint8 (S, S, 3)."""
    max_batch: int
    delay_ms: float
    """Longest wait for a batch to fill."""
    workers: int = 0
    """Processes that run the model, where the server has a choice."""

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        """Read it again."""
        return cls(**json.loads(text))


class OnnxModel:
    """Encoded images, or pixels, to embeddings."""

    def __init__(self, order: Order) -> None:
        """Load it and run it once."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = order.threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # the faster one on few cores
        self._session = onnxruntime.InferenceSession(order.model, options, providers=["CPUExecutionProvider"])
        self._order = order
        self._decoders = ThreadPoolExecutor(order.threads)
        for batch in sorted({1, order.max_batch}):
            self.embed_pixels(np.zeros((batch, order.size, order.size, 3), np.uint8))

    def embed(self, images: Sequence[bytes]) -> NDArray[np.float32]:
        """Return the embeddings of encoded images, float32 (B, d)."""
        return self.embed_pixels(np.stack(list(self._decoders.map(self._decoded, images))))

    def embed_pixels(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the embeddings of uint8 (B, S, S, 3), float32 (B, d)."""
        found: NDArray[np.float32]
        (found,) = self._session.run(["embeddings"], {"images": pixels})
        return found

    def _decoded(self, image: bytes) -> NDArray[np.uint8]:
        order = self._order
        return preprocess(
            image, size=order.size, crop_fraction=order.crop_fraction, resampling=order.resampling
        )
