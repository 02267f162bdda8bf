"""Pairs of items that are nearly alike, found by the gallery's index, and the clusters that they make."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.builder import Advance
from serving.gallery.index.index import SCORE_ERROR
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.store.transaction import Reader

__all__ = ["NEAREST", "Duplicate", "DuplicatesPage", "clustered", "duplicates", "duplicates_page"]

NEAREST = 64
"""Most neighbours looked at of one item: of a picture that thousands have, not each pair is told."""
_ROWS = 1024  # items whose neighbours are looked for at once
_PRODUCTS = 1 << 24  # entries of a matrix of scores made at once
_DIGITS = 6  # of a score: two equal vectors are at 1, whatever their rounding


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Two items, by their keys, and the number of their cluster: all that pairs join, the largest first."""

    cluster: int
    key: str
    other: str
    score: float
    label: str = ""
    other_label: str = ""


@dataclass(frozen=True, slots=True)
class DuplicatesPage:
    """What comes of comparing some items, the first of which is that of `pairs` which is named first."""

    pairs: list[tuple[str, str, float]]  # keys and scores, the best first
    compared: int  # items up to the last one that was compared
    items: int  # of the gallery
    last: int  # the version of the last one that was compared; 0 where none is left


def duplicates(snapshot: Snapshot, reader: Reader, above: float, advance: Advance) -> list[Duplicate]:
    """Find the pairs that score at least `above`, by cluster, best first.

    Items are compared with the `NEAREST` that the index has for each, and those newer than it with one
    another.
    """
    found = _pairs(snapshot, snapshot.places(), above, advance)
    texts = reader.labelled({seq for one, other, _ in found for seq in (one, other)})
    named = [(texts[one][0], texts[other][0], score) for one, other, score in found]
    return clustered(named, dict(texts.values()))


def clustered(pairs: Iterable[tuple[str, str, float]], labels: Mapping[str, str]) -> list[Duplicate]:
    """Return pairs of keys by cluster, best first, with the labels of both."""
    named = [(min(one, other), max(one, other), score) for one, other, score in pairs]
    clusters = _clusters([(key, other) for key, other, _ in named])
    made = [
        Duplicate(clusters[key], key, other, score, labels[key], labels[other]) for key, other, score in named
    ]
    return sorted(made, key=lambda pair: (pair.cluster, -pair.score, pair.key, pair.other))


def duplicates_page(
    snapshot: Snapshot, reader: Reader, above: float, after: int, limit: int, advance: Advance
) -> DuplicatesPage:
    """Find the pairs of the first `limit` items, by seq, of those above `after`, as `duplicates` does."""
    live = snapshot.places()
    seqs = snapshot.seqs(live)
    start = int(np.searchsorted(seqs, after, "right"))
    end = min(start + limit, len(live))
    found = _pairs(snapshot, live[start:end], above, advance)
    texts = reader.labelled({seq for one, other, _ in found for seq in (one, other)})
    # Of a pair the older one comes first, if it was compared; or it was the newer one that was.
    sides = [(one, other, score) if one > after else (other, one, score) for one, other, score in found]
    pairs = [(texts[one][0], texts[other][0], score) for one, other, score in sides]
    pairs.sort(key=lambda pair: (-pair[2], pair[0], pair[1]))
    return DuplicatesPage(pairs, end, len(live), int(seqs[end - 1]) if end < len(live) else 0)


def _pairs(
    snapshot: Snapshot, places: NDArray[np.int64], above: float, advance: Advance
) -> list[tuple[int, int, float]]:
    """Return the pairs of items at places (c,), ascending, and others: seqs, the smaller first, and score."""
    near, count = _near(snapshot, places, above - SCORE_ERROR, advance), len(snapshot.dead)
    found = []
    for start in range(0, len(near), _ROWS):
        one, other = near[start : start + _ROWS] // count, near[start : start + _ROWS] % count
        products = snapshot.vectors(one).astype(np.float64) * snapshot.vectors(other)
        scores = np.round(np.clip(products.sum(axis=1), -1, 1), _DIGITS)
        pairs = zip(snapshot.seqs(one).tolist(), snapshot.seqs(other).tolist(), scores.tolist(), strict=True)
        found += [each for each in pairs if each[2] >= above]
    return found


def _near(snapshot: Snapshot, live: NDArray[np.int64], least: float, advance: Advance) -> NDArray[np.int64]:
    """Return pairs of places among the n held, ascending, each once: the smaller times n plus the larger."""
    sealed, growing, dead = snapshot.sealed, snapshot.growing, snapshot.dead
    first = len(sealed.dead)
    step = max(1, min(_ROWS, _PRODUCTS // max(1, len(growing.dead))))
    codes = [np.empty(0, np.int64)]
    for start in range(0, len(live), step):
        advance("compare", start, len(live))
        places = live[start : start + step]
        rows = snapshot.vectors(places)
        near = [each[:2] for each in sealed.nearest(rows, NEAREST + 1, sealed.dead, by_label=False)]
        if places[-1] >= first:
            fresh = growing.scores(rows, growing.dead)
            near += [(scores, np.arange(first, len(dead))) for scores in fresh]
        for one, (scores, found) in zip(itertools.cycle(places), near, strict=False):
            best = np.argpartition(-scores, NEAREST)[: NEAREST + 1] if len(scores) > NEAREST else slice(None)
            other = found[best][scores[best] >= least]
            codes.append((np.minimum(one, other) * len(dead) + np.maximum(one, other))[one != other])
    advance("compare", len(live), len(live))
    return np.unique(np.concatenate(codes))


def _clusters(pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Number what pairs join, from 1 on: the largest first, then by the first key."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for one, other in pairs:
        first, second = sorted((root(one), root(other)))
        parent[second] = first  # so that a root is its cluster's first key
    roots = {key: root(key) for key in parent}
    sizes = Counter(roots.values())
    numbers = {key: n for n, key in enumerate(sorted(sizes, key=lambda key: (-sizes[key], key)), 1)}
    return {key: numbers[root] for key, root in roots.items()}
