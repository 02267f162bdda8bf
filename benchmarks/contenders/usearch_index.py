"""usearch: a library; vectors are kept as it prefers, bfloat16, and the file is read into memory."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from benchmarks.contenders.contender import Built

__all__ = ["make"]


class UsearchIndex:
    """A usearch graph of 16 neighbours."""

    ladder = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320, 448, 640)

    def __init__(self, folder: Path) -> None:
        self._path = folder / "items.usearch"
        self._index = Index(ndim=1)

    def build(self, vectors: NDArray[np.float32]) -> Built:
        started = time.perf_counter()
        index = Index(ndim=vectors.shape[1], metric="ip", dtype="bf16", connectivity=16, expansion_add=200)
        numbers = np.arange(len(vectors), dtype=np.uint64)
        index.add(numbers, np.ascontiguousarray(vectors), threads=len(os.sched_getaffinity(0)))
        index.save(str(self._path))
        return Built(0.0, time.perf_counter() - started, "connectivity 16, expansion_add 200, bf16")

    def open(self) -> None:
        restored = Index.restore(str(self._path))
        assert restored is not None
        self._index = restored

    def set(self, value: int) -> None:
        self._index.expansion_search = value

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        found = self._index.search(queries, k, threads=len(os.sched_getaffinity(0)))
        numbers: list[list[int]] = found.keys.reshape(len(queries), -1).tolist()
        return numbers

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        raise NotImplementedError("a library is not changed here")

    def servers(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass


def make(folder: Path, argument: str) -> UsearchIndex:
    """Return the contender."""
    return UsearchIndex(folder)
