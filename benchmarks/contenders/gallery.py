"""crossbatch's own galleries, searched in the process: every hit with its key, label and metadata.

What is indexed differently is one gallery, loaded once and copied: its kind is the argument, `auto`, `exact`
or a FAISS factory string.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contender import Built, key_of, shard_of
from serving.gallery.gallery import Gallery, GalleryItem, RebuildPolicy
from serving.gallery.search.filter import Filter, Range
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store

__all__ = ["FINGERPRINT", "condition", "items", "make"]

FINGERPRINT = "0" * 64
_BLOCK = 10_000
_BY_HAND = RebuildPolicy(automatic=False)


class GalleryFolder:
    """A gallery of the kind wanted, beside the one that was loaded and not indexed."""

    ladder: Sequence[int] = ()

    def __init__(self, folder: Path, kind: str, recall: float) -> None:
        self._path = folder / "items"
        self._kind = kind
        self._recall = recall
        self._gallery: Gallery | None = None

    def build(self, vectors: NDArray[np.float32]) -> Built:
        """Copy what was loaded, which the first kind does, and index it."""
        loaded = self._path.parent.with_name("loaded")
        if not loaded.exists():
            _load(loaded, vectors)
        shutil.copytree(loaded / "items", self._path)
        store = Store(self._path / FILE_NAME)
        with store.write() as writer:
            writer.want(self._kind, self._recall)
        store.close()
        self.open()
        assert self._gallery is not None
        started = time.perf_counter()
        self._gallery.rebuild()
        seconds = time.perf_counter() - started
        return Built(float((loaded / "seconds").read_text()), seconds, self._gallery.info().index_type)

    def open(self) -> None:
        """Open the gallery."""
        self._gallery = Gallery.open(self._path, policy=_BY_HAND)

    def set(self, value: int) -> None:
        """There is nothing to set: a gallery measures itself."""

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        """Search as any caller would."""
        assert self._gallery is not None
        found = self._gallery.search(queries, k, filter=condition(below))
        return [[int(hit.key.rpartition("/")[2]) for hit in hits] for hits in found]

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        """Upsert and delete; nothing is rebuilt."""
        assert self._gallery is not None
        for some in items(first, vectors):
            self._gallery.upsert(some)
        for start in range(0, len(deleted), _BLOCK):
            self._gallery.delete([key_of(number) for number in deleted[start : start + _BLOCK]])

    def servers(self) -> Sequence[int]:
        """There is none."""
        return ()

    def close(self) -> None:
        """Close the gallery."""
        if self._gallery is not None:
            self._gallery.close()
            self._gallery = None


def condition(below: int | None) -> Filter | None:
    """Return the filter of a search."""
    return None if below is None else Range("shard", below=below)


def items(first: int, vectors: NDArray[np.float32]) -> Iterator[list[GalleryItem]]:
    """Yield items of vectors (n, d), so many that a call takes."""
    for start in range(0, len(vectors), _BLOCK):
        some = np.asarray(vectors[start : start + _BLOCK])
        yield [
            GalleryItem(key_of(number), vector, metadata={"shard": shard_of(number)})
            for number, vector in enumerate(some, first + start)
        ]


def _load(folder: Path, vectors: NDArray[np.float32]) -> None:
    gallery = Gallery.create(
        folder / "items",
        model_name="benchmark",
        fingerprint=FINGERPRINT,
        dimension=vectors.shape[1],
        policy=_BY_HAND,
    )
    started = time.perf_counter()
    for some in items(0, vectors):
        gallery.upsert(some)
    (folder / "seconds").write_text(str(time.perf_counter() - started))
    gallery.close()


def make(folder: Path, argument: str) -> GalleryFolder:
    """Return the contender; the argument is the index and the recall wanted, `auto@0.99`."""
    kind, _, recall = argument.partition("@")
    return GalleryFolder(folder, kind, float(recall))
