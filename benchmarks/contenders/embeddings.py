"""Embeddings as a metric-learning network gives them, and what exact search finds in them.

Drawn ones lie about class centres in a space of 32 dimensions, which a random matrix maps into d, and have
noise in all d; they are of unit norm. Queries are drawn like items and are none of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contender import SHARDS, shard_of

__all__ = ["Nearest", "draw", "nearest", "recall", "shards", "split"]

_INTRINSIC = 32
_PER_CLASS = 50
_SPREAD = 0.7  # of a class, beside a spread of 1 of the centres
_NOISE = 0.2  # length of the noise beside that of the signal
_BLOCK = 16_384
_TIE = 1e-6  # scores nearer to each other than float32 tells are equal


@dataclass(frozen=True)
class Nearest:
    """What each query has to find: any k items that may be found, with scores of at least `least` (Q,)."""

    least: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    """Which items may be found (n,)."""
    k: int


def draw(path: Path, count: int, dimension: int, *, seed: int = 0) -> None:
    """Write `count` unit vectors to a .npy file, float32 (count, d)."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(max(1, count // _PER_CLASS), _INTRINSIC))
    basis = random.normal(size=(_INTRINSIC, dimension)) / np.sqrt(_INTRINSIC * dimension)
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, dimension))
    for start, stop in _blocks(count):
        centre = centres[random.integers(len(centres), size=stop - start)]
        signal = (centre + _SPREAD * random.normal(size=centre.shape)) @ basis
        noise = random.normal(size=signal.shape) / np.sqrt(dimension)
        vectors = signal + _NOISE * noise * np.linalg.norm(signal, axis=1, keepdims=True)
        file[start:stop] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    file.flush()


def split(source: Path, items: Path, queries: Path, *, held_out: int, seed: int = 1) -> None:
    """Write a random sample of a file's vectors, brought to unit norm, as queries and the others as items."""
    vectors = np.load(source, mmap_mode="r")
    order = np.random.default_rng(seed).permutation(len(vectors))
    for path, rows in ((queries, order[:held_out]), (items, order[held_out:])):
        file = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.float32, shape=(len(rows), vectors.shape[1])
        )
        for start, stop in _blocks(len(rows)):
            some = np.asarray(vectors[rows[start:stop]], np.float32)
            file[start:stop] = some / np.linalg.norm(some, axis=1, keepdims=True)
        file.flush()


def shards(count: int) -> NDArray[np.int64]:
    """Return the shard of each item, (count,)."""
    return np.resize(np.array([shard_of(number) for number in range(SHARDS)]), count)


def nearest(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], allowed: NDArray[np.bool_], *, k: int
) -> Nearest:
    """Find the k-th best score of each query (Q, d) among the vectors (n, d) that are allowed (n,)."""
    k = min(k, int(allowed.sum()))
    best = np.full((len(queries), k), -np.inf, np.float32)
    for start, stop in _blocks(len(vectors)):
        scores = queries @ vectors[start:stop].T
        scores[:, ~allowed[start:stop]] = -np.inf
        best = np.partition(np.concatenate([best, scores], axis=1), -k, axis=1)[:, -k:]
    return Nearest(best.min(axis=1), allowed, k)


def recall(
    found: Sequence[Sequence[int]],
    vectors: NDArray[np.float32],
    queries: NDArray[np.float32],
    wanted: Nearest,
) -> float:
    """Return which share of the k nearest was found, equal scores counted as equally right."""
    right = 0
    for numbers, query, least in zip(found, queries, wanted.least, strict=True):
        given = np.array(sorted(set(numbers)), np.int64)
        given = given[wanted.allowed[given]]
        right += min(wanted.k, int((vectors[given] @ query >= least - _TIE).sum()))
    return right / (wanted.k * len(queries))


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)
