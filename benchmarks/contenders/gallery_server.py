"""crossbatch's gRPC server over the gallery that `gallery` has built, asked through the Python client.

The server is a process of its own: `python -m benchmarks.contenders.gallery_server FOLDER`. It embeds no
image here, so that its model is an empty one of the gallery's fingerprint.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contender import Built
from benchmarks.contenders.gallery import FINGERPRINT, condition
from serving.client.client import Client
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import RebuildPolicy
from serving.model.spec import ModelSpec
from serving.server.server import Server
from serving.settings import Settings

__all__ = ["main", "make"]

_NAME = "items"


class GalleryServer:
    """A client of a server; the folder is that of the contender whose gallery is served."""

    ladder: Sequence[int] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._client: Client | None = None

    def build(self, vectors: NDArray[np.float32]) -> Built:
        """Nothing is built twice."""
        raise NotImplementedError("the gallery is built by the contender `gallery`")

    def open(self) -> None:
        """Start the server and connect."""
        words = ["-m", "benchmarks.contenders.gallery_server", str(self._folder)]
        self._server = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        self._client = Client(self._server.stdout.readline().strip(), timeout=60)

    def set(self, value: int) -> None:
        """There is nothing to set."""

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        """Search in one call."""
        assert self._client is not None
        found = self._client.search(_NAME, vectors=queries, k=k, filter=condition(below))
        return [[int(hit.key.rpartition("/")[2]) for hit in hits] for hits in found]

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        """Nothing is changed through the server here."""
        raise NotImplementedError("changes are measured without the server")

    def servers(self) -> Sequence[int]:
        """It is a child of this process."""
        return ()

    def close(self) -> None:
        """Hang up and stop the server."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.communicate(timeout=30)
            self._server = None


class _NoEncoder:
    """Stands for a model that embeds nothing but the server's own warm-up; is its own source."""

    name = place = stamp = ""
    provider, on_gpu = "cpu", False

    def __init__(self, dimension: int) -> None:
        self.spec = ModelSpec(
            name="benchmark",
            fingerprint=FINGERPRINT,
            image_size=8,
            crop_fraction=1.0,
            resampling="bilinear",
            dimension=dimension,
            prototypes=0,
        )

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        raise NotImplementedError("no image is embedded here")

    def look(self) -> "list[_NoEncoder]":
        return [self]

    def load(self) -> "_NoEncoder":
        return self

    def hide(self, text: str) -> str:
        return text

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        return np.eye(len(images), self.spec.dimension, dtype=np.float32)


def make(folder: Path, argument: str) -> GalleryServer:
    """Return the contender."""
    return GalleryServer(folder)


def main(folder: str) -> None:
    """Serve the gallery, tell the address, and stop when standard input ends."""
    galleries = GalleryDirectory(Path(folder), policy=RebuildPolicy(automatic=False))
    encoder: Any = _NoEncoder(galleries.get(_NAME).meta.dimension)
    settings = Settings(model=("none.onnx",), galleries=Path(folder), port=0)
    server = Server(settings, sources=encoder, directory=galleries)
    server.start()
    sys.stdout.write(f"{server.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
