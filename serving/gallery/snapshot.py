"""One state of a gallery in memory: an index, what is newer than it, and what of both is deleted.

A snapshot never changes; `advanced` makes the next one. A search that holds one sees the state it stands for,
whatever happens meanwhile.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index import SCORE_ERROR, Index
from serving.gallery.transaction import Reader, State

__all__ = ["Snapshot", "load_snapshot"]

T = TypeVar("T", bound=np.generic)

_SPARE = 16  # fetched beyond k at first, for ties and deleted items
_PRODUCTS = 1 << 22  # entries of a matrix of scores made at once
_ROWS = 4096  # vectors scored exactly at once
_NONE = -2.0  # below every cosine, above the score of a deleted item


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, ready to search; arrays are views that no later snapshot writes to.

    Attributes:
        state: The state it stands for.
        generation: The publication that `main` comes from; that of the state, or the one before.
        main: The published index over n items, or None.
        main_dead: Which of its positions are deleted or replaced, bool (n,).
        fresh: Unit vectors newer than the index, float32 (f, d).
        fresh_seqs: Their seqs, int64 (f,), ascending.
        fresh_dead: Which of them are deleted or replaced, bool (f,).
        damaged: The published index could not be read, and everything is in `fresh`.
    """

    state: State
    generation: int
    main: Index | None
    main_dead: NDArray[np.bool_]
    fresh: NDArray[np.float32]
    fresh_seqs: NDArray[np.int64]
    fresh_dead: NDArray[np.bool_]
    damaged: bool = False

    @property
    def count(self) -> int:
        """The number of live items."""
        return self.main_dead.size + self.fresh_dead.size - self.dead_count

    @property
    def dead_count(self) -> int:
        """The number of deleted or replaced vectors that are still held."""
        return int(self.main_dead.sum()) + int(self.fresh_dead.sum())

    def follows(self, state: State) -> bool:
        """Tell whether the store keeps all that has happened between this snapshot and a later state.

        It keeps the removals since the publication before the last, so one publication can be passed.
        """
        return state.generation - self.generation <= 1

    def advanced(self, state: State, reader: Reader) -> "Snapshot":
        """Return the snapshot of a later state that it follows to, read in the same transaction."""
        removed = reader.removals_since(self.state.last_removal)
        seqs, fresh = self.fresh_seqs, self.fresh
        for block in reader.blocks_since(self.state.last_seq):
            seqs, fresh = _appended(seqs, block.seqs), _appended(fresh, block.vectors)
        main_dead = _marked(self.main_dead, self.main.seqs, removed) if self.main else self.main_dead
        grown = np.zeros(len(seqs), np.bool_)
        grown[: len(self.fresh_dead)] = self.fresh_dead
        return replace(
            self,
            state=state,
            main_dead=main_dead,
            fresh=fresh,
            fresh_seqs=seqs,
            fresh_dead=_marked(grown, seqs, removed),
        )

    def search(
        self, queries: NDArray[np.float32], k: int, *, minimum_score: float, excluded: Collection[int]
    ) -> list[list[tuple[int, float]]]:
        """Find, for each unit query (Q, d), every item that may be among its k best.

        Returns:
            For each query pairs (seq, score), best first: the k best, and everything that ties with the last
            of them. Scores are summed in float64, so they do not depend on where an item is kept or on how
            many queries came together (FAISS's do: faiss#563).
        """
        main_dead, fresh_dead = self.main_dead, self.fresh_dead
        if excluded:
            seqs = np.array(sorted(excluded), np.int64)
            main_dead = _marked(main_dead, self.main.seqs, seqs) if self.main else main_dead
            fresh_dead = _marked(fresh_dead, self.fresh_seqs, seqs)
        found = []
        step = max(1, _PRODUCTS // max(1, len(self.fresh_seqs), k + _SPARE))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            fresh = self._fresh_scores(block, fresh_dead)
            near = self._near(block, k, main_dead)
            for query, scores, (main_scores, positions, floor) in zip(block, fresh, near, strict=True):
                least = _kth(np.concatenate([main_scores, scores]), k)
                least = max(least, minimum_score, _NONE) - SCORE_ERROR
                if floor > least:  # something that was not fetched may belong
                    positions = self._all_above(query, least, main_dead)
                newer = np.flatnonzero(scores >= least)
                found.append(self._ranked(query, positions, newer, k, minimum_score))
        return found

    def _fresh_scores(self, queries: NDArray[np.float32], dead: NDArray[np.bool_]) -> NDArray[np.float32]:
        scores = queries @ self.fresh.T  # (Q, f)
        scores[:, dead] = -np.inf
        return scores

    def _near(
        self, queries: NDArray[np.float32], k: int, dead: NDArray[np.bool_]
    ) -> list[tuple[NDArray[np.float32], NDArray[np.int64], float]]:
        """Return, per query, scores and positions of live items of the index, and a bound on the others'."""
        if self.main is None:
            return [(np.empty(0, np.float32), np.empty(0, np.int64), -np.inf)] * len(queries)
        count = min(len(self.main), k + _SPARE)
        near: list[tuple[NDArray[np.float32], NDArray[np.int64], float]] = []
        while len(near) < len(queries):
            # Those before are done. Deleted items are dealt with out here, since not every index type can
            # skip them: where they leave too few, more are fetched for the queries that remain.
            scores, positions = self.main.search(queries[len(near) :], count)
            complete = count == len(self.main)
            for row_scores, row in zip(scores, positions, strict=True):
                live = ~dead[row]
                if live.sum() < k and not complete:
                    break
                near.append((row_scores[live], row[live], -np.inf if complete else float(row_scores[-1])))
            count = min(len(self.main), 2 * count)
        return near

    def _all_above(
        self, query: NDArray[np.float32], least: float, dead: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        assert self.main is not None  # noqa: S101 - impossible: the caller has asked
        positions = self.main.within(query, least - SCORE_ERROR)
        return positions[~dead[positions]]

    def _ranked(
        self,
        query: NDArray[np.float32],
        main: NDArray[np.int64],
        fresh: NDArray[np.int64],
        k: int,
        minimum_score: float,
    ) -> list[tuple[int, float]]:
        seqs, scores = [self.fresh_seqs[fresh]], [_exact(query, self.fresh[fresh])]
        if self.main is not None and len(main):
            seqs.append(self.main.seqs[main])
            scores.append(_exact(query, self.main.vectors(main)))
        every_seq, every_score = np.concatenate(seqs), np.concatenate(scores)
        least = max(_kth(every_score, k), minimum_score)
        order = np.argsort(-every_score, kind="stable")
        order = order[every_score[order] >= least]
        return list(zip(every_seq[order].tolist(), every_score[order].tolist(), strict=True))


def load_snapshot(
    state: State, reader: Reader, *, dimension: int, main: Index | None, damaged: bool
) -> Snapshot:
    """Return the snapshot of a state from its index; without one, everything is read from the store."""
    covers = replace(state, last_seq=state.covers_seq, last_removal=state.covers_removal)
    if main is None:
        covers = replace(state, last_seq=0)  # what was removed is not there to be read
    empty = Snapshot(
        state=covers,
        generation=state.generation,
        main=main,
        main_dead=np.zeros(len(main) if main else 0, np.bool_),
        fresh=np.empty((0, dimension), np.float32),
        fresh_seqs=np.empty(0, np.int64),
        fresh_dead=np.zeros(0, np.bool_),
        damaged=damaged,
    )
    return empty.advanced(state, reader)


def _exact(query: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return inner products of (d,) and (c, d), float32 (c,), each the same wherever its row stands."""
    scores = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        scores[rows] = (vectors[rows] * query.astype(np.float64)).sum(axis=1)
    return scores


def _kth(scores: NDArray[np.float32], k: int) -> float:
    """Return the k-th largest score, or minus infinity where there are fewer."""
    return float(np.partition(scores, -k)[-k]) if len(scores) >= k else -np.inf


def _marked(
    dead: NDArray[np.bool_], seqs: NDArray[np.int64], removed: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return `dead` (n,) with the removed among the ascending `seqs` (n,) marked as well."""
    if not len(removed) or not len(seqs):
        return dead
    positions = np.searchsorted(seqs, removed)
    positions[positions == len(seqs)] = 0
    marked = dead.copy()
    marked[positions[seqs[positions] == removed]] = True
    return marked


def _appended(rows: NDArray[T], more: NDArray[T]) -> NDArray[T]:
    """Return `rows` and `more` in one array with room behind it, so that n appends copy O(n) rows in all.

    Only the newest snapshot is ever extended, so the room behind its rows is free; older snapshots do not
    look beyond theirs.
    """
    size = len(rows) + len(more)
    whole = rows.base if isinstance(rows.base, np.ndarray) else rows
    if whole.dtype != rows.dtype or whole.shape[1:] != rows.shape[1:] or len(whole) < size:
        whole = np.empty((max(1024, 2 * size), *rows.shape[1:]), rows.dtype)
        whole[: len(rows)] = rows
    whole[len(rows) : size] = more
    return whole[:size]
