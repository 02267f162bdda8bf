"""Verifying a gallery: everything that is stored of it is read and held against everything else.

    the file     SQLite's own check of its pages and tables
    the items    each one's checksum, texts and vector
    the index    its checksum, and whether it holds the items that it is said to cover, as they are stored
    thumbnails   each one's checksum; it belongs to an item, and begins as a JPEG

Nothing is changed. All is of one state, while writes go on. The memory needed does not grow with the vectors.
"""

import json
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadArtifact, InvalidArgument
from serving.gallery.index.builder import Advance
from serving.gallery.item import JPEG, NORM_TOLERANCE, check_key
from serving.gallery.search.segment import SealedSegment
from serving.gallery.search.snapshot import open_sealed
from serving.gallery.store.schema import FILE_NAME, given_of
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import Reader, State

__all__ = ["Verification", "verify"]

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


def verify(path: Path, *, advance: Advance = lambda *_: None) -> Verification:
    """Verify a gallery in a folder, or a snapshot in a file; raises what opening one does."""
    file = path / FILE_NAME if path.is_dir() else path
    with closing(Store(file)) as store:
        verifying = _Verifying(store, advance)
        for line in store.check():
            verifying.add("faults of the file", f"SQLite finds in {file.name}: {line}")
        try:
            while not verifying.state():
                pass  # the index was replaced by a newer one before it could be opened
        except BadArtifact as error:  # SQLite cannot read on
            verifying.add("faults of the file", f"after {verifying.found.items:,} items: {error}")
    return verifying.told()


class _Verifying:
    """One verification; a great many problems of a kind are only counted, so that they are no burden."""

    def __init__(self, store: Store, advance: Advance) -> None:
        self.found = Verification()
        self._store = store
        self._advance = advance
        self._problems: dict[str, list[str]] = {}
        self._more = Counter[str]()

    def add(self, kind: str, sentence: str) -> None:
        """Note a problem."""
        named = self._problems.setdefault(kind, [])
        if len(named) < _MOST:
            named.append(sentence)
        else:
            self._more[kind] += 1

    def told(self) -> Verification:
        """Return what was read, with all problems."""
        self.found.problems = [sentence for named in self._problems.values() for sentence in named]
        self.found.problems += [f"{count:,} more {kind}" for kind, count in self._more.items()]
        return self.found

    def state(self) -> bool:
        """Read all of one state; returns False where its index is gone because a newer one was published."""
        with self._store.read() as reader:
            state = reader.state()
            found = open_sealed(self._store, state)
            if found is None:
                return False
            sealed, damage = found
            if damage:
                self.add("faults of the index", f"the index is lost: {damage}")
            self._items(reader, state, sealed, readable=not damage)
            self._thumbnails(reader)
        return True

    def _items(self, reader: Reader, state: State, sealed: SealedSegment, *, readable: bool) -> None:
        """Look at each item, and whether the index holds what it is said to cover, as it is stored."""
        found, held = self.found, sealed.seqs  # (n,)
        ended = np.append(held, -1)  # no item's, for those that would stand behind the last
        met = np.zeros(len(held), np.bool_)  # which of them are items
        removals = reader.removals_since(state.covers_removal)
        found.indexed, found.removals, total = len(held), len(removals), reader.count()
        for block in reader.as_stored():
            faults, vectors = _examined(block, self._store.meta.dimension)
            for row, fault in zip(block, faults, strict=True):
                if fault:
                    self.add("damaged items", f"the item {_name(row)}: {fault}")
            seqs = np.array([row[0] for row in block], np.int64)  # (b,)
            places = np.searchsorted(held, seqs)
            indexed = ended[places] == seqs
            met[places[indexed]] = True
            newer = seqs > state.covers_seq
            both = np.flatnonzero(indexed & [not fault for fault in faults])
            differs = np.zeros(len(block), np.bool_)
            differs[both] = (vectors[both] != sealed.vectors[places[both]]).any(axis=1)
            for words, wrong in (
                ("is there, and is noted as removed", np.isin(seqs, removals)),
                ("is newer than the newest there ever was", seqs > state.last_seq),
                ("is missing from the index", ~indexed & ~newer & readable),
                ("has another vector in the index", differs),
            ):
                for at in np.flatnonzero(wrong):
                    self.add(f"items, each of which {words}", f"the item {_name(block[at])} {words}")
            found.items += len(block)
            found.fresh += int(newer.sum())
            self._advance("verify", found.items, total)
        if state.covers_seq > state.last_seq or state.covers_removal > state.last_removal:
            self.add("faults of the index", "the index is said to cover writes that never were")
        if readable and state.index_count != len(held):
            words = f"the index holds {len(held)} items, and is said to hold {state.index_count}"
            self.add("faults of the index", words)
        if (held > state.covers_seq).any() or (np.diff(held) <= 0).any():
            words = "the index holds items that are said to be newer than it is, or holds them in no order"
            self.add("faults of the index", words)
        for seq in held[~met & ~np.isin(held, removals)]:
            words = f"the index holds version {seq} of an item, which is gone and not noted as removed"
            self.add("items in the index that are gone and not noted as removed", words)

    def _thumbnails(self, reader: Reader) -> None:
        for seq, jpeg, checksum, owned in reader.thumbnails_as_stored():
            self.found.thumbnails += 1
            words = ""
            if not owned:
                words = "belongs to no item"
            elif zlib.crc32(jpeg) != checksum:
                words = "has been altered: its checksum does not match"
            elif not jpeg.startswith(JPEG):
                words = "is no JPEG"
            if words:
                self.add("faulty thumbnails", f"the thumbnail {seq} {words}")


