"""One transaction on a gallery file: reads are of one state, writes are one change."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.gallery.damage import damaged, sound
from serving.gallery.item import Item, Source, metadata_json

__all__ = ["Reader", "Row", "State", "Writer", "checksum_of"]

_BLOCK = 4096  # rows fetched at once
_STATE_KINDS = [int, int, str, str, int, int, int, str, str, float, str, str, int, int]


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
    index_facts: str
    wanted_index: str
    wanted_recall: float
    previous_name: str
    previous_id: str
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
        found = self._sql.execute(
            "SELECT change, generation, index_file, index_checksum, index_count, covers_seq, covers_removal,"
            " index_facts, wanted_index, wanted_recall, previous_name, previous_id,"
            " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'items'), 0),"
            " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'removals'), 0) FROM state"
        )
        with sound(self._path, "its state"):
            row = found.fetchone()
            if [type(value) for value in row] != _STATE_KINDS:
                raise TypeError("a value is of another kind")
        return State(*row)

    def rows(self, seqs: Iterable[int]) -> dict[int, Row]:
        """Return the items of `seqs`, which are live."""
        wanted = [int(seq) for seq in seqs]
        found = self._sql.execute(
            "SELECT seq, key, label, uri, metadata FROM items WHERE seq IN (SELECT value FROM json_each(?))",
            (_json(wanted),),
        )
        with sound(self._path, "an item that its index names"):
            rows = {row[0]: Row(*row) for row in found}
            for seq in wanted:
                _check_texts(rows[seq].key, rows[seq].label, rows[seq].uri)
        return rows

    def metadata(self, row: Row) -> dict[str, Any]:
        """Return the metadata of an item that was read."""
        with sound(self._path, f"the metadata of the item {row.key!r}"):
            return _metadata(row.metadata)

    def seqs(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the `seq` of each key that is there."""
        found = self._sql.execute(
            "SELECT key, seq FROM items WHERE key IN (SELECT value FROM json_each(?))", (_json(keys),)
        )
        with sound(self._path, "its keys"):
            return dict(found.fetchall())

    def items(self, keys: Sequence[str]) -> dict[str, Item]:
        """Return the items of those keys that are there."""
        found = self._sql.execute(
            "SELECT key, label, uri, metadata, vector, seq, origin, size, mtime, digest FROM items"
            " WHERE key IN (SELECT value FROM json_each(?))",
            (_json(keys),),
        )
        items = {}
        with sound(self._path, "an item in it"):
            for key, label, uri, metadata, vector, seq, *source in found:
                _check_texts(key, label, uri)
                items[key] = Item(
                    key,
                    self._vectors([vector])[0],
                    label,
                    uri,
                    _metadata(metadata),
                    source=None if source[0] is None else Source(*source),
                    version=seq,
                )
        return items

    def vectors_since(self, seq: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield blocks of live items newer than `seq`, ascending: seqs int64 (b,), vectors float32 (b, d)."""
        found = self._sql.execute("SELECT seq, vector FROM items WHERE seq > ? ORDER BY seq", (seq,))
        while True:
            with sound(self._path, "a vector in it"):
                block = found.fetchmany(_BLOCK)
                if not block:
                    return
                seqs = np.array([row[0] for row in block], np.int64)
                vectors = self._vectors([row[1] for row in block])
            yield seqs, vectors

    def removals_since(self, removal: int) -> NDArray[np.int64]:
        """Return the seqs removed after that removal, int64 (r,), in order of removal."""
        found = self._sql.execute("SELECT seq FROM removals WHERE id > ? ORDER BY id", (removal,))
        with sound(self._path, "its removals"):
            return np.array([row[0] for row in found], np.int64)

    def _vectors(self, blobs: list[bytes]) -> NDArray[np.float32]:
        size = 4 * self._dimension
        if any(len(blob) != size for blob in blobs):
            raise damaged(self._path, f"a vector in it is not {size} bytes long")
        rows = np.frombuffer(b"".join(blobs), "<f4").reshape(-1, self._dimension)
        return rows.astype(np.float32, copy=False)


class Writer(Reader):
    """Writes within one transaction, alone among all processes; nothing is seen until it commits."""

    def upsert(self, items: Sequence[Item]) -> None:
        """Store checked items; one whose key is there replaces it whole and gets a new `seq`."""
        self._remove([item.key for item in items])
        self._sql.executemany(
            "INSERT INTO items (key, label, uri, metadata, vector, checksum, origin, size, mtime, digest)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            map(_columns, items),
        )
        pictures = {item.key: item.thumbnail for item in items if item.thumbnail}
        if pictures:
            seqs = self.seqs(list(pictures))
            self._sql.executemany(
                "INSERT INTO thumbnails (seq, jpeg) VALUES (?, ?)",
                ((seqs[key], jpeg) for key, jpeg in pictures.items()),
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
        self._sql.executemany("DELETE FROM thumbnails WHERE seq = ?", seqs)
        return len(seqs)


def checksum_of(key: str, label: str, uri: str, metadata: str, vector: bytes) -> int:
    """Return the CRC-32 that an item is stored with: it tells an item that the disk has altered."""
    return zlib.crc32(vector, zlib.crc32("\0".join((key, label, uri, metadata)).encode()))


def _columns(item: Item) -> tuple[object, ...]:
    texts, vector = (item.key, item.label, item.uri, metadata_json(item.metadata)), _blob(item)
    source = item.source
    return (
        *texts,
        vector,
        checksum_of(*texts, vector),
        *((source.origin, source.size, source.mtime_ns, source.digest) if source else (None,) * 4),
    )


def _check_texts(*values: object) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("a text is of another kind")


def _metadata(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError("it is no JSON object")
    return found


def _blob(item: Item) -> bytes:
    return item.vector.astype("<f4").tobytes()


def _json(values: Sequence[int] | Sequence[str]) -> str:
    return json.dumps(values, ensure_ascii=False)
