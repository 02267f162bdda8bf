"""The two parts of a gallery in memory: the sealed one under its index, the growing one of newer items."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.index import (
    MEASURED_K,
    SCORE_ERROR,
    SPARE,
    SPARSE,
    Index,
    IndexDamaged,
    IndexMetadata,
    inner_products,
)
from serving.gallery.search.columns import Columns, Mask, TextTable
from serving.gallery.search.filter import Filter
from serving.gallery.store.schema import sound
from serving.gallery.store.transaction import Block, State

__all__ = ["GrowingSegment", "Near", "SealedSegment", "distinct", "firsts_ranked", "kth", "rescore"]

Near = tuple[NDArray[np.float32], NDArray[np.int64], float]
"""Scores of candidates (c,), their positions (c,), and a bound on the scores of all others allowed."""

T = TypeVar("T", bound=np.generic)

_DEPTH = (MEASURED_K + SPARE) / MEASURED_K  # so many are fetched of one for each that is wanted
_ROWS = 4096  # vectors scored at once
_PRODUCTS = 1 << 24  # entries of a matrix of scores made at once
_LARGE = 8  # the part of an index, as 1 / _LARGE, beyond which all allowed items are scored instead
_GATHERED = 4  # gathering a row costs as much as passing over so many in order
_VISITED = 25  # allowed rows that cost as much to score as an approximate type takes to find one item
_WALKED = 2  # where no more than 1 / _WALKED are allowed a graph is walked for those alone, more widely


@dataclass(frozen=True, eq=False)
class SealedSegment:
    """The n items that the published index covers; none where there is no index.

    Not every FAISS type can delete, nor take a list of what is allowed. So more are fetched than wanted and
    those that are not allowed are thrown out; or, where few are allowed, these are scored one by one.
    """

    index: Index | None
    vectors: NDArray[np.float32]  # (n, d), of unit norm
    seqs: NDArray[np.int64]  # (n,), ascending
    dead: Mask  # (n,): which are deleted or replaced
    columns: Columns

    @staticmethod
    def of(index: Index, columns: Columns) -> "SealedSegment":
        """Return the segment of an index and its columns, all of it live."""
        return SealedSegment(index, index.matrix, index.seqs, np.zeros(len(index), np.bool_), columns)

    @staticmethod
    def load(file: Path, state: State, dimension: int, *, device: str = "cpu") -> "SealedSegment":
        """Open what a state names; IndexDamaged where it is not what was published."""
        facts = IndexMetadata.from_json(state.index_facts)
        columns = Columns.load(file.with_suffix(".columns"), facts.columns_checksum)
        index = Index(file, checksum=state.index_checksum, dimension=dimension, facts=facts, device=device)
        if len(columns) != len(index):
            raise IndexDamaged(f"it holds {len(index)} items, and the labels and metadata of {len(columns)}")
        return SealedSegment.of(index, columns)

    @staticmethod
    def empty(dimension: int) -> "SealedSegment":
        """Return the segment of no item."""
        vectors, columns = np.empty((0, dimension), np.float32), Columns.of([], [])
        return SealedSegment(None, vectors, np.empty(0, np.int64), np.zeros(0, np.bool_), columns)

    @cached_property
    def live(self) -> int:
        """How many are neither deleted nor replaced."""
        return len(self.dead) - int(np.count_nonzero(self.dead))

    def without(self, removed: NDArray[np.int64]) -> "SealedSegment":
        """Return the segment with these seqs dead as well."""
        return replace(self, dead=_marked(self.dead, self.seqs, removed))

    def barred(self, filter: Filter | None, excluded: NDArray[np.int64]) -> Mask:
        """Tell which items no answer may hold, bool (n,)."""
        barred = self.dead if filter is None else self.dead | ~self.columns.mask(filter)
        return _marked(barred, self.seqs, excluded)

    def nearest(self, queries: NDArray[np.float32], k: int, barred: Mask, *, by_label: bool) -> list[Near]:
        """Find candidates for the k best items that are not barred (n,), of each query (Q, d).

        An exact type finds all that are among them, or above the bound given; any other k items, if so many
        are allowed, the best as likely as its recall tells. With `by_label`, items of k labels.
        """
        labels = self.columns.label_codes if by_label else None
        index, size = self.index, len(barred)
        allowed = self.live if barred is self.dead else size - int(np.count_nonzero(barred))
        if index is None or not allowed:
            return [(np.empty(0, np.float32), np.empty(0, np.int64), -np.inf)] * len(queries)
        mask = ~barred if index.graph is not None and _WALKED * allowed < size else None
        # By chance more may be barred among those fetched than of all: two standard deviations.
        chance = 2 * math.sqrt(k * (size - allowed) / allowed) if mask is None else 0.0
        fetched = k + SPARE if index.exact else (k + chance) * _DEPTH
        count = min(size, math.ceil(fetched * size / allowed))
        near: dict[int, Near] = {}
        pending = list(range(len(queries)))
        while pending and not _is_dear(count, allowed, size, exact=index.exact):
            step, again = max(1, _PRODUCTS // count), list[int]()
            for start in range(0, len(pending), step):
                asked = pending[start : start + step]
                rows = queries if len(asked) == len(queries) else queries[asked]
                answers = zip(asked, *index.search(rows, count, mask), strict=True)
                for number, scores, found in answers:
                    floor, fetched = float(scores[-1]) if index.exact else -np.inf, len(found)
                    if allowed < size or found[-1] < 0:
                        passing = (found >= 0) & ~barred[found]
                        scores, found = scores[passing], found[passing]
                    trusted = found if index.exact else found[: math.ceil(len(found) / _DEPTH)]
                    if _is_enough(trusted, labels, k):
                        near[number] = scores, found, floor
                    elif index.exact or SPARSE * len(found) * size >= fetched * allowed:
                        again.append(number)
            pending = again
            count *= 2
        if missing := [number for number in range(len(queries)) if number not in near]:
            near.update(zip(missing, self._scored(queries[missing], k, barred, labels), strict=True))
        return [near[number] for number in range(len(queries))]

    def _scored(
        self, queries: NDArray[np.float32], k: int, barred: Mask, labels: NDArray[np.int32] | None
    ) -> Iterator[Near]:
        allowed = np.flatnonzero(~barred)
        own = None if labels is None else distinct(labels[allowed], allowed)
        step = max(1, _PRODUCTS // len(allowed))
        for start in range(0, len(queries), step):
            some, whole = queries[start : start + step], len(allowed) == len(self.vectors)
            for scores in some @ self.vectors.T if whole else _product(some, self.vectors, allowed):
                best = np.flatnonzero(scores >= kth(scores, k, own) - 2 * SCORE_ERROR)
                yield scores[best], allowed[best], -np.inf


def _is_dear(count: int, allowed: int, size: int, *, exact: bool) -> bool:
    """Tell whether it is cheaper to score all that are allowed of `size` than to fetch `count`."""
    if count * _LARGE > size:
        return True
    return allowed * _GATHERED < size if exact else allowed < count * _VISITED


def _is_enough(positions: NDArray[np.int64], labels: NDArray[np.int32] | None, k: int) -> bool:
    if labels is None or len(positions) < k:
        return len(positions) >= k
    return len(np.unique(distinct(labels[positions], positions))) >= k


@dataclass(frozen=True, slots=True)
class GrowingSegment:
    """The f items newer than the index, as they were written; what is appended makes a new segment."""

    vectors: NDArray[np.float32]  # (f, d), of unit norm
    seqs: NDArray[np.int64]  # (f,), ascending
    dead: Mask  # (f,): which are deleted or replaced
    labels: NDArray[np.int64]  # (f,): the number of each one's label; -1: it is empty
    known: TextTable  # the labels that are numbered by their place in the index's columns
    columns: tuple[Columns, ...] = ()  # in parts of falling size, so that n appends sort O(n log n) entries
    numbers: dict[str, int] = field(default_factory=dict)  # of all labels met; shared with those made of this

    @staticmethod
    def empty(dimension: int, known: TextTable) -> "GrowingSegment":
        """Return the segment of no item."""
        vectors, none = np.empty((0, dimension), np.float32), np.empty(0, np.int64)
        return GrowingSegment(vectors, none, np.zeros(0, np.bool_), none.copy(), known)

    def advanced(self, blocks: Iterable[Block], removed: NDArray[np.int64], path: Path) -> "GrowingSegment":
        """Return these items and newer ones of the file `path`, with the removed seqs dead."""
        vectors, seqs, labels, added = self.vectors, self.seqs, self.labels, []
        for block in blocks:
            with sound(path, "the metadata of an item in it"):
                added.append(Columns.of(block.labels, block.metadata))
            vectors, seqs = _appended(vectors, block.vectors), _appended(seqs, block.seqs)
            labels = _appended(labels, np.array([self._number(label) for label in block.labels], np.int64))
        columns = list(self.columns)
        if added:
            columns.append(Columns.joined(added) if len(added) > 1 else added[0])
        while len(columns) > 1 and len(columns[-2]) < 2 * len(columns[-1]):
            columns[-2:] = [Columns.joined(columns[-2:])]
        dead = np.zeros(len(seqs), np.bool_)
        dead[: len(self.dead)] = self.dead
        dead = _marked(dead, seqs, removed)
        return replace(self, vectors=vectors, seqs=seqs, labels=labels, dead=dead, columns=tuple(columns))

    def barred(self, filter: Filter | None, excluded: NDArray[np.int64]) -> Mask:
        """Tell which items no answer may hold, bool (f,)."""
        barred = self.dead
        if filter is not None and self.columns:
            barred = barred | ~np.concatenate([part.mask(filter) for part in self.columns])
        return _marked(barred, self.seqs, excluded)

    def scores(self, queries: NDArray[np.float32], barred: Mask) -> NDArray[np.float32]:
        """Return the scores of queries (Q, d) with all, (Q, f); minus infinity for the barred (f,)."""
        if not len(barred):
            return np.empty((len(queries), 0), np.float32)
        allowed = np.flatnonzero(~barred)
        if _GATHERED * len(allowed) < len(barred):
            scores = np.full((len(queries), len(barred)), -np.inf, np.float32)
            scores[:, allowed] = _product(queries, self.vectors, allowed)
        else:
            scores = _product(queries, self.vectors, np.arange(len(barred)))
            scores[:, barred] = -np.inf
        return scores

    def _number(self, label: str) -> int:
        if not label:
            return -1
        if label not in self.numbers:
            place = self.known.find(label)
            self.numbers[label] = len(self.known) + len(self.numbers) if place is None else place
        return self.numbers[label]


def _marked(dead: Mask, seqs: NDArray[np.int64], removed: NDArray[np.int64]) -> Mask:
    """Return `dead` (n,) with the removed among the ascending `seqs` (n,) marked as well."""
    if not len(removed) or not len(seqs):
        return dead
    positions = np.searchsorted(seqs, removed)
    positions[positions == len(seqs)] = 0
    marked = dead.copy()
    marked[positions[seqs[positions] == removed]] = True
    return marked


def _appended(rows: NDArray[T], more: NDArray[T]) -> NDArray[T]:
    """Return `rows` and `more` in one array with room behind it, so that n appends copy O(n) rows in all."""
    # Only the newest view is extended: the room behind its rows is free, and older ones look at theirs alone.
    size = len(rows) + len(more)
    whole = rows.base if isinstance(rows.base, np.ndarray) else rows
    if whole.dtype != rows.dtype or whole.shape[1:] != rows.shape[1:] or len(whole) < size:
        whole = np.empty((max(1024, 2 * size), *rows.shape[1:]), rows.dtype)
        whole[: len(rows)] = rows
    whole[len(rows) : size] = more
    return whole[:size]


def distinct(labels: NDArray[np.int32] | NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return labels (c,) in which each empty one, -1, is one of its own, told by the item's place (c,)."""
    return np.where(labels < 0, -1 - places, labels)


