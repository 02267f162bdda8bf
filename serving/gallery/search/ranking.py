"""Scores of vectors, and who is among the k best of them, each item or one of each label."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["distinct", "exact_scores", "kth", "product", "ranked"]

_ROWS = 4096  # vectors scored at once


def distinct(labels: NDArray[np.int32] | NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return labels (c,) in which each empty one, -1, is one of its own, told by the item's place (c,)."""
    return np.where(labels < 0, -1 - places, labels)


def product(
    queries: NDArray[np.float32], vectors: NDArray[np.float32], positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the scores of queries (Q, d) with the vectors (n, d) at ascending positions (c,), (Q, c).

    A block of them is gathered at a time; where they are all there are, none needs to be.
    """
    scores = np.empty((len(queries), len(positions)), np.float32)
    for start in range(0, len(positions), _ROWS):
        rows = slice(start, start + _ROWS)
        block = vectors[rows] if len(positions) == len(vectors) else vectors[positions[rows]]
        scores[:, rows] = queries @ block.T
    return scores


def exact_scores(query: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return inner products of (d,) and (c, d), float32 (c,), summed in float64.

    They do not depend on where an item is kept, nor on how many queries came together (FAISS's do:
    faiss#563).
    """
    scores = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        scores[rows] = (vectors[rows] * query.astype(np.float64)).sum(axis=1)
    return scores


def kth(scores: NDArray[np.float32], k: int, labels: NDArray[np.int64] | None = None) -> float:
    """Return the k-th largest of scores (c,), with labels (c,) of the best of each; -inf if there is none."""
    if len(scores) < k:
        return -np.inf
    if labels is None:
        return float(np.partition(scores, -k)[-k])
    looked_at = k
    while True:  # most often a few times k suffice
        looked_at = min(len(scores), 4 * looked_at)
        top = np.argpartition(scores, -looked_at)[-looked_at:]
        first = _firsts(scores[top], labels[top])
        if len(first) >= k:
            return float(np.sort(scores[top[first]])[-k])
        if looked_at == len(scores):
            return -np.inf


def ranked(
    scores: NDArray[np.float32], k: int, least: float, labels: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return where the k best of scores (c,) stand, best first, and all that tie with the last of them.

    None is below `least`. With labels (c,), only those that no other of their label is better than.
    """
    least = max(kth(scores, k, labels), least)
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= least]
    if labels is not None:
        own, inverse = labels[order], np.unique(labels[order], return_inverse=True)[1]
        order = order[scores[order] == scores[order[_firsts(scores[order], own)]][inverse]]
    return order


def _firsts(scores: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a best one of each label stands, int64 (labels,), in the order of the labels."""
    order = np.argsort(-scores, kind="stable")
    return order[np.unique(labels[order], return_index=True)[1]]
