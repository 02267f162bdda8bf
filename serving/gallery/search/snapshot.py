"""One state of a gallery in memory, and how what is in memory follows the store.

A snapshot never changes; `advanced` makes the next one. A search that holds one sees the state it stands for,
whatever happens meanwhile.
"""

import json
import logging
import sys
import threading
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.errors import Overloaded
from serving.gallery.index.index import SCORE_ERROR, IndexDamaged
from serving.gallery.index.rebuild import Rebuilder
from serving.gallery.item import Neighbour
from serving.gallery.search.columns import Columns, Mask
from serving.gallery.search.filter import LABEL, Filter, check_kinds
from serving.gallery.search.segment import (
    GrowingSegment,
    Near,
    SealedSegment,
    distinct,
    firsts_ranked,
    kth,
    rescore,
)
from serving.gallery.store.schema import UNREADABLE, unreadable
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import NAMED, Reader, State, Texts

__all__ = ["RowCache", "Snapshot", "SnapshotCache", "open_sealed"]

Row = tuple[str, str, str, dict[str, Any]]
"""Key, label, URI and metadata of an item."""

_PATIENCE = 10.0  # seconds to wait for the index that another caller loads
_PRODUCTS = 1 << 22  # entries of a matrix of scores made at once
_MOST_BYTES = 1 << 25  # of the rows of hits that are kept of one gallery
_BESIDE = 200  # bytes that one takes beside its texts: a tuple, a number, its place in a dictionary
_NONE = -2.0  # below every cosine, above the score of an item that is not allowed

T = TypeVar("T", bound=np.generic)

_log = logging.getLogger(__name__)