def _product(
    queries: NDArray[np.float32], vectors: NDArray[np.float32], positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the scores of queries (Q, d) with the vectors (n, d) at ascending positions (c,), (Q, c)."""
    if len(queries) == 1:
        return inner_products(queries[0], vectors, positions)[None]
    scores = np.empty((len(queries), len(positions)), np.float32)
    for start in range(0, len(positions), _ROWS):
        rows = slice(start, start + _ROWS)
        block = vectors[rows] if len(positions) == len(vectors) else vectors[positions[rows]]  # gathered
        scores[:, rows] = queries @ block.T
    return scores


def rescore(query: NDArray[np.float64], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return inner products of (d,) and (c, d), float32 (c,), summed in float64.

    They do not depend on where an item is kept, nor on how many queries came together (FAISS's do:
    faiss#563).
    """
    starts = range(0, max(1, len(vectors)), _ROWS)
    sums = [np.add.reduce(vectors[start : start + _ROWS] * query, axis=1) for start in starts]
    return np.concatenate(sums, dtype=np.float32, casting="same_kind")


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


def firsts_ranked(
    scores: NDArray[np.float32], k: int, least: float, labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return where the best of the k best labels (c,) stand, best first, by scores (c,) of `least` or more.

    That is all that no other of their label is better than, and that are as good as the last of them.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= max(kth(scores, k, labels), least)]
    own, inverse = labels[order], np.unique(labels[order], return_inverse=True)[1]
    best: NDArray[np.int64] = order[scores[order] == scores[order[_firsts(scores[order], own)]][inverse]]
    return best


def _firsts(scores: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a best one of each label stands, int64 (labels,), in the order of the labels."""
    order = np.argsort(-scores, kind="stable")
    return order[np.unique(labels[order], return_index=True)[1]]
