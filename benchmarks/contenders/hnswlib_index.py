"""hnswlib: a library, which holds vectors and their numbers in memory and writes them to a file when told."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import hnswlib
import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contender import Built

__all__ = ["make"]


class HnswlibIndex:
    """An hnswlib graph of 16 neighbours."""

    ladder = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320, 448, 640)

    def __init__(self, folder: Path) -> None:
        self._path = folder / "items.hnsw"
        self._index = hnswlib.Index(space="ip", dim=1)

    def build(self, vectors: NDArray[np.float32]) -> Built:
        started = time.perf_counter()
        index = hnswlib.Index(space="ip", dim=vectors.shape[1])
        index.init_index(max_elements=len(vectors), M=16, ef_construction=200, random_seed=0)
        index.add_items(vectors, np.arange(len(vectors)), num_threads=len(os.sched_getaffinity(0)))
        index.save_index(str(self._path))
        (self._path.parent / "dimension").write_text(str(vectors.shape[1]))
        return Built(0.0, time.perf_counter() - started, "M 16, ef_construction 200")

    def open(self) -> None:
        self._index = hnswlib.Index(space="ip", dim=int((self._path.parent / "dimension").read_text()))
        self._index.load_index(str(self._path))

    def set(self, value: int) -> None:
        self._index.set_ef(value)

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        numbers, _ = self._index.knn_query(queries, k, num_threads=len(os.sched_getaffinity(0)))
        found: list[list[int]] = numbers.tolist()
        return found

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        raise NotImplementedError("a library is not changed here")

    def servers(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass


def make(folder: Path, argument: str) -> HnswlibIndex:
    """Return the contender."""
    return HnswlibIndex(folder)
