"""What an index does on a gallery's own vectors: its recall, its latency, the parameters that reach it.

A stored vector is an easy query: a graph was built to lead to it. A vector shifted at random is no query that
anybody asks: nearly all directions lead away from where the vectors are. So each query lies beside a stored
vector, in the direction from one of its neighbours to another, 0.6 times as far as its tenth neighbour. On
clustered vectors the recall is then within a percent of that of vectors held out of the index.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.draft import Draft
from serving.gallery.index.index import SCORE_ERROR
from serving.gallery.index.kind import MEASURED_K

__all__ = ["Exam", "Tuning", "latency_ms", "measured", "prepared", "tuned"]

_QUERIES = 200
_SHIFT = 0.6  # of the distance of the tenth neighbour
_TIMED = 40
_SPARE = 16  # fetched beyond the ten, as a search does for ties
_BREADTHS = {
    "nprobe": (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024),
    "efSearch": (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
# How many candidates are compared exactly for each one wanted while the breadth is looked for: lists are
# coarse, and a graph looks at least at as many nodes.
_FACTOR_FOR = {"nprobe": 32, "efSearch": 2}
_REFINE = "k_factor_rf"
_FACTORS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Exam:
    """Queries of which it is known what they should find.

    Attributes:
        queries: Unit vectors, float32 (Q, d).
        least: The score of the k-th nearest, less what rounding can change, float32 (Q,).
        k: 10, or the number of vectors where that is less.
    """

    queries: NDArray[np.float32]
    least: NDArray[np.float32]
    k: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """What an index does with some search parameters; the latency is that of one query on one thread."""

    recall: float
    latency_ms: float
    parameters: Mapping[str, float]


def prepared(draft: Draft, *, seed: int = 0) -> Exam:
    """Draw queries beside the vectors of an index, and find their nearest by comparing every vector."""
    chance = np.random.default_rng(seed)
    rows = draft.matrix[np.sort(chance.choice(len(draft), min(len(draft), _QUERIES), replace=False))]
    scores, near = draft.exact(rows, min(MEASURED_K + 1, len(draft)))  # (Q, 11); each finds itself
    reach = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * scores[:, -1:]))  # (Q, 1), distances of unit vectors
    pairs = chance.permuted(near[:, 1:], axis=1)[:, :2]  # (Q, 2), two neighbours of each
    along = draft.matrix[pairs[:, 0]] - draft.matrix[pairs[:, -1]] if pairs.size else np.zeros_like(rows)
    queries = _unit(rows + _SHIFT * reach * _unit(along)).astype(np.float32)
    k = min(MEASURED_K, len(draft))
    scores, _ = draft.exact(queries, k)
    return Exam(queries, scores[:, k - 1] - SCORE_ERROR, k)


def latency_ms(draft: Draft) -> float:
    """Return the median milliseconds of one query on one thread, asked for vectors of the index."""
    count = len(draft)
    queries = draft.matrix[np.linspace(0, count - 1, min(count, _TIMED)).astype(np.int64)]
    seconds = []
    for query in queries:
        began = time.thread_time()  # of this thread's work, so that a busy machine changes no choice
        draft.search(query[None], _count(draft))
        seconds.append(time.thread_time() - began)
    return round(1e3 * float(np.median(seconds)), 4)


def measured(draft: Draft, exam: Exam, parameters: Mapping[str, float]) -> float:
    """Set search parameters and return the recall: the share of the k nearest, or of their equals, found."""
    draft.set_parameters(parameters)
    scores, _ = draft.search(exam.queries, _count(draft))
    return float((scores[:, : exam.k] >= exam.least[:, None]).mean())


def tuned(draft: Draft, exam: Exam, wanted: float, *, first: Mapping[str, float] | None = None) -> Tuning:
    """Find the cheapest search parameters that reach the wanted recall, and leave them set.

    Args:
        draft: The index.
        exam: Queries of it.
        wanted: The recall.
        first: Parameters to try before all others.

    Returns:
        What was found; where nothing reaches the recall, that which comes nearest.
    """
    # One standard error more, so that it is not by luck with these queries that the recall is reached.
    enough = wanted + math.sqrt(wanted * (1 - wanted) / (len(exam.queries) * exam.k))
    tried: list[tuple[float, Mapping[str, float]]] = []

    def reaches(parameters: Mapping[str, float]) -> bool:
        tried.append((measured(draft, exam, parameters), parameters))
        return tried[-1][0] >= enough

    # What was found before stays while it holds, without that margin.
    if first is None or (not reaches(first) and tried[0][0] < wanted):
        _climb(draft.knobs, reaches)
    reaching = [each for each in tried if each[0] >= enough]
    recall, parameters = reaching[-1] if reaching else max(tried, key=lambda each: each[0])
    draft.set_parameters(parameters)
    return Tuning(recall, latency_ms(draft), parameters)


def _climb(knobs: frozenset[str], reaches: Callable[[Mapping[str, float]], bool]) -> None:
    """Try wider and wider searches until one reaches; then, from the least on, candidates to compare."""
    wide: dict[str, float] = {}
    refines = _REFINE in knobs
    breadth = next((name for name in _BREADTHS if name in knobs), None)
    if breadth is not None:
        for value in _BREADTHS[breadth]:
            wide = {breadth: value}
            if reaches({**wide, _REFINE: _FACTOR_FOR[breadth]} if refines else wide):
                break
    if refines:
        for factor in _FACTORS:
            if reaches({**wide, _REFINE: factor}):
                break
    elif breadth is None:
        reaches({})


def _count(draft: Draft) -> int:
    return min(len(draft), MEASURED_K + _SPARE)


def _unit(rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return rows (n, d) divided by their norms; a row of zeros stays one."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))
