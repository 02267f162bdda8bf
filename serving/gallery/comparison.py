"""An index held against the items it was made of, in one pass over them in the order of their seqs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.gallery.index.index import Index
from serving.gallery.search.columns import Columns
from serving.gallery.store.transaction import State
from serving.gallery.stored import shown

__all__ = ["Comparison"]


class Comparison:
    """What is wrong comes as pairs of a kind and a sentence.

    Attributes:
        fresh: How many of the items so far are newer than the index.
    """

    def __init__(
        self, state: State, index: Index | None, columns: Columns | None, removals: NDArray[np.int64]
    ) -> None:
        """Compare items of `state` with its index.

        Args:
            state: Of the transaction that the items are read in.
            index: What is published in it; None where nothing is, or where it cannot be read.
            columns: The labels and metadata published with it, or None likewise.
            removals: The seqs removed since it was made, int64 (r,).
        """
        self.fresh = 0
        self._state = state
        self._index = index
        self._columns = columns
        self._readable = index is not None or not state.index_file
        self._seqs: NDArray[np.int64] = index.seqs if index is not None else np.empty(0, np.int64)  # (n,)
        self._met = np.zeros(len(self._seqs), np.bool_)  # which of them are items
        self._removals = np.sort(removals)

    def items(self, block: list[tuple[Any, ...]], whole: NDArray[np.bool_]) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with a block of `Reader.as_stored`, of which some are whole, bool (b,)."""
        seqs = np.array([row[0] for row in block], np.int64)  # (b,)
        indexed, positions = _found(seqs, self._seqs)
        self._met[positions[indexed]] = True
        newer = seqs > self._state.covers_seq
        self.fresh += int(newer.sum())
        compared = indexed & whole
        for kind, bad, words in (
            ("removal", _found(seqs, self._removals)[0], "is there, and is noted as removed"),
            ("counter", seqs > self._state.last_seq, "is newer than the newest there ever was"),
            ("missing", ~indexed & ~newer & self._readable, "is missing from the index"),
            (
                "vector",
                self._vectors_differ(block, positions, compared),
                "has another vector in the index",
            ),
            (
                "label",
                self._labels_differ(block, positions, compared),
                "has another label in the index",
            ),
        ):
            for place in np.flatnonzero(bad):
                yield kind, f"the item {shown(block[place])} {words}"

    def rest(self) -> Iterator[tuple[str, str]]:
        """Yield, after the last item, what is wrong with the index itself."""
        state, seqs = self._state, self._seqs
        if state.covers_seq > state.last_seq or state.covers_removal > state.last_removal:
            yield "index", "the index is said to cover writes that never were"
        if not self._readable:
            return
        if state.index_count != len(seqs):
            yield "index", f"the index holds {len(seqs)} items, and is said to hold {state.index_count}"
        if (np.diff(seqs) <= 0).any():
            yield "index", "the index does not hold its items in order"
        if (seqs > state.covers_seq).any():
            yield "index", "the index holds items that are said to be newer than it is"
        if self._columns is not None and len(self._columns) != len(seqs):
            yield "index", f"the index holds {len(seqs)} items, and the labels of {len(self._columns)}"
        gone = seqs[~self._met]
        for seq in gone[~_found(gone, self._removals)[0]]:
            yield "gone", f"the index holds version {seq} of an item, which is gone and not noted as removed"

    def _vectors_differ(
        self, block: list[tuple[Any, ...]], positions: NDArray[np.int64], compared: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which of those compared have another vector at their positions (b,), bool (b,)."""
        differ = np.zeros(len(block), np.bool_)
        places = np.flatnonzero(compared)
        if self._index is not None and len(places):
            blob = b"".join(block[place][5] for place in places)
            ours = np.frombuffer(blob, "<f4").reshape(len(places), -1)
            differ[places] = (ours != self._index.matrix[positions[places]]).any(axis=1)
        return differ

    def _labels_differ(
        self, block: list[tuple[Any, ...]], positions: NDArray[np.int64], compared: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which of those compared have another label at their positions (b,), bool (b,)."""
        differ = np.zeros(len(block), np.bool_)
        if self._columns is None:
            return differ
        names, codes = self._columns.label_names, self._columns.label_codes
        for place in np.flatnonzero(compared & (positions < len(codes))):
            code = int(codes[positions[place]])
            differ[place] = (names[code] if code >= 0 else "") != block[place][2].decode()
        return differ


def _found(seqs: NDArray[np.int64], every: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which of `seqs` (b,) are among the ascending `every` (n,), bool (b,), and where, int64 (b,)."""
    if not len(every):
        return np.zeros(len(seqs), np.bool_), np.zeros(len(seqs), np.int64)
    positions = np.minimum(np.searchsorted(every, seqs), len(every) - 1).astype(np.int64)
    return every[positions] == seqs, positions
