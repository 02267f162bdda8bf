"""Exact search of queries in references by numpy alone, where some references are out for some queries."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExactSearch", "unit_rows"]

_BYTES = 32 * 2**20  # of the similarities that are ranked at a time


class ExactSearch:
    """Exact nearest references; those of a query's own group are none of its references."""

    def __init__(
        self,
        queries: NDArray[np.floating],
        gallery: NDArray[np.floating],
        groups: NDArray[np.int64],
        gallery_groups: NDArray[np.int64],
    ) -> None:
        """Make ready; nothing is searched yet.

        Args:
            queries: Unit rows, float (N, d).
            gallery: References, unit rows, float (G, d).
            groups: Of each query, (N,).
            gallery_groups: Of each reference, (G,).
        """
        numbers = dict[bytes, int]()
        places = [numbers.setdefault(row.tobytes(), len(numbers)) for row in gallery]
        # A product may round equal columns differently by their places: each is multiplied once.
        self._columns, firsts = np.array(places), np.unique(places, return_index=True)[1]
        self._queries, self._distinct = queries, gallery[firsts]
        self._groups, self._gallery_groups = groups, gallery_groups

    def nearest(self, rows: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """Rank the references of the queries `rows`, (b,).

        Returns:
            Indices of the `depth` nearest, at most G, nearest first and equals by index, (b, depth); -1 past
            a query's last reference.
        """
        room = max(1, _BYTES // (len(self._columns) * self._queries.itemsize))
        parts = [self._rank(rows[start : start + room], depth) for start in range(0, len(rows), room)]
        return np.concatenate(parts) if parts else np.empty((0, depth), dtype=np.int64)

    def _rank(self, rows: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        scores = (self._queries[rows] @ self._distinct.T)[:, self._columns]  # (b, G)
        scores[self._groups[rows, None] == self._gallery_groups] = -np.inf
        last = -np.partition(-scores, depth - 1, axis=1)[:, depth - 1, None]
        above, equal = scores > last, scores == last
        room = depth - above.sum(axis=1, keepdims=True)  # for the first of the equals
        kept = np.nonzero(above | (equal & (equal.cumsum(axis=1, dtype=np.int32) <= room)))[1]
        indices = kept.reshape(len(rows), depth)
        values = np.take_along_axis(scores, indices, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        found = np.where(np.isneginf(values), -1, indices)
        return np.take_along_axis(found, order, axis=1)


def unit_rows(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scale each row, float (N, d), to length one; a row of zeros stays."""
    lengths: NDArray[np.floating] = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    unit: NDArray[np.floating] = vectors / np.maximum(lengths, 1e-12, dtype=vectors.dtype)
    return unit
