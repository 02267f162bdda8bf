"""Which index types come into question for a gallery, and which of them a trial on a sample speaks for."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.draft import Draft, Untrainable
from serving.gallery.index.kind import EXACT, Trial
from serving.gallery.index.tuning import latency_ms, prepared, tuned

__all__ = ["candidates", "is_small", "tried"]

_SMALL = 1 << 22  # components that one thread compares in about a millisecond
_FEW = 1000  # vectors below which nothing is trained
_SAMPLE = 20_000  # vectors
_SAMPLE_COMPONENTS = 1 << 24
_LARGE = 50_000  # vectors from which more types come into question


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A type, and how its latency grows: by what factor from m to n vectors."""

    type: str
    growth: Callable[[int, int], float]
    handicap: float = 1.0  # how much faster it must be to be worth the time that it takes to build


def is_small(count: int, dimension: int) -> bool:
    """Tell whether comparing every one of n vectors is fast enough."""
    return count < _FEW or count * max(dimension, 64) <= _SMALL


def candidates(count: int, dimension: int) -> list[str]:
    """Return the types that come into question beside an exact index, the quickest to build first."""
    return [each.type for each in _candidates(count, dimension, lists_for=count)]


def tried(
    matrix: NDArray[np.float32], wanted: float, *, threads: int, advance: Callable[[str, int, int], None]
) -> tuple[list[str], list[Trial]]:
    """Try the types on a sample of a gallery's vectors.

    Args:
        matrix: The vectors, float32 (n, d).
        wanted: The recall to reach.
        threads: Those of FAISS.
        advance: Called with stage, done and total; what it raises ends the work.

    Returns:
        The types that reach the recall, the best for n vectors first and an exact index last; and what all
        of them did.
    """
    count, dimension = matrix.shape
    if is_small(count, dimension):
        return [EXACT], []
    size = min(count, _SAMPLE, max(_FEW, _SAMPLE_COMPONENTS // dimension))
    # The same vectors each time, so that a rebuild of the same gallery chooses the same.
    drawn = np.sort(np.random.default_rng(0).choice(count, size, replace=False))
    draft = Draft.of(matrix[drawn], threads=threads)
    exact = latency_ms(draft)
    trials, costs = [Trial(EXACT, 1.0, exact, 0.0)], {EXACT: exact * count / size}
    exam = prepared(draft)
    found = _candidates(count, dimension, lists_for=count)
    on_sample = _candidates(count, dimension, lists_for=size)
    for done, (candidate, small) in enumerate(zip(found, on_sample, strict=True)):
        advance("try", done, len(found))
        try:
            seconds = draft.become(small.type, lambda *_: advance("try", done, len(found)))  # noqa: B023
        except Untrainable:
            continue
        result = tuned(draft, exam, wanted)
        trials.append(Trial(small.type, result.recall, result.latency_ms, round(seconds, 3)))
        if result.recall >= wanted:
            costs[candidate.type] = result.latency_ms * candidate.growth(size, count) * candidate.handicap
    advance("try", len(found), len(found))
    order = sorted(costs, key=lambda type_: costs[type_])
    return order[: order.index(EXACT) + 1], trials


def _candidates(count: int, dimension: int, *, lists_for: int) -> list[_Candidate]:
    """Return the candidates for n vectors; those that have lists have as many as `lists_for` vectors need."""
    codes = dimension // 2 if dimension % 2 == 0 else dimension  # four bits for two components, or for one
    found = [
        _Candidate(f"PQ{codes}x4fs,RFlat", _linear),
        _Candidate("HNSW16,SQ8,RFlat", _logarithmic, handicap=1.5),
    ]
    if count >= _LARGE:
        lists = 4 * math.isqrt(lists_for)
        found.append(_Candidate(f"IVF{lists},PQ{codes}x4fs,RFlat", _root))
        found.append(_Candidate("HNSW32,SQ8,RFlat", _logarithmic, handicap=2.0))
    return found


def _linear(small: int, large: int) -> float:
    return large / small


def _root(small: int, large: int) -> float:
    return math.sqrt(large / small)


def _logarithmic(small: int, large: int) -> float:
    return math.log(large) / math.log(small)
