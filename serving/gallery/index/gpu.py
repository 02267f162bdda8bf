"""Vectors on the first GPU, where every one of them is compared: FAISS is safe there in one thread only."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadSetting, Unavailable

__all__ = ["MOST_ON_GPU", "GpuMatrix", "check_gpu"]

MOST_ON_GPU = 2048  # results of one query (faiss#2103)
_BLOCK = 1 << 16  # vectors


def check_gpu(faiss: Any) -> None:
    """Raise BadSetting where there is no GPU, or FAISS cannot use it."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise BadSetting("a GPU was asked for and this FAISS cannot use one; install crossbatch[gpu]")
    if not faiss.get_num_gpus():
        raise BadSetting("a GPU was asked for and FAISS finds none; check nvidia-smi, or take the CPU")


class GpuMatrix:
    """Vectors on the first GPU; safe to search from several threads, which wait for one another."""

    def __init__(self, faiss: Any, matrix: NDArray[np.float32]) -> None:
        """Copy the vectors (n, d) there; Unavailable where its memory is too small, or in use."""
        check_gpu(faiss)
        self._held: list[Any] = []
        # Its memory is given back by the thread that took it, whoever lets go of it last.
        weakref.finalize(self, _release, self._held)
        try:
            _thread().submit(_place, faiss, matrix, self._held).result()
        except RuntimeError as error:
            raise Unavailable(
                f"{matrix.nbytes / 1e6:.0f} MB of vectors cannot be put on the GPU: its memory is too small "
                "or in use; search on the CPU"
            ) from error

    def search(
        self, queries: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the `count` <= 2048 nearest of each query (Q, d): scores and positions, each (Q, count)."""
        found = _thread().submit(lambda: self._held[0].search(queries, count)).result()
        return found[0], found[1]


@cache
def _thread() -> ThreadPoolExecutor:
    """Return the one thread of this process that uses the GPU, for all galleries."""
    return ThreadPoolExecutor(1, thread_name_prefix="the GPU")


@cache
def _resources(faiss: Any) -> Any:
    """Return what all indexes share: each of them would take more than a gigabyte."""
    return faiss.StandardGpuResources()


def _place(faiss: Any, matrix: NDArray[np.float32], held: list[Any]) -> None:
    index = faiss.GpuIndexFlatIP(_resources(faiss), matrix.shape[1])
    for start in range(0, len(matrix), _BLOCK):
        index.add(matrix[start : start + _BLOCK])
    held.append(index)


def _release(held: list[Any]) -> None:
    with suppress(RuntimeError):  # the process ends, and the thread has
        _thread().submit(held.clear)
