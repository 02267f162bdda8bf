"""Vectors on the first GPU, where every one of them is compared: FAISS is safe there in one thread only."""

import weakref
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadSetting, Unavailable
from serving.gallery.index.owner import Owner

__all__ = ["MOST_ON_GPU", "GpuMatrix", "check_gpu"]

MOST_ON_GPU = 2048  # results of one query (faiss#2103)
_BLOCK = 1 << 16  # vectors


def check_gpu(faiss: Any) -> None:
    """Check that FAISS can search on a GPU.

    Raises:
        BadSetting: There is none, or FAISS cannot use it.
    """
    if not hasattr(faiss, "StandardGpuResources"):
        raise BadSetting("a GPU was asked for and this FAISS cannot use one; install crossbatch[gpu]")
    if not faiss.get_num_gpus():
        raise BadSetting("a GPU was asked for and FAISS finds none; check nvidia-smi, or take the CPU")


class GpuMatrix:
    """Vectors on the first GPU; safe to search from several threads, which wait for one another."""

    def __init__(self, faiss: Any, matrix: NDArray[np.float32]) -> None:
        """Copy the vectors (n, d) there.

        Raises:
            BadSetting: There is no GPU, or FAISS cannot use it.
            Unavailable: Its memory is too small, or in use.
        """
        check_gpu(faiss)
        self._owner = _owner()
        held: list[Any] = []
        # Its memory is given back by the thread that took it, whoever lets go of it last.
        weakref.finalize(self, self._owner.leave, held.clear)
        try:
            self._owner.call(lambda: held.append(_placed(faiss, matrix)))
        except RuntimeError as error:
            raise Unavailable(
                f"{matrix.nbytes / 1e6:.0f} MB of vectors cannot be put on the GPU: its memory is too small "
                "or in use; search on the CPU"
            ) from error
        self._held = held

    def search(
        self, queries: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the `count` <= 2048 nearest of each query (Q, d): scores and positions, each (Q, count)."""
        return self._owner.call(lambda: self._held[0].search(queries, count))  # type: ignore[no-any-return]


@cache
def _owner() -> Owner:
    """Return the one thread of this process that uses the GPU, for all galleries."""
    return Owner("the GPU")


@cache
def _resources(faiss: Any) -> Any:
    """Return what all indexes share: each of them would take more than a gigabyte."""
    return faiss.StandardGpuResources()


def _placed(faiss: Any, matrix: NDArray[np.float32]) -> Any:
    index = faiss.GpuIndexFlatIP(_resources(faiss), matrix.shape[1])
    for start in range(0, len(matrix), _BLOCK):
        index.add(matrix[start : start + _BLOCK])
    return index
