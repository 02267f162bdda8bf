"""One transaction on a gallery file: every read is of one state (`writer` has the writing side)."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.gallery.item import Item, Source
from serving.gallery.store.damage import altered, sound
from serving.gallery.store.publication import PUBLISHED, publication_checksum
from serving.gallery.store.record import (
    COLUMNS,
    check_texts,
    checksum_of,
    item_of,
    metadata_of,
    source_of,
    vectors_of,
)

__all__ = ["Block", "Reader", "Row", "State"]

_BLOCK = 4096  # rows fetched at once
_ITEMS = f"SELECT {COLUMNS} FROM items"  # noqa: S608 - constants
_OF_KEYS = " WHERE key IN (SELECT value FROM json_each(?))"
_STATE = (
    f"SELECT change, generation, {PUBLISHED}, wanted_index, wanted_recall, previous_name, previous_id,"  # noqa: S608
    " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'items'), 0),"
    " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'removals'), 0), published_checksum FROM state"
)
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


@dataclass(frozen=True, slots=True)
class Block:
    """What the search keeps of some items, ascending by `seqs`."""

    seqs: NDArray[np.int64]  # (b,)
    vectors: NDArray[np.float32]  # (b, d)
    labels: list[str]
    metadata: list[str]  # JSON texts


class Reader:
    """Reads within one transaction: every answer is of the same state."""

    def __init__(self, connection: _Connection, path: Path, dimension: int) -> None:
        self._sql = connection
        self._path = path
        self._dimension = dimension

    def state(self) -> State:
        """Return where the gallery stands.

        Raises:
            BadArtifact: It is not as it was written.
        """
        found = self._sql.execute(_STATE)
        with sound(self._path, "its state"):
            *row, checksum = found.fetchone()
            if [type(value) for value in row] != _STATE_KINDS:
                raise TypeError("a value is of another kind")
            if publication_checksum(*row[2:8]) != checksum:
                raise altered(self._path, "what its state tells of the index")
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
                check_texts(rows[seq].key, rows[seq].label, rows[seq].uri)
        return rows

    def metadata(self, rows: Iterable[Row]) -> dict[int, dict[str, Any]]:
        """Return the metadata of items that were read, by `seq`."""
        read = list(rows)
        try:  # at once, which takes a fraction of the time
            found = json.loads(f"[{','.join(row.metadata for row in read)}]")
            if len(found) == len(read) and {*map(type, found)} <= {dict}:
                return {row.seq: each for row, each in zip(read, found, strict=True)}
        except (TypeError, ValueError, RecursionError):
            pass
        one_by_one = {}
        for row in read:  # to name the one that is damaged
            with sound(self._path, f"the metadata of the item {row.key!r}"):
                one_by_one[row.seq] = metadata_of(row.metadata)
        return one_by_one

    def seqs(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the `seq` of each key that is there."""
        found = self._sql.execute("SELECT key, seq FROM items" + _OF_KEYS, (_json(keys),))  # noqa: S608
        with sound(self._path, "its keys"):
            return dict(found.fetchall())

    def items(self, keys: Sequence[str]) -> dict[str, Item]:
        """Return the items of those keys that are there."""
        found = self._sql.execute(_ITEMS + _OF_KEYS, (_json(keys),))
        return {item.key: item for item in map(self._item, found)}

    def page(self, *, after: str, limit: int, prefix: str) -> list[Item]:
        """Return the first items whose keys begin with `prefix` and follow `after`, ascending by key."""
        # Python compares strings by code points, SQLite by their UTF-8 bytes: the order is the same.
        found = self._sql.execute(
            _ITEMS + " WHERE key >= ? AND key <> ? ORDER BY key LIMIT ?",
            (max(after, prefix), after, limit),
        )
        return list(takewhile(lambda item: item.key.startswith(prefix), map(self._item, found)))

    def thumbnail(self, key: str) -> bytes | None:
        """Return the JPEG picture of an item, None where the item or its picture is not there.

        Raises:
            BadArtifact: It is not the picture that was stored.
        """
        found = self._sql.execute(
            "SELECT jpeg, checksum FROM thumbnails WHERE seq = (SELECT seq FROM items WHERE key = ?)", (key,)
        )
        what = f"the thumbnail of the item {key!r}"
        with sound(self._path, what):
            for jpeg, checksum in found:
                if not isinstance(jpeg, bytes):
                    raise TypeError("it is no bytes")
                if zlib.crc32(jpeg) != checksum:
                    raise altered(self._path, what)
                return jpeg
        return None

    def sources(self, keys: Sequence[str]) -> dict[str, Source]:
        """Return which file each item of those keys was made from, of those that were made from one."""
        found = self._sql.execute(
            "SELECT key, origin, size, mtime, digest FROM items" + _OF_KEYS,  # noqa: S608
            (_json(keys),),
        )
        with sound(self._path, "the source of an item"):
            pairs = ((key, source_of(*columns)) for key, *columns in found)
            return {key: source for key, source in pairs if source is not None}

    def keys_of(self, origin: str, *, after: str, limit: int) -> list[str]:
        """Return the first keys after `after` of the items made from that data set's files, ascending."""
        found = self._sql.execute(
            "SELECT key FROM items WHERE origin = ? AND key > ? ORDER BY key LIMIT ?", (origin, after, limit)
        )
        with sound(self._path, "its keys"):
            keys = [key for (key,) in found]
            check_texts(*keys)
        return keys

    def blocks_since(self, seq: int) -> Iterator[Block]:
        """Yield blocks of the live items newer than `seq`, ascending.

        Each item's checksum is looked at, which is a third of the time: what is searched was not altered.
        """
        found = self._sql.execute(
            "SELECT seq, key, label, uri, metadata, checksum, vector FROM items WHERE seq > ? ORDER BY seq",
            (seq,),
        )
        while True:
            with sound(self._path, "an item in it"):
                rows = found.fetchmany(_BLOCK)
                if not rows:
                    return
                seqs, keys, labels, uris, metadata, checksums, blobs = zip(*rows, strict=True)
                vectors = vectors_of(blobs, self._path, self._dimension)
                sums = tuple(map(checksum_of, keys, labels, uris, metadata, blobs))
                if sums != checksums:
                    pairs = zip(sums, checksums, strict=True)
                    key = keys[[a != b for a, b in pairs].index(True)]
                    raise altered(self._path, f"the item {key!r}")
            yield Block(np.array(seqs, np.int64), vectors, list(labels), list(metadata))

    def count(self) -> int:
        """Return how many items there are."""
        ((count,),) = self._sql.execute("SELECT COUNT(*) FROM items")
        return int(count)

    def as_stored(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield all items in blocks, ascending, as they lie on the disk; nothing of them is made sense of.

        An item is its seq, its key, label, URI, metadata and vector as bytes, its checksum, and whether
        its source is whole.
        """
        found = self._sql.execute(
            "SELECT seq, CAST(key AS BLOB), CAST(label AS BLOB), CAST(uri AS BLOB), CAST(metadata AS BLOB),"
            " CAST(vector AS BLOB), checksum, origin IS NULL OR (typeof(origin) = 'text' AND"
            " typeof(size) = 'integer' AND typeof(mtime) = 'integer' AND typeof(digest) = 'blob'"
            " AND length(digest) = 32) FROM items ORDER BY seq"
        )
        while block := found.fetchmany(_BLOCK):
            yield block

    def thumbnails_as_stored(self) -> Iterator[tuple[int, bytes, object, bool]]:
        """Yield the seq of each thumbnail, its bytes, its checksum, and whether its item is there."""
        found = self._sql.execute(
            "SELECT seq, CAST(jpeg AS BLOB), checksum,"
            " EXISTS (SELECT 1 FROM items WHERE items.seq = thumbnails.seq) FROM thumbnails"
        )
        yield from found

    def removals_since(self, removal: int) -> NDArray[np.int64]:
        """Return the seqs removed after that removal, int64 (r,), in order of removal."""
        found = self._sql.execute("SELECT seq FROM removals WHERE id > ? ORDER BY id", (removal,))
        with sound(self._path, "its removals"):
            return np.array([row[0] for row in found], np.int64)

    def _item(self, record: Sequence[Any]) -> Item:
        return item_of(record, self._path, self._dimension)


def _json(values: Sequence[int] | Sequence[str]) -> str:
    return json.dumps(values, ensure_ascii=False)
