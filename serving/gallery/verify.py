"""Verifying a gallery: everything that is stored of it is read and held against everything else.

    the file     SQLite's own check of its pages and tables
    the items    each one's checksum, texts and vector
    the index    its checksum, what the gallery says of it, and item for item what it holds
    thumbnails   each belongs to an item, and begins and ends as a JPEG

Nothing is changed. All is of one state, while writes go on. The memory needed does not grow with the vectors.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.errors import BadArtifact
from serving.gallery.comparison import Comparison
from serving.gallery.index import IndexDamaged
from serving.gallery.schema import FILE_NAME
from serving.gallery.store import Store
from serving.gallery.stored import fault, shown

__all__ = ["Advance", "Verification", "verify"]

Advance = Callable[[int, int], object]
"""Told how many steps are done, and of how many."""

_MOST = 20  # problems of one kind that are named; the others are counted


@dataclass(slots=True)
class Verification:
    """What was read, and what is wrong with it, a sentence each; no problem shows a sound gallery."""

    items: int = 0
    fresh: int = 0  # of the items: newer than the index
    indexed: int = 0
    removals: int = 0
    thumbnails: int = 0
    problems: list[str] = field(default_factory=list)


def verify(path: Path, *, advance: Advance = lambda done, total: None) -> Verification:
    """Verify a gallery.

    Args:
        path: Its folder, or a single file: a snapshot.
        advance: Called again and again with the number of items verified, and of all.

    Raises:
        NotFound: There is none.
        BadArtifact: It is so damaged that it cannot be opened, or of another format version.
        ReadOnly: This process may not write to it, and nobody has it open who may.
        Unavailable: It cannot be read.
    """
    file = path / FILE_NAME if path.is_dir() else path
    counts = Verification()
    with closing(Store(file)) as store:
        problems = [("file", f"SQLite finds in {file.name}: {line}") for line in store.check()]
        try:
            while not _pass(store, counts, problems, advance):
                counts = Verification()  # the index was replaced before it could be opened
        except BadArtifact as error:  # SQLite cannot read on
            problems.append(("file", f"after {counts.items:,} items: {error}"))
    counts.problems = _summed(problems)
    return counts


def _pass(store: Store, counts: Verification, problems: list[tuple[str, str]], advance: Advance) -> bool:
    """Read all of one state; returns False where its index is gone because a newer one was published."""
    found: list[tuple[str, str]] = []
    with store.read() as reader:
        state = reader.state()
        index = None
        try:
            index = _published(store, state)
        except IndexDamaged as error:
            with store.read() as newer:
                if newer.state().generation != state.generation:
                    return False
            problems.append(("index", f"the index is lost: {error}"))
        counts.indexed = len(index) if index else 0
        removals = reader.removals_since(state.covers_removal)
        counts.removals = len(removals)
        comparison = Comparison(state, index, removals)
        total = reader.count()
        for block in reader.as_stored():
            faults = [fault(row, store.meta.dimension) for row in block]
            problems += [
                ("item", f"the item {shown(row)}: {words}")
                for row, words in zip(block, faults, strict=True)
                if words
            ]
            problems += comparison.items(block, np.array([not words for words in faults]))
            counts.items += len(block)
            counts.fresh = comparison.fresh
            advance(counts.items, total)
        problems += comparison.rest()
        problems += _thumbnails(reader, counts)
    return True
