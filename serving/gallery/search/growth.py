"""Arrays that grow at their end while older views of them are still read."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["appended"]

T = TypeVar("T", bound=np.generic)


def appended(rows: NDArray[T], more: NDArray[T]) -> NDArray[T]:
    """Return `rows` and `more` in one array with room behind it, so that n appends copy O(n) rows in all.

    Only the newest view may be extended, so that the room behind its rows is free; older ones do not look
    beyond theirs.
    """
    size = len(rows) + len(more)
    whole = rows.base if isinstance(rows.base, np.ndarray) else rows
    if whole.dtype != rows.dtype or whole.shape[1:] != rows.shape[1:] or len(whole) < size:
        whole = np.empty((max(1024, 2 * size), *rows.shape[1:]), rows.dtype)
        whole[: len(rows)] = rows
    whole[len(rows) : size] = more
    return whole[:size]