def _examined(block: list[tuple[Any, ...]], dimension: int) -> tuple[list[str], NDArray[np.float32]]:
    """Return what is wrong with each item, empty where it is whole, and the vectors (b, d) of the whole."""
    faults = [_fault(row, dimension) for row in block]
    whole = np.array([not fault for fault in faults])  # (b,)
    blobs = b"".join(row[5] for row, fault in zip(block, faults, strict=True) if not fault)
    vectors = np.zeros((len(block), dimension), np.float32)
    vectors[whole] = np.frombuffer(blobs, "<f4").reshape(-1, dimension)
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1)
    for at in np.flatnonzero(whole & ~(np.abs(norms - 1) <= NORM_TOLERANCE)):  # the negation also finds NaN
        finite = f"has norm {norms[at]:.6g}, expected 1"
        faults[at] = f"its vector {finite if np.isfinite(norms[at]) else 'holds a value that is not finite'}"
    return faults, vectors


def _fault(row: tuple[Any, ...], dimension: int) -> str:
    """Return what is wrong with an item, a row of `Reader.as_stored`, but for the norm of its vector."""
    _, key, label, uri, metadata, vector, checksum, given, sourced = row
    if None in (key, label, uri, metadata, vector):
        return "a part of it is missing"
    if zlib.crc32(vector, zlib.crc32(b"\0".join((key, label, uri, metadata)))) != checksum:
        return "its checksum is not that of its key, texts and vector: one of them was altered"
    try:
        check_key(key.decode())
        label.decode()
        uri.decode()
        if not isinstance(json.loads(metadata.decode()), dict):
            return "its metadata is no JSON object"
        if given is not None:
            given_of(given)
    except (ValueError, RecursionError, InvalidArgument) as error:
        return f"a text of it cannot be read: {error}"
    if len(vector) != 4 * dimension:
        return f"its vector is {len(vector)} bytes long, expected {4 * dimension}"
    return "" if sourced else "the file it was made from is not noted in full"


def _name(row: tuple[Any, ...]) -> str:
    return repr((row[1] or b"").decode(errors="replace"))
