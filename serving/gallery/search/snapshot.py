"""One state of a gallery in memory: an index, what is newer than it, and what of both is deleted.

A snapshot never changes; `advanced` makes the next one. A search that holds one sees the state it stands for,
whatever happens meanwhile.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.index import SCORE_ERROR, Index
from serving.gallery.search.columns import Columns
from serving.gallery.search.covered import Covered
from serving.gallery.search.filter import LABEL, Filter
from serving.gallery.search.fresh import Fresh, marked
from serving.gallery.search.ranking import distinct, exact_scores, kth, nothing, ranked
from serving.gallery.search.texts import Texts
from serving.gallery.store.transaction import Reader, State

__all__ = ["Snapshot", "load_snapshot"]

_PRODUCTS = 1 << 22  # entries of a matrix of scores made at once
_NONE = -2.0  # below every cosine, above the score of an item that is not allowed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, ready to search; arrays are views that no later snapshot writes to.

    An item's place is its position in the index, or behind the n of that, in the fresh part.

    Attributes:
        state: The state it stands for.
        path: The gallery file.
        generation: The publication that `covered` comes from; that of the state, or the one before.
        covered: The published index over n items and their columns, or None.
        main_dead: Which of its positions are deleted or replaced, bool (n,).
        fresh: The f items newer than the index.
        damaged: The published files could not be read, and everything is in `fresh`.
    """

    state: State
    path: Path
    generation: int
    covered: Covered | None
    main_dead: NDArray[np.bool_]
    fresh: Fresh
    damaged: bool = False

    @property
    def main(self) -> Index | None:
        """The published index, or None."""
        return self.covered.index if self.covered else None

    @property
    def fresh_dead(self) -> NDArray[np.bool_]:
        """Which of the fresh items are deleted or replaced, bool (f,)."""
        return self.fresh.dead

    @property
    def count(self) -> int:
        """The number of live items."""
        return self.main_dead.size + len(self.fresh) - self.dead_count

    @property
    def dead_count(self) -> int:
        """The number of deleted or replaced vectors that are still held."""
        return int(np.count_nonzero(self.main_dead)) + int(np.count_nonzero(self.fresh.dead))

    def follows(self, state: State) -> bool:
        """Tell whether the store keeps all that has happened between this snapshot and a later state.

        It keeps the removals since the publication before the last, so one publication can be passed.
        """
        return state.generation - self.generation <= 1

    def advanced(self, state: State, reader: Reader) -> "Snapshot":
        """Return the snapshot of a later state that it follows to, read in the same transaction.

        Raises:
            BadArtifact: The gallery file is damaged.
        """
        removed = reader.removals_since(self.state.last_removal)
        return replace(
            self,
            state=state,
            main_dead=self._marked_main(self.main_dead, removed),
            fresh=self.fresh.advanced(reader.blocks_since(self.state.last_seq), removed, self.path),
        )

    def kinds_of(self, field: str) -> frozenset[str] | None:
        """Return the kinds of value that a field holds, or None where no item has it."""
        if field == LABEL:
            return frozenset({"string"})
        found = [part.fields[field] for part in self._columns() if field in part.fields]
        return frozenset().union(*found) if found else None

    def fields(self) -> dict[str, tuple[str, ...]]:
        """Return the fields that items have, or deleted ones had, and the kinds of value of each, sorted."""
        names = {name for part in self._columns() for name in part.fields if name != LABEL}
        return {name: tuple(sorted(self.kinds_of(name) or ())) for name in sorted(names)}

    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        *,
        minimum_score: float,
        excluded: Collection[int] = (),
        filter: Filter | None = None,
        by_label: bool = False,
    ) -> list[list[tuple[int, float]]]:
        """Find, for each unit query (Q, d), every item that may be among its k best.

        Args:
            queries: float32 (Q, d).
            k: How many items; with `by_label`, how many labels.
            minimum_score: The least score.
            excluded: The seqs of items that are passed over.
            filter: What the items must fulfil, checked.
            by_label: Whether only the best item of each label counts; those without one count each.

        Returns:
            For each query pairs (seq, score), best first: the k best, and everything that ties with the last
            of them, or with the best one of its label. Scores are summed in float64. Of an approximate index
            it is the k best that the index finds; never fewer than there are.
        """
        main_barred, fresh_barred = self.main_dead, self.fresh.dead
        if filter is not None:
            if self.covered:
                main_barred = main_barred | ~self.covered.columns.mask(filter)
            fresh_barred = fresh_barred | ~self.fresh.mask(filter)
        if excluded:
            seqs = np.array(sorted(excluded), np.int64)
            main_barred = self._marked_main(main_barred, seqs)
            fresh_barred = marked(fresh_barred, self.fresh.seqs, seqs)
        found = []
        step = max(1, _PRODUCTS // max(1, len(self.fresh), k))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            near = self.covered.nearest(block, k, main_barred, by_label=by_label) if self.covered else None
            newer = self.fresh.scores(block, fresh_barred)
            for number, query in enumerate(block):
                candidates, floor = near[number] if near else (nothing(), -np.inf)
                places, least = self._among(*candidates, newer[number], k, minimum_score, by_label)
                if floor > least:  # something that was not fetched may belong
                    places = np.union1d(places, self._all_above(query, least, main_barred))
                found.append(self._ranked(query, places, k, minimum_score, by_label))
        return found

    def _columns(self) -> Iterator[Columns]:
        if self.covered:
            yield self.covered.columns
        yield from self.fresh.columns

    def _marked_main(self, dead: NDArray[np.bool_], seqs: NDArray[np.int64]) -> NDArray[np.bool_]:
        return marked(dead, self.covered.index.seqs, seqs) if self.covered else dead

    def _among(
        self,
        scores: NDArray[np.float32],
        places: NDArray[np.int64],
        newer: NDArray[np.float32],
        k: int,
        minimum_score: float,
        by_label: bool,
    ) -> tuple[NDArray[np.int64], float]:
        """Return which of the index's candidates and of the fresh items (f,) may be among the k best.

        Returns:
            Their places, and the score from which on an item may.
        """
        least = max(kth(scores, k, self._labels(places, by_label)), minimum_score, _NONE)
        if len(newer):
            passing = np.flatnonzero(newer >= least - SCORE_ERROR)
            scores = np.concatenate([scores, newer[passing]])
            places = np.concatenate([places, passing + self.main_dead.size])
            least = max(kth(scores, k, self._labels(places, by_label)), least)
        least -= SCORE_ERROR
        return places[scores >= least], least

    def _all_above(
        self, query: NDArray[np.float32], least: float, barred: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        assert self.covered is not None  # noqa: S101 - impossible: it has given a bound
        positions = self.covered.index.within(query, least - SCORE_ERROR)
        return positions[~barred[positions]]

    def _labels(self, places: NDArray[np.int64], by_label: bool) -> NDArray[np.int64] | None:
        """Return the number of each place's label (c,), an empty one as one of its own; None if not asked."""
        if not by_label:
            return None
        is_main = places < self.main_dead.size
        labels = np.empty(len(places), np.int64)
        if self.covered:
            labels[is_main] = self.covered.columns.label_codes[places[is_main]]
        labels[~is_main] = self.fresh.labels[places[~is_main] - self.main_dead.size]
        return distinct(labels, places)

    def _ranked(
        self, query: NDArray[np.float32], places: NDArray[np.int64], k: int, least: float, by_label: bool
    ) -> list[tuple[int, float]]:
        is_main = places < self.main_dead.size
        newer = places[~is_main] - self.main_dead.size
        places = np.concatenate([places[is_main], newer + self.main_dead.size])
        seqs, scores = [self.fresh.seqs[newer]], [exact_scores(query, self.fresh.vectors[newer])]
        if self.covered:
            main = places[: len(places) - len(newer)]
            seqs.insert(0, self.covered.index.seqs[main])
            scores.insert(0, exact_scores(query, self.covered.index.matrix[main]))
        score = np.concatenate(scores)
        order = ranked(score, k, least, self._labels(places, by_label))
        return list(zip(np.concatenate(seqs)[order].tolist(), score[order].tolist(), strict=True))


def load_snapshot(
    state: State, reader: Reader, *, path: Path, dimension: int, covered: Covered | None, damaged: bool
) -> Snapshot:
    """Return the snapshot of a state from its index; without one, everything is read from the store."""
    covers = replace(state, last_seq=state.covers_seq, last_removal=state.covers_removal)
    if covered is None:
        covers = replace(state, last_seq=0)  # what was removed is not there to be read
    empty = Snapshot(
        state=covers,
        path=path,
        generation=state.generation,
        covered=covered,
        main_dead=np.zeros(len(covered) if covered else 0, np.bool_),
        fresh=Fresh.none(dimension, covered.columns.label_names if covered else Texts.of([])),
        damaged=damaged,
    )
    return empty.advanced(state, reader)
