"""The items that a gallery's index covers: the index and its columns, asked for those that are allowed.

Not every FAISS type can delete, nor take a list of what is allowed. So more are fetched than wanted and those
that are not allowed are thrown out; or, where few are allowed, these are scored one by one.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.index import SCORE_ERROR, Index
from serving.gallery.index.metadata import MEASURED_K
from serving.gallery.search.columns import Columns
from serving.gallery.search.ranking import Scored, distinct, kth, nothing, product

__all__ = ["Covered", "Near"]

Near = tuple[Scored, float]
"""Candidates, and a bound on the scores of all others that are allowed."""

_SPARE = 16  # fetched beyond k, for ties; for 10 of an approximate index that is as many as it was tuned with
_DEPTH = (MEASURED_K + _SPARE) / MEASURED_K  # so many are fetched of one for each that is wanted
_PRODUCTS = 1 << 24  # entries of a matrix of scores made at once
_LARGE = 8  # the part of an index, as 1 / _LARGE, beyond which all allowed items are scored instead
_GATHERED = 4  # gathering a row costs as much as passing over so many in order
_VISITED = 12  # allowed rows that cost as much to score as an approximate type takes to find one item


@dataclass(frozen=True, slots=True)
class Covered:
    """An index and the columns of its n items."""

    index: Index
    columns: Columns

    def __len__(self) -> int:
        return len(self.index)

    def nearest(
        self, queries: NDArray[np.float32], k: int, barred: NDArray[np.bool_], *, by_label: bool
    ) -> list[Near]:
        """Find candidates for the k best items that are not barred (n,), of each query (Q, d).

        An exact type finds all that are among them, or above the bound given; any other k items, if so many
        are allowed, though not always the best: as likely as its recall tells, whatever k is and how few are
        allowed, since as many are fetched for each as when that was measured. With `by_label`, items of k
        labels.
        """
        labels = self.columns.label_codes if by_label else None
        allowed = len(self) - int(np.count_nonzero(barred))
        if not allowed:
            return [(nothing(), -np.inf)] * len(queries)
        # By chance more may be barred among those fetched than of all: two standard deviations.
        chance = 2 * math.sqrt(k * (len(self) - allowed) / allowed)
        fetched = k + _SPARE if self.index.exact else (k + chance) * _DEPTH
        count = min(len(self), math.ceil(fetched * len(self) / allowed))
        near: dict[int, Near] = {}
        pending = np.arange(len(queries))
        while not self._is_dear(count, allowed):
            step = max(1, _PRODUCTS // count)
            for start in range(0, len(pending), step):
                asked = pending[start : start + step]
                scores, positions = self.index.search(queries[asked], count)
                live = (positions >= 0) & ~barred[positions]
                for at, number in enumerate(asked.tolist()):
                    row = positions[at][live[at]]
                    trusted = len(row) if self.index.exact else math.ceil(len(row) / _DEPTH)
                    if len(_labels(row[:trusted], labels)) >= k:
                        floor = float(scores[at, -1]) if self.index.exact else -np.inf
                        near[number] = (scores[at][live[at]], row), floor
            if len(near) == len(queries):
                break
            pending = np.array([number for number in pending if number not in near])
            count *= 2
        else:
            near.update(zip(pending.tolist(), self._scored(queries[pending], k, barred, labels), strict=True))
        return [near[number] for number in range(len(queries))]

    def _is_dear(self, count: int, allowed: int) -> bool:
        """Tell whether it is cheaper to score all that are allowed than to fetch `count`."""
        if count * _LARGE > len(self):
            return True
        return allowed * _GATHERED < len(self) if self.index.exact else allowed < count * _VISITED

    def _scored(
        self,
        queries: NDArray[np.float32],
        k: int,
        barred: NDArray[np.bool_],
        labels: NDArray[np.int32] | None,
    ) -> list[Near]:
        allowed = np.flatnonzero(~barred)
        own = None if labels is None else distinct(labels[allowed], allowed)
        near = []
        step = max(1, _PRODUCTS // len(allowed))
        for start in range(0, len(queries), step):
            for scores in product(queries[start : start + step], self.index.matrix, allowed):
                best = np.flatnonzero(scores >= kth(scores, k, own) - 2 * SCORE_ERROR)
                near.append(((scores[best], allowed[best]), -np.inf))
        return near


def _labels(positions: NDArray[np.int64], labels: NDArray[np.int32] | None) -> NDArray[np.int64]:
    """Return what is counted: the positions themselves, or the labels that they have."""
    return positions if labels is None else np.unique(distinct(labels[positions], positions))
