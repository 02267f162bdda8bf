"""Verifying a gallery: everything that is stored of it is read and held against everything else.

    the file     SQLite's own check of its pages and tables
    the items    each one's checksum, texts and vector
    the index    its checksum, what the gallery says of it, and item for item what it holds
    thumbnails   each one's checksum; it belongs to an item, and begins as a JPEG

Nothing is changed. All is of one state, while writes go on. The memory needed does not grow with the vectors.
"""

import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.errors import BadArtifact
from serving.gallery.comparison import Comparison
from serving.gallery.index.build import Advance
from serving.gallery.index.index import Index
from serving.gallery.index.kind import Facts, IndexDamaged
from serving.gallery.search.columns import Columns, ColumnsDamaged
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import State
from serving.gallery.stored import faults, shown

__all__ = ["Verification", "verify"]

_JPEG = b"\xff\xd8\xff"
_MOST = 20  # problems of one kind that are named; the others are counted
_KINDS = {
    "file": "faults of the file",
    "item": "damaged items",
    "index": "faults of the index",
    "removal": "items that are noted as removed",
    "counter": "items that are newer than the newest there ever was",
    "missing": "items that are missing from the index",
    "vector": "items with another vector in the index",
    "label": "items with another label in the index",
    "gone": "items in the index that are gone and not noted as removed",
    "thumbnail": "faulty thumbnails",
}


@dataclass(slots=True)
class Verification:
    """What was read, and what is wrong with it, a sentence each; no problem shows a sound gallery."""

    items: int = 0
    fresh: int = 0  # of the items: newer than the index
    indexed: int = 0
    removals: int = 0
    thumbnails: int = 0
    problems: list[str] = field(default_factory=list)


class _Findings:
    """Problems by kind; after some of a kind they are only counted, so that a great many are no burden."""

    def __init__(self) -> None:
        self._named: list[str] = []
        self._counts = Counter[str]()

    def add(self, problems: Iterable[tuple[str, str]]) -> None:
        """Take kinds and sentences."""
        for kind, words in problems:
            self._counts[kind] += 1
            if self._counts[kind] <= _MOST:
                self._named.append(words)

    def sentences(self) -> list[str]:
        """Return those that are named, and how many more there are of each kind."""
        more = {kind: count - _MOST for kind, count in self._counts.items() if count > _MOST}
        return self._named + [f"{count:,} more {_KINDS[kind]}" for kind, count in more.items()]


def verify(path: Path, *, advance: Advance = lambda *_: None) -> Verification:
    """Verify a gallery.

    Args:
        path: Its folder, or a single file: a snapshot.
        advance: Told again and again how many items are verified, and of how many.

    Raises:
        NotFound: There is none.
        BadArtifact: It is so damaged that it cannot be opened, or of another format version.
        ReadOnly: This process may not write to it, and nobody has it open who may.
        Unavailable: It cannot be read.
    """
    file = path / FILE_NAME if path.is_dir() else path
    found, counts = _Findings(), Verification()
    with closing(Store(file)) as store:
        found.add(("file", f"SQLite finds in {file.name}: {line}") for line in store.check())
        try:
            while not _pass(store, counts, found, advance):
                pass  # the index was replaced by a newer one before it could be opened
        except BadArtifact as error:  # SQLite cannot read on
            found.add([("file", f"after {counts.items:,} items: {error}")])
    counts.problems = found.sentences()
    return counts


def _pass(store: Store, counts: Verification, found: _Findings, advance: Advance) -> bool:
    """Read all of one state; returns False where its index is gone because a newer one was published."""
    with store.read() as reader:
        state = reader.state()
        lost: list[tuple[str, str]] = []
        index, columns = _published(store, state, lost)
        if lost:
            store.check_name()
            with store.read() as newer:
                if newer.state().generation != state.generation:
                    return False
        found.add(lost)
        removals = reader.removals_since(state.covers_removal)
        counts.indexed, counts.removals = len(index) if index is not None else 0, len(removals)
        comparison = Comparison(state, index, columns, removals)
        total = reader.count()
        for block in reader.as_stored():
            wrong = faults(block, store.meta.dimension)
            found.add(
                ("item", f"the item {shown(row)}: {words}")
                for row, words in zip(block, wrong, strict=True)
                if words
            )
            found.add(comparison.items(block, np.array([not words for words in wrong])))
            counts.items += len(block)
            counts.fresh = comparison.fresh
            advance("verify", counts.items, total)
        found.add(comparison.rest())
        for seq, jpeg, checksum, owned in reader.thumbnails_as_stored():
            counts.thumbnails += 1
            if not owned:
                found.add([("thumbnail", f"the thumbnail {seq} belongs to no item")])
            elif zlib.crc32(jpeg) != checksum:
                found.add(
                    [("thumbnail", f"the thumbnail {seq} has been altered: its checksum does not match")]
                )
            elif not jpeg.startswith(_JPEG):
                found.add([("thumbnail", f"the thumbnail {seq} is no JPEG")])
    return True


def _published(
    store: Store, state: State, lost: list[tuple[str, str]]
) -> tuple[Index | None, Columns | None]:
    """Open what is published in a state; what cannot be opened is added to `lost`."""
    index, columns = None, None
    if not state.index_file:
        return None, None
    file = store.path.parent / state.index_file
    facts = Facts()
    try:
        facts = Facts.from_json(state.index_facts)
        index = Index(file, checksum=state.index_checksum, dimension=store.meta.dimension, facts=facts)
    except IndexDamaged as error:
        lost.append(("index", f"the index is lost: {error}"))
    if facts.columns_checksum:
        try:
            columns = Columns.load(file.with_suffix(".columns"), facts.columns_checksum)
        except ColumnsDamaged as error:
            lost.append(("index", f"the labels and metadata of the index are lost: {error}"))
    return index, columns