class RowCache:
    """Texts of items that were found lately, by seq, of one gallery file; thread-safe.

    A replaced item has another seq, so what is kept of one never changes, and serves every state of that
    file. Metadata is kept as JSON: its size is known, and what a caller does to a hit stays with that hit.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """Keep nothing yet, and never more than so many bytes and one item."""
        self._half = most_bytes // 2
        self._guard = threading.Lock()  # of writing to the three below
        self._newer: dict[int, Texts] = {}  # when they are half of what may be kept they become the older
        self._older: dict[int, Texts] = {}
        self._bytes = 0  # of the newer

    def find(self, seqs: Set[int], reader: Reader) -> dict[int, Row]:
        """Return the rows of items by their seqs, which are live in the reader's state."""
        newer, older = self._newer, self._older
        texts = {seq: newer[seq] for seq in seqs if seq in newer}
        if len(texts) < len(seqs):
            entering = {seq: older[seq] for seq in seqs - texts.keys() if seq in older}
            entering |= reader.texts(seqs - texts.keys() - entering.keys())
            self._keep(entering)
            texts |= entering
        try:
            metadata = json.loads(f"[{','.join([each[3] for each in texts.values()])}]")  # at once: quicker
            if not {*map(type, metadata)} <= {dict}:
                raise TypeError("its metadata is no JSON object")
            pairs = zip(texts.items(), metadata, strict=True)
            return {seq: (*each[:3], held) for (seq, each), held in pairs}
        except UNREADABLE as error:
            raise unreadable(reader.path, NAMED, error) from error

    def _keep(self, texts: dict[int, Texts]) -> None:
        with self._guard:
            for seq, each in texts.items():
                if seq in self._newer:
                    continue
                self._newer[seq] = each
                self._bytes += _BESIDE + sum(map(sys.getsizeof, each))
                if self._bytes >= self._half:
                    self._newer, self._older, self._bytes = {}, self._newer, 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, ready to search; arrays are views that no later snapshot writes to.

    An item's place is its position in the sealed segment, or behind the n of that, in the growing one.
    """

    state: State
    generation: int  # the publication that `sealed` comes from: that of the state, or the one before
    sealed: SealedSegment  # what the published index covers
    growing: GrowingSegment  # the f items newer than that
    damaged: bool = False  # the published files could not be read, and everything is in `growing`
    rows: RowCache = field(default_factory=RowCache)  # shared with those advanced from this one

    @property
    def dead(self) -> Mask:
        """Which of the items held are deleted or replaced, bool (n + f,)."""
        return np.concatenate([self.sealed.dead, self.growing.dead])

    def advanced(self, state: State, reader: Reader) -> "Snapshot":
        """Return the snapshot of a later state, read in the same transaction."""
        removed = reader.removals_since(self.state.last_removal)
        newer = reader.blocks_since(self.state.last_seq)
        return replace(
            self,
            state=state,
            sealed=self.sealed.without(removed),
            growing=self.growing.advanced(newer, removed, reader.path),
        )

    def kinds_of(self, field: str) -> frozenset[str] | None:
        """Return the kinds of value that a field holds, or None where no item has it."""
        if field == LABEL:
            return frozenset({"string"})
        parts = self.sealed.columns, *self.growing.columns
        found = [part.fields[field] for part in parts if field in part.fields]
        return frozenset().union(*found) if found else None

    def check(self, filter: Filter | None) -> None:
        """Refuse a checked filter that compares a field with a kind of value that no item holds there."""
        if filter is not None and not self.dead.all():
            check_kinds(filter, self.kinds_of)

    def numbers(self, field: str) -> NDArray[np.float32]:
        """Return the number that each item held has in a field, (n + f,); NaN where it has none."""
        return np.concatenate([part.numbers(field) for part, _ in self.columns()])

    def count(self, filter: Filter | None) -> int:
        """Return how many items fulfil a filter; all of them with none."""
        return sum(int(np.count_nonzero(mask)) for mask in self._passing(filter))

    def places(self, filter: Filter | None = None) -> NDArray[np.int64]:
        """Return the places (c,), ascending, of the items that fulfil a filter; of all with none."""
        return np.flatnonzero(np.concatenate(self._passing(filter)))

    def columns(self) -> list[tuple[Columns, Mask]]:
        """Return the columns of all items in parts, and which of a part's n are deleted or replaced, (n,)."""
        growing = self.growing.columns
        ends = np.cumsum([len(part) for part in growing])[:-1]
        deads = np.split(self.growing.dead, ends) if growing else []
        return [(self.sealed.columns, self.sealed.dead), *zip(growing, deads, strict=True)]

    def neighbours(
        self,
        reader: Reader,
        found: Sequence[list[tuple[int, float]]],
        k: int,
        *,
        by_label: bool,
        vectors: bool,
        thumbnails: bool,
    ) -> list[list[Neighbour]]:
        """Return the best k of what was found for each query, seqs and scores: ties in the order of keys.

        With `by_label` it is the best of each label; one without stands for itself.
        """
        rows = self.rows.find({seq for near in found for seq, _ in near}, reader)
        units = {seq: self.vector(seq) for seq in rows} if vectors else {}
        pictures = {seq: reader.thumbnail(row[0]) for seq, row in rows.items()} if thumbnails else {}
        answers = []
        for near in found:
            ranked = sorted(near, key=lambda each: (-each[1], rows[each[0]][0]))
            if by_label:
                first: dict[str | int, tuple[int, float]] = {}
                for seq, score in ranked:
                    first.setdefault(rows[seq][1] or seq, (seq, score))
                ranked = list(first.values())
            # A score is a cosine, though vectors are of unit length but for rounding.
            cut = [(i, max(-1.0, min(1.0, score))) for i, score in ranked[:k]]
            answers.append([Neighbour(*rows[i], s, i, units.get(i), pictures.get(i, b"")) for i, s in cut])
        return answers

    def vector(self, seq: int) -> NDArray[np.float32]:
        """Return the vector (d,) of an item that is held."""
        part = self.growing if len(self.growing.seqs) and seq >= self.growing.seqs[0] else self.sealed
        found: NDArray[np.float32] = part.vectors[np.searchsorted(part.seqs, seq)]
        return found

    def vectors(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors (c, d) at places (c,)."""
        return self._at(places, self.sealed.vectors, self.growing.vectors)

    def seqs(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the seqs (c,) at places (c,)."""
        return self._at(places, self.sealed.seqs, self.growing.seqs)

    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        minimum_score: float = _NONE,
        excluded: Collection[int] = (),
        filter: Filter | None = None,
        *,
        by_label: bool = False,
    ) -> list[list[tuple[int, float]]]:
        """Find, for each unit query (Q, d), all that may be its k best, best first: (seq, score).

        That is everything that ties with the last of them, too, or with the best one of its label where only
        that counts (`by_label`); those without a label count each. Scores are summed in float64. Of an
        approximate index it is the k best that the index finds; never fewer than there are.
        """
        seqs = np.array(sorted(excluded), np.int64)
        barred = self.sealed.barred(filter, seqs)
        newer_barred = self.growing.barred(filter, seqs)
        found = []
        step = max(1, _PRODUCTS // max(1, len(newer_barred), k))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            newer = self.growing.scores(block, newer_barred)
            near = self.sealed.nearest(block, k, barred, by_label=by_label)
            for query, candidates, scores in zip(block.astype(np.float64), near, newer, strict=True):
                found.append(self._best(query, k, minimum_score, barred, candidates, scores, by_label))
        return found

    def _best(
        self,
        query: NDArray[np.float64],
        k: int,
        minimum: float,
        barred: Mask,
        near: Near,
        newer: NDArray[np.float32],
        by_label: bool,
    ) -> list[tuple[int, float]]:
        """Rank what is near in the sealed segment, and the growing items by their scores `newer` (f,)."""
        scores, places, floor = near
        sealed, count = self.sealed, len(barred)
        least = max(kth(scores, k, self._labels(places) if by_label else None), minimum, _NONE)
        if len(newer):
            passing = np.flatnonzero(newer >= least - SCORE_ERROR)
            scores = np.concatenate([scores, newer[passing]])
            places = np.concatenate([places, passing + count])
            least = max(kth(scores, k, self._labels(places) if by_label else None), least)
        least -= SCORE_ERROR
        places = places[scores >= least]
        if floor > least and sealed.index:  # something that was not fetched may belong
            others = sealed.index.within(query.astype(np.float32), least - SCORE_ERROR)
            places = np.union1d(places, others[~barred[others]])
        exact = rescore(query, self.vectors(places))
        pairs = list(zip(self.seqs(places).tolist(), exact.tolist(), strict=True))
        if by_label:
            return [pairs[at] for at in firsts_ranked(exact, k, minimum, self._labels(places))]
        pairs.sort(key=itemgetter(1), reverse=True)
        last = max(minimum, pairs[k - 1][1]) if len(pairs) >= k else minimum
        return [pair for pair in pairs if pair[1] >= last]

    def _labels(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the label of each place (c,), sealed ones first; an empty one has its own."""
        count = len(self.sealed.dead)
        main = self.sealed.columns.label_codes[places[places < count]]
        return distinct(np.concatenate([main, self.growing.labels[places[places >= count] - count]]), places)

    def _at(self, places: NDArray[np.int64], sealed: NDArray[T], growing: NDArray[T]) -> NDArray[T]:
        if not len(growing):
            return sealed[places]  # `take` would copy all of a mapped file that is not aligned
        found = np.empty((len(places), *sealed.shape[1:]), sealed.dtype)
        newer = places >= len(sealed)
        found[~newer], found[newer] = sealed[places[~newer]], growing[places[newer] - len(sealed)]
        return found

    def _passing(self, filter: Filter | None) -> list[Mask]:
        none = np.empty(0, np.int64)
        return [~part.barred(filter, none) for part in (self.sealed, self.growing)]


def open_sealed(store: Store, state: State, *, device: str = "cpu") -> tuple[SealedSegment, str] | None:
    """Return what the index of a state covers; nothing, and why, where it is damaged.

    None tells that a newer index was published before this one could be opened.
    """
    sealed = SealedSegment.empty(store.meta.dimension)
    if state.index_file:
        file = store.path.parent / state.index_file
        try:
            sealed = SealedSegment.load(file, state, store.meta.dimension, device=device)
        except IndexDamaged as error:
            store.check_name()  # or the file was looked for in another gallery
            with store.read() as newer:
                if newer.state().generation != state.generation:
                    return None
            return sealed, str(error)
    return sealed, ""


class SnapshotCache:
    """The newest snapshot of one store, brought to the state of each read transaction; thread-safe."""

    def __init__(self, store: Store, rebuilder: Rebuilder, *, device: str = "cpu") -> None:
        self._store = store
        self._device = device
        self._rebuilder = rebuilder
        self._guard = threading.Lock()  # of the three fields below
        self._snapshot: Snapshot | None = None
        self._is_due = False  # whether the index of that snapshot is to be made anew
        self._retired = False
        self._loading = threading.Lock()  # held by the one caller that loads an index

    @contextmanager
    def open(self) -> Iterator[tuple[Snapshot, Reader]]:
        """Begin a read transaction and bring the snapshot to the state that it sees."""
        while True:
            with self._store.read() as reader:
                snapshot = self._current(reader)
                if snapshot is not None:
                    if self._is_due:
                        self._rebuilder.consider(snapshot.state, damaged=snapshot.damaged)
                    yield snapshot, reader
                    return

    def retire(self) -> None:
        """Keep nothing in memory from now on."""
        with self._guard:
            self._retired, self._snapshot = True, None

    def _current(self, reader: Reader) -> Snapshot | None:
        """Return the snapshot of the reader's state; None if it is to look again in a new transaction."""
        # A newly published index is loaded by one caller, outside the lock, since verifying it takes long.
        # The others go on with the one before it, brought to their own state, so that they miss no write.
        with self._guard:
            known = self._snapshot  # read before the store, so that it is never of a later state
            settled = known is not None and known.generation == known.state.generation
            if known is not None and settled and reader.change() == known.state.change:
                return known
            state = reader.state()
            if known is not None and known.state.change != state.change:
                # A change that was counted back shows that an older file was put in this one's place. The
                # store keeps the removals since the publication before the last: one can be passed.
                ahead = known.state.change < state.change and state.generation - known.generation <= 1
                known = known.advanced(state, reader) if ahead else None
            if known is not None and known is not self._snapshot:
                self._keep(known)
            before = self._snapshot
        if known is not None and known.generation == state.generation:
            return known
        if not self._loading.acquire(timeout=0 if known else _PATIENCE):
            if known is not None:
                return known
            busy = f"the index of {self._store.path.parent} is being loaded for a long time; try again"
            raise Overloaded(busy, retry_after=1.0)
        try:
            with self._guard:
                newest = self._snapshot
            if newest is not before and newest is not None and newest.generation >= state.generation:
                return None  # somebody else has loaded it in the meantime
            loaded = self._load(state, reader)
            if loaded is not None:
                with self._guard:
                    self._keep(loaded)  # others may be at a later state by now: they catch up again
            return loaded
        finally:
            self._loading.release()

    def _keep(self, snapshot: Snapshot) -> None:
        if not self._retired:
            self._snapshot = snapshot
            self._is_due = snapshot.damaged or self._rebuilder.policy.is_due(snapshot.state)

    def _load(self, state: State, reader: Reader) -> Snapshot | None:
        """Return the snapshot of another generation, or None if a newer one was published meanwhile."""
        found = open_sealed(self._store, state, device=self._device)
        if found is None:
            return None
        sealed, damage = found
        if damage:
            name = self._store.path.parent.name
            _log.warning("the index of the gallery %s is made anew from its store: %s", name, damage)
        # Without an index everything is read from the store, where what was removed is no more.
        last_seq = 0 if sealed.index is None else state.covers_seq
        covered = replace(state, last_seq=last_seq, last_removal=state.covers_removal)
        growing = GrowingSegment.empty(self._store.meta.dimension, sealed.columns.texts)
        return Snapshot(covered, state.generation, sealed, growing, bool(damage)).advanced(state, reader)
