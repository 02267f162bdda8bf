"""The items newer than a gallery's index, in memory: their vectors in a matrix, what they hold by column."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from serving.gallery.search.columns import Columns
from serving.gallery.search.filter import Filter
from serving.gallery.search.growth import appended
from serving.gallery.search.ranking import product
from serving.gallery.search.texts import Texts
from serving.gallery.store.damage import sound
from serving.gallery.store.transaction import Block

__all__ = ["Fresh", "marked"]

_GATHERED = 4  # gathering a row costs as much as passing over so many in order


@dataclass(frozen=True, slots=True)
class Fresh:
    """Items in the order in which they were written; what is appended makes a new one of them.

    Attributes:
        vectors: Unit vectors, float32 (f, d).
        seqs: int64 (f,), ascending.
        dead: Which of them are deleted or replaced, bool (f,).
        labels: The number of each one's label, int64 (f,); -1 where it is empty.
        columns: What they hold, in parts of falling size, so that n appends sort O(n log n) entries in all.
        known: The labels numbered by their place in the index's columns.
        numbers: Those and all others that were met; shared by all that are made of one another.
    """

    vectors: NDArray[np.float32]
    seqs: NDArray[np.int64]
    dead: NDArray[np.bool_]
    labels: NDArray[np.int64]
    known: Texts
    columns: tuple[Columns, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def none(cls, dimension: int, known: Texts) -> Self:
        """Return that of no item."""
        return cls(
            vectors=np.empty((0, dimension), np.float32),
            seqs=np.empty(0, np.int64),
            dead=np.zeros(0, np.bool_),
            labels=np.empty(0, np.int64),
            known=known,
        )

    def __len__(self) -> int:
        return len(self.seqs)

    def advanced(self, blocks: Iterable[Block], removed: NDArray[np.int64], path: Path) -> "Fresh":
        """Return these items and newer ones, with the removed seqs marked as dead.

        Raises:
            BadArtifact: The metadata of an item cannot be read; the message names the file `path`.
        """
        vectors, seqs, labels, added = self.vectors, self.seqs, self.labels, []
        for block in blocks:
            with sound(path, "the metadata of an item in it"):
                added.append(Columns.of(block.labels, block.metadata))
            vectors, seqs = appended(vectors, block.vectors), appended(seqs, block.seqs)
            labels = appended(labels, np.array([self._number(label) for label in block.labels], np.int64))
        columns = list(self.columns)
        if added:
            columns.append(Columns.joined(added) if len(added) > 1 else added[0])
        while len(columns) > 1 and len(columns[-2]) < 2 * len(columns[-1]):
            columns[-2:] = [Columns.joined(columns[-2:])]
        dead = np.zeros(len(seqs), np.bool_)
        dead[: len(self)] = self.dead
        return replace(
            self,
            vectors=vectors,
            seqs=seqs,
            labels=labels,
            dead=marked(dead, seqs, removed),
            columns=tuple(columns),
        )

    def mask(self, filter: Filter) -> NDArray[np.bool_]:
        """Tell for which items a filter holds, bool (f,)."""
        return np.concatenate([np.zeros(0, np.bool_), *(part.mask(filter) for part in self.columns)])

    def scores(self, queries: NDArray[np.float32], barred: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the scores of queries (Q, d) with all, (Q, f); minus infinity for the barred (f,)."""
        allowed = np.flatnonzero(~barred)
        if _GATHERED * len(allowed) < len(self):
            scores = np.full((len(queries), len(self)), -np.inf, np.float32)
            scores[:, allowed] = product(queries, self.vectors, allowed)
        else:
            scores = queries @ self.vectors.T
            scores[:, barred] = -np.inf
        return scores

    def _number(self, label: str) -> int:
        if not label:
            return -1
        if label not in self.numbers:
            place = self.known.find(label)
            self.numbers[label] = len(self.known) + len(self.numbers) if place is None else place
        return self.numbers[label]


def marked(dead: NDArray[np.bool_], seqs: NDArray[np.int64], removed: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return `dead` (n,) with the removed among the ascending `seqs` (n,) marked as well."""
    if not len(removed) or not len(seqs):
        return dead
    positions = np.searchsorted(seqs, removed)
    positions[positions == len(seqs)] = 0
    marked = dead.copy()
    marked[positions[seqs[positions] == removed]] = True
    return marked
