"""One transaction on a gallery file: reads are of one state, writes are one change."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadArtifact
from serving.gallery.item import Item, metadata_json

__all__ = ["Reader", "Row", "State", "Writer"]

_BLOCK = 4096  # rows fetched at once


class _Connection(Protocol):
    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class State:
    """Where a gallery stands in one transaction; `index_file` is empty where none is published."""

    change: int
    generation: int
    index_file: str
    index_checksum: str
    index_count: int
    covers_seq: int
    covers_removal: int
    last_seq: int
    last_removal: int


@dataclass(frozen=True, slots=True)
class Row:
    """An item as stored, without its vector; `metadata` is JSON text."""

    seq: int
    key: str
    label: str
    uri: str
    metadata: str


class Reader:
    """Reads within one transaction: every answer is of the same state."""

    def __init__(self, connection: _Connection, path: Path, dimension: int) -> None:
        self._sql = connection
        self._path = path
        self._dimension = dimension

    def state(self) -> State:
        """Return where the gallery stands."""
        row = self._sql.execute(
            "SELECT change, generation, index_file, index_checksum, index_count, covers_seq, covers_removal,"
            " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'items'), 0),"
            " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'removals'), 0) FROM state"
        ).fetchone()
        return State(*row)

    def rows(self, seqs: Iterable[int]) -> list[Row]:
        """Return the live items among `seqs`, in no order."""
        found = self._sql.execute(
            "SELECT seq, key, label, uri, metadata FROM items WHERE seq IN (SELECT value FROM json_each(?))",
            (_json([int(seq) for seq in seqs]),),
        )
        return [Row(*row) for row in found]

    def seqs(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the `seq` of each key that is there."""
        found = self._sql.execute(
            "SELECT key, seq FROM items WHERE key IN (SELECT value FROM json_each(?))", (_json(keys),)
        )
        return dict(found.fetchall())

    def items(self, keys: Sequence[str]) -> dict[str, Item]:
        """Return the items of those keys that are there."""
        found = self._sql.execute(
            "SELECT key, label, uri, metadata, vector FROM items"
            " WHERE key IN (SELECT value FROM json_each(?))",
            (_json(keys),),
        )
        return {
            key: Item(key, self._vectors([vector])[0], label, uri, json.loads(metadata))
            for key, label, uri, metadata, vector in found
        }

    def vectors_since(self, seq: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield blocks of live items newer than `seq`, ascending: seqs int64 (b,), vectors float32 (b, d)."""
        found = self._sql.execute("SELECT seq, vector FROM items WHERE seq > ? ORDER BY seq", (seq,))
        while block := found.fetchmany(_BLOCK):
            yield np.array([row[0] for row in block], np.int64), self._vectors([row[1] for row in block])

    def removals_since(self, removal: int) -> NDArray[np.int64]:
        """Return the seqs removed after that removal, int64 (r,), in order of removal."""
        found = self._sql.execute("SELECT seq FROM removals WHERE id > ? ORDER BY id", (removal,))
        return np.array([row[0] for row in found], np.int64)

    def _vectors(self, blobs: list[bytes]) -> NDArray[np.float32]:
        size = 4 * self._dimension
        if any(len(blob) != size for blob in blobs):
            raise BadArtifact(
                f"the gallery file {self._path} is damaged: a vector in it is not {size} bytes long; "
                "restore the file from a backup, or drop the gallery and index its images again"
            )
        rows = np.frombuffer(b"".join(blobs), "<f4").reshape(-1, self._dimension)
        return rows.astype(np.float32, copy=False)


class Writer(Reader):
    """Writes within one transaction, alone among all processes; nothing is seen until it commits."""

    def upsert(self, items: Sequence[Item]) -> None:
        """Store checked items; one whose key is there replaces it whole and gets a new `seq`."""
        self._remove([item.key for item in items])
        self._sql.executemany(
            "INSERT INTO items (key, label, uri, metadata, vector) VALUES (?, ?, ?, ?, ?)",
            ((item.key, item.label, item.uri, metadata_json(item.metadata), _blob(item)) for item in items),
        )
        self._sql.execute("UPDATE state SET change = change + 1")

    def delete(self, keys: Sequence[str]) -> int:
        """Delete the items of those keys; returns how many were there."""
        removed = self._remove(keys)
        if removed:
            self._sql.execute("UPDATE state SET change = change + 1")
        return removed

    def publish(self, seen: State, *, index_file: str, checksum: str, count: int) -> bool:
        """Name the FAISS file that covers the state `seen`; False where another was published since.

        Removals since the file before are kept: who still has that one can follow (`Snapshot.advanced`).
        """
        done = self._sql.execute(
            "UPDATE state SET change = change + 1, generation = generation + 1, index_file = ?,"
            " index_checksum = ?, index_count = ?, covers_seq = ?, covers_removal = ? WHERE generation = ?",
            (index_file, checksum, count, seen.last_seq, seen.last_removal, seen.generation),
        )
        if done.rowcount == 1:
            self._sql.execute("DELETE FROM removals WHERE id <= ?", (seen.covers_removal,))
        return bool(done.rowcount == 1)

    def _remove(self, keys: Sequence[str]) -> int:
        seqs = [(seq,) for seq in self.seqs(keys).values()]
        self._sql.executemany("INSERT INTO removals (seq) VALUES (?)", seqs)
        self._sql.executemany("DELETE FROM items WHERE seq = ?", seqs)
        return len(seqs)


def _blob(item: Item) -> bytes:
    return item.vector.astype("<f4").tobytes()


def _json(values: Sequence[int] | Sequence[str]) -> str:
    return json.dumps(values, ensure_ascii=False)
