"""Exact search by torch, arrays in and out: which of its two searches is the faster."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.evaluation.pair_search import PairSearch
from training.evaluation.row_search import CHUNK, RowSearch
from training.method.precision import full_precision

__all__ = ["open_search"]

_KEPT_BYTES = 128 * 2**20  # for the neighbours of a whole set, where it is searched in pairs


def open_search(
    queries: NDArray[Any], gallery: NDArray[Any] | None, depth: int
) -> Callable[[NDArray[np.int64], int], NDArray[np.int64]]:
    """Choose the search: in pairs where a set is searched in itself for few neighbours, which is faster.

    Args:
        queries: Unit rows, float (N, d).
        gallery: References, unit rows, float (G, d); for each query all others when None.
        depth: Most neighbours that will be asked for.

    Returns:
        Queries (b,) and how many neighbours are wanted, to the nearest first and equals by index, (b, depth).
    """
    search = _open(queries, gallery, depth)

    @torch.no_grad()
    @full_precision
    def nearest(rows: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        return search.nearest(torch.from_numpy(rows), depth).numpy()

    return nearest


@torch.no_grad()
@full_precision
def _open(queries: NDArray[Any], gallery: NDArray[Any] | None, depth: int) -> PairSearch | RowSearch:
    asked = torch.from_numpy(queries)
    if gallery is not None:
        return RowSearch(asked, torch.from_numpy(gallery))
    kept = len(queries) * depth * (queries.itemsize + 4)
    if depth * CHUNK <= len(queries) and kept <= _KEPT_BYTES:
        return PairSearch(asked, depth=depth)
    return RowSearch(asked)
