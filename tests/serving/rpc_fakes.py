"""A deterministic encoder without a model, and a real server around it on a loopback port."""

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.engine.repository import ModelFile, ModelRepository
from serving.errors import BadImage, InvalidArgument
from serving.model.preprocess import MAX_BYTES
from serving.server.server import Server
from serving.settings import Settings

DIMENSION = 8
SIZE = 4


@dataclass(frozen=True)
class FakeSpec:
    name: str = "fake"
    fingerprint: str = "a" * 64
    fp32_fingerprint: str = "a" * 64
    dimension: int = DIMENSION
    image_size: int = SIZE
    precision: str = "fp32"
    prototypes: int = 0
    grid: tuple[int, int] | None = None

    def model_dump_json(self) -> str:
        return '{"name": "fake"}'


def vector_for(image: bytes) -> NDArray[np.float32]:
    """The unit vector (d,) that the fake encoder gives to these bytes."""
    vector = np.random.default_rng(zlib.crc32(image)).normal(size=DIMENSION)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def explanation_for(checksum: int, prototypes: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The histogram (m,) and the assignments (2, 3) that the fake encoder gives to bytes of this CRC-32."""
    shares = np.random.default_rng(checksum).random(prototypes, np.float32)
    assignments = np.random.default_rng(checksum).integers(0, prototypes, (2, 3), np.uint8)
    return shares / shares.sum(), assignments


def _checksums(images: NDArray[np.uint8]) -> list[int]:
    return [int.from_bytes(image.reshape(-1)[:4].tobytes(), "little") for image in images]


@dataclass
class FakeEncoder:
    """Knows an image by its checksum, which travels in the first four pixels; counts what it encodes."""

    spec: FakeSpec = field(default_factory=FakeSpec)
    decoded: list[bytes] = field(default_factory=list)
    encoded: int = 0
    explained: int = 0
    encoding: bool = False
    batches: list[int] = field(default_factory=list)
    decode_gate: threading.Event = field(default_factory=threading.Event)
    encode_gate: threading.Event = field(default_factory=threading.Event)
    failing: Exception | None = None
    known: dict[int, bytes] = field(default_factory=dict)
    provider: str = "cpu"
    on_gpu: bool = False

    def __post_init__(self) -> None:
        self.decode_gate.set()
        self.encode_gate.set()

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        assert self.decode_gate.wait(20)
        if not 0 < len(data) <= MAX_BYTES:
            raise BadImage(f"the image has {len(data):,} bytes; it must have between 1 and {MAX_BYTES:,}")
        self.decoded.append(data)
        if data.startswith(b"bad"):
            raise BadImage("These bytes hold no image.")
        if data.startswith(b"bug"):
            raise ZeroDivisionError("secret detail")
        pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
        checksum = zlib.crc32(data)
        self.known[checksum] = data
        pixels.reshape(-1)[:4] = np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)
        return pixels

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        assert images.dtype == np.uint8
        assert images.shape[1:] == (SIZE, SIZE, 3)
        if not images.any():  # the warm-up
            return np.eye(len(images), DIMENSION, dtype=np.float32)
        self.encoding = True
        assert self.encode_gate.wait(20)
        self.encoding = False
        if self.failing is not None:
            raise self.failing
        self.encoded += len(images)
        self.batches.append(len(images))
        return np.stack([vector_for(self.known[each]) for each in _checksums(images)])

    def run(self, images: NDArray[np.uint8], *outputs: str) -> dict[str, NDArray[Any]]:
        """Histograms and assignments that tell the images apart, of a model with prototypes."""
        if not self.spec.prototypes or not set(outputs) <= {"histograms", "assignments"}:
            raise InvalidArgument(f"the model {self.spec.name} has no output {outputs}")
        self.explained += len(images)
        pairs = [explanation_for(each, self.spec.prototypes) for each in _checksums(images)]
        histograms, assignments = map(np.stack, zip(*pairs, strict=True))
        arrays = {"histograms": histograms, "assignments": assignments}
        return {name: arrays[name] for name in outputs}


def source(encoder: Any, name: str = "") -> ModelFile:
    """A model file whose encoder is loaded already."""
    return ModelFile(name, f"{name or encoder.spec.name}.onnx", id(encoder), lambda: encoder)


@dataclass
class FakeSources(ModelRepository):
    """Encoders by name, to be changed at will between two looks; an empty name is that of the spec."""

    models: dict[str, Any]

    def look(self) -> list[ModelFile]:
        return [source(encoder, name) for name, encoder in self.models.items()]

    def hide(self, text: str) -> str:
        return text.replace("/secret/", "")


@contextmanager
def serving(encoder: Any, galleries: Any, **settings: Any) -> Iterator[Server]:
    """Run a server of one encoder, or of the `FakeSources` of several."""
    sources = encoder if isinstance(encoder, FakeSources) else FakeSources({"": encoder})
    given = Settings.model_validate(
        {"model": ["model.onnx"], "galleries": Path("galleries"), "port": 0, "threads": 2} | settings
    )
    server = Server(given, sources=sources, directory=galleries)
    server.start()
    try:
        yield server
    finally:
        server.stop(given.grace)


def until(condition: Callable[[], Any], patience: float = 10.0) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found
