"""One transaction on a gallery file: every read is of one state, a write is seen by nobody until it ends."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import Conflict
from serving.gallery.item import CheckedItem, GalleryItem, Source, with_source_of
from serving.gallery.note import check_own
from serving.gallery.store import schema
from serving.gallery.store.schema import ITEM_COLUMNS, PUBLISHED, sound

__all__ = ["NAMED", "Block", "Reader", "State", "Texts", "Writer"]

Texts = tuple[str, str, str, str]
"""Key, label, URI and metadata of an item, the last as the JSON object that is stored."""

NAMED = "an item that its index names"
_BLOCK = 4096  # rows fetched at once
_AT_ONCE = 64  # items read at once that are wanted one by one
_NOTHING: Mapping[str, int] = {}
_ITEMS = f"SELECT {ITEM_COLUMNS} FROM items"  # noqa: S608 - constants
_INSERT = f"INSERT INTO items ({ITEM_COLUMNS}) VALUES ({', '.join('?' * len(ITEM_COLUMNS.split(',')))})"  # noqa: S608
_OF_KEYS = " WHERE key IN (SELECT value FROM json_each(?))"
_STATE = (
    f"SELECT change, generation, {PUBLISHED}, wanted_index, wanted_recall, previous_name, previous_id,"  # noqa: S608
    " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'items'), 0),"
    " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'removals'), 0), published_checksum FROM state"
)


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
class Block:
    """What the search keeps of some items, ascending by `seqs`."""

    seqs: NDArray[np.int64]  # (b,)
    vectors: NDArray[np.float32]  # (b, d)
    labels: list[str]
    metadata: list[str]  # JSON texts


class Reader:
    """Reads within one transaction; every method raises BadArtifact for what is not as it was written."""

    def __init__(self, connection: Any, path: Path, dimension: int) -> None:
        self.path = path
        self.sql = connection
        self._dimension = dimension

    def change(self) -> object:
        """Return the number of the last change, which tells whether a state that is known still stands."""
        return self.sql.execute("SELECT change FROM state").fetchone()[0]

    def state(self) -> State:
        """Return where the gallery stands."""
        with sound(self.path, "its state"):
            *row, checksum = self.sql.execute(_STATE).fetchone()
            schema.check_kinds(row, State)
        if schema.publication_checksum(*row[2:8]) != checksum:
            raise schema.altered(self.path, "what its state tells of the index")
        return State(*row)

    def texts(self, seqs: Set[int]) -> dict[int, Texts]:
        """Return the texts of the items of `seqs`, which are live."""
        found = self.sql.execute(
            "SELECT seq, key, label, uri, metadata FROM items WHERE seq IN (SELECT value FROM json_each(?))",
            (json.dumps(list(seqs)),),
        ).fetchall()
        texts: dict[int, Texts] = {row[0]: row[1:] for row in found}
        if seqs != texts.keys():
            raise schema.unreadable(self.path, NAMED, KeyError(*(seqs - texts.keys())))
        if not {type(text) for each in texts.values() for text in each} <= {str}:
            raise schema.unreadable(self.path, NAMED, TypeError("a text is of another kind"))
        return texts

    def labelled(self, seqs: Set[int]) -> dict[int, tuple[str, str]]:
        """Return key and label of the items of `seqs`, which are live."""
        found = self.sql.execute(
            "SELECT seq, key, label FROM items WHERE seq IN (SELECT value FROM json_each(?))",
            (json.dumps(list(seqs)),),
        )
        with sound(self.path, NAMED):
            texts = {seq: (key, label) for seq, key, label in found}
            if not {type(text) for each in texts.values() for text in each} <= {str}:
                raise TypeError("a text is of another kind")
            return {seq: texts[seq] for seq in seqs}

    def seqs(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the `seq` of each key that is there."""
        with sound(self.path, "its keys"):
            return dict(self.sql.execute("SELECT key, seq FROM items" + _OF_KEYS, (_json(keys),)).fetchall())  # noqa: S608

    def items(self, keys: Sequence[str]) -> dict[str, GalleryItem]:
        """Return the items of those keys that are there."""
        return {item.key: item for item in self._items(_OF_KEYS, _json(keys))}

    def by_key(self, *, after: str, prefix: str) -> Iterator[GalleryItem]:
        """Yield the items whose keys begin with `prefix` and follow `after`, ascending by key."""
        # Python compares strings by code points, SQLite by their UTF-8 bytes: the order is the same.
        found = self._items(" WHERE key >= ? AND key <> ? ORDER BY key", max(after, prefix), after)
        return takewhile(lambda item: item.key.startswith(prefix), found)

    def by_seq(self, seqs: NDArray[np.int64]) -> Iterator[GalleryItem]:
        """Yield the items of `seqs` (c,), which are live, in that order."""
        for start in range(0, len(seqs), _AT_ONCE):
            some = seqs[start : start + _AT_ONCE].tolist()
            found = self._items(" WHERE seq IN (SELECT value FROM json_each(?))", json.dumps(some))
            items = {item.version: item for item in found}
            with sound(self.path, NAMED):
                yield from [items[seq] for seq in some]

    def pictured(self, items: Iterable[GalleryItem]) -> Iterator[GalleryItem]:
        """Yield items with their thumbnails."""
        return (replace(item, thumbnail=self.thumbnail(item.key)) for item in items)

    def thumbnail(self, key: str) -> bytes:
        """Return the JPEG picture of an item; empty where the item or its picture is not there."""
        found = self.sql.execute(
            "SELECT jpeg, checksum FROM thumbnails WHERE seq = (SELECT seq FROM items WHERE key = ?)", (key,)
        )
        what = f"the thumbnail of the item {key!r}"
        with sound(self.path, what):
            for jpeg, checksum in found:
                if not isinstance(jpeg, bytes):
                    raise TypeError("it is no bytes")
                if zlib.crc32(jpeg) != checksum:
                    raise schema.altered(self.path, what)
                return jpeg
        return b""

    def keys_of(self, origin: str, *, after: str, limit: int) -> list[str]:
        """Return the first keys after `after` of the items made from that data set's files, ascending."""
        found = self.sql.execute(
            "SELECT key FROM items WHERE origin = ? AND key > ? ORDER BY key LIMIT ?", (origin, after, limit)
        )
        with sound(self.path, "its keys"):
            keys = [key for (key,) in found]
            if not {*map(type, keys)} <= {str}:
                raise TypeError("a key is of another kind")
        return keys

    def blocks_since(self, seq: int) -> Iterator[Block]:
        """Yield blocks of the live items newer than `seq`, ascending.

        Each item's checksum is looked at, which is a third of the time: what is searched was not altered.
        """
        found = self.sql.execute(
            "SELECT seq, key, label, uri, metadata, checksum, vector FROM items WHERE seq > ? ORDER BY seq",
            (seq,),
        )
        while True:
            with sound(self.path, "an item in it"):
                rows = found.fetchmany(_BLOCK)
                if not rows:
                    return
                seqs, keys, labels, uris, metadata, checksums, blobs = zip(*rows, strict=True)
                vectors = schema.vectors_of(blobs, self.path, self._dimension)
                sums = tuple(map(schema.item_checksum, keys, labels, uris, metadata, blobs))
                if sums != checksums:
                    pairs = zip(sums, checksums, strict=True)
                    key = keys[[a != b for a, b in pairs].index(True)]
                    raise schema.altered(self.path, f"the item {key!r}")
            yield Block(np.array(seqs, np.int64), vectors, list(labels), list(metadata))

    def count(self) -> int:
        """Return how many items there are."""
        ((count,),) = self.sql.execute("SELECT COUNT(*) FROM items")
        return int(count)

    def as_stored(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield all items in blocks, ascending, as bytes, with checksum and whether their source is whole."""
        found = self.sql.execute(
            "SELECT seq, CAST(key AS BLOB), CAST(label AS BLOB), CAST(uri AS BLOB), CAST(metadata AS BLOB),"  # noqa: S608
            f" CAST(vector AS BLOB), checksum, CAST({self.given()} AS BLOB), origin IS NULL OR ("
            "typeof(origin) = 'text' AND typeof(size) = 'integer' AND typeof(mtime) = 'integer' AND"
            " typeof(digest) = 'blob' AND length(digest) = 32) FROM items ORDER BY seq"
        )
        while block := found.fetchmany(_BLOCK):
            yield block

    def thumbnails_as_stored(self) -> Iterator[tuple[int, bytes, object, bool]]:
        """Yield the seq of each thumbnail, its bytes, its checksum, and whether its item is there."""
        found = self.sql.execute(
            "SELECT seq, CAST(jpeg AS BLOB), checksum,"
            " EXISTS (SELECT 1 FROM items WHERE items.seq = thumbnails.seq) FROM thumbnails"
        )
        yield from found

    def removals_since(self, removal: int) -> NDArray[np.int64]:
        """Return the seqs removed after that removal, int64 (r,), in order of removal."""
        found = self.sql.execute("SELECT seq FROM removals WHERE id > ? ORDER BY id", (removal,))
        with sound(self.path, "its removals"):
            return np.array([row[0] for row in found], np.int64)

    def given(self) -> str:
        """Return the name of the column `given`, or what stands for it in a file that has none yet."""
        found = self.sql.execute("SELECT 1 FROM pragma_table_info('items') WHERE name = 'given'").fetchone()
        return "given" if found else "NULL"

    def _items(self, which: str, *values: object) -> Iterator[GalleryItem]:
        found = self.sql.execute(_ITEMS.replace("given", self.given()) + which, values)
        return (schema.item_of(record, self.path, self._dimension) for record in found)


class Writer:
    """Writes within one transaction, alone among all processes; `reader` sees what was written so far."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._sql = reader.sql
        if reader.given() == "NULL":
            self._sql.execute(schema.ADD_GIVEN)

    def upsert(self, items: Sequence[CheckedItem], expected: Mapping[str, int] = _NOTHING) -> list[int]:
        """Store items; one whose key is there replaces it. Returns their versions, in order.

        With the same vector, to the bit, an item keeps the thumbnail and the source of the one that it
        replaces, where it brings none; and the source remembers what it gave of what is another now.
        Conflict tells that one is of another version than expected; 0 expects that it is not there.
        """
        check_own(self.reader.path.parent)
        self._check_versions(expected)
        first = self.reader.state().last_seq + 1
        versions = range(first, first + len(items))
        same = self._same_image(items)
        moves = [
            (version, same[item.key].version)
            for (item, _), version in zip(items, versions, strict=True)
            if item.key in same and not item.thumbnail
        ]
        self._sql.executemany("UPDATE thumbnails SET seq = ? WHERE seq = ?", moves)
        self._remove([item.key for item, _ in items])
        sourced = [with_source_of(same.get(checked.item.key), checked) for checked in items]
        self._sql.executemany(_INSERT, map(schema.record_of, sourced, versions))
        pairs = zip(versions, (item.thumbnail for item, _ in items), strict=True)
        self._sql.executemany(
            "INSERT INTO thumbnails (seq, checksum, jpeg) VALUES (?, ?, ?)",
            ((seq, zlib.crc32(jpeg), jpeg) for seq, jpeg in pairs if jpeg),
        )
        self._sql.execute("UPDATE state SET change = change + 1")
        return list(versions)

    def delete(self, keys: Sequence[str], expected: Mapping[str, int] = _NOTHING) -> int:
        """Delete the items of those keys, with the same condition; returns how many were there."""
        check_own(self.reader.path.parent)
        self._check_versions(expected)
        removed = self._remove(keys)
        if removed:
            self._sql.execute("UPDATE state SET change = change + 1")
        return removed

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes."""
        check_own(self.reader.path.parent)
        self._sql.executemany(
            "UPDATE items SET origin = ?, size = ?, mtime = ? WHERE key = ? AND digest = ?",
            ((it.origin, it.size, it.mtime_ns, key, it.digest) for key, it in sources.items()),
        )

    def publish(
        self, seen: State, *, index_file: str, checksum: str, count: int, facts: str, covers_removal: int
    ) -> bool:
        """Name the FAISS file that covers the items of the state `seen`, unless another was named since.

        The last removal whose item it does not hold is `covers_removal`. Without items it has no name.
        """
        published = (index_file, checksum, count, seen.last_seq, covers_removal, facts)
        done = self._sql.execute(
            f"UPDATE state SET change = change + 1, generation = generation + 1, ({PUBLISHED}) ="  # noqa: S608
            " (?, ?, ?, ?, ?, ?), published_checksum = ? WHERE generation = ?",
            (*published, schema.publication_checksum(*published), seen.generation),
        )
        if done.rowcount != 1:
            return False
        # Later ones are kept: who still has the file before follows by them (`Snapshot.advanced`), and so
        # does who opens a file that was added to.
        kept_after = min(seen.covers_removal, covers_removal)
        self._sql.execute("DELETE FROM removals WHERE id <= ?", (kept_after,))
        return True

    def want(self, index: str | None, recall: float | None) -> None:
        """Note which index is to be built from now on, and which recall it is to reach; None: as it was."""
        self._sql.execute(
            "UPDATE state SET change = change + 1, wanted_index = COALESCE(?, wanted_index),"
            " wanted_recall = COALESCE(?, wanted_recall)",
            (index, recall),
        )

    def name_taken(self, previous_name: str, previous_id: str) -> None:
        """Note under which name, and with which id, the gallery lies now whose name this one takes."""
        self._sql.execute(
            "UPDATE state SET change = change + 1, previous_name = ?, previous_id = ?",
            (previous_name, previous_id),
        )

    def _check_versions(self, expected: Mapping[str, int]) -> None:
        found = self.reader.seqs(list(expected))
        for key, version in expected.items():
            there = found.get(key, 0)
            if there != version:
                gallery = self.reader.path.parent.name
                told = (
                    f"the item {key!r} {_stands(there)} in the gallery {gallery}; the write expected that it "
                    f"{_stands(version)}: read it again, then decide"
                )
                raise Conflict(told, key=key, expected=version, found=there)

    def _same_image(self, items: Sequence[CheckedItem]) -> dict[str, GalleryItem]:
        """Return, by key, the stored items that items with the same vector are to replace."""
        vectors = {item.key: item.vector.astype("<f4").tobytes() for item, _ in items}
        found = self._sql.execute("SELECT key, vector FROM items" + _OF_KEYS, (_json(list(vectors)),))  # noqa: S608
        same = [key for key, vector in found if vector == vectors[key]]
        return self.reader.items(same) if same else {}

    def _remove(self, keys: Sequence[str]) -> int:
        seqs = [(seq,) for seq in self.reader.seqs(keys).values()]
        self._sql.executemany("INSERT INTO removals (seq) VALUES (?)", seqs)
        self._sql.executemany("DELETE FROM items WHERE seq = ?", seqs)
        self._sql.executemany("DELETE FROM thumbnails WHERE seq = ?", seqs)
        return len(seqs)


def _stands(version: int) -> str:
    return f"is of version {version}" if version else "is not there"


def _json(values: Sequence[str]) -> str:
    return json.dumps(values, ensure_ascii=False)
