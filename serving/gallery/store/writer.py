"""The writing side of a transaction on a gallery file."""

import zlib
from collections.abc import Mapping, Sequence

from serving.errors import Conflict
from serving.gallery.item import Item, Source
from serving.gallery.store.publication import PUBLISHED, publication_checksum
from serving.gallery.store.record import COLUMNS, record_of, source_columns
from serving.gallery.store.transaction import Reader, State

__all__ = ["Writer"]

_INSERT = f"INSERT INTO items ({COLUMNS}) VALUES ({', '.join('?' * len(COLUMNS.split(',')))})"  # noqa: S608


class Writer(Reader):
    """Writes within one transaction, alone among all processes; nothing is seen until it commits."""

    def upsert(self, items: Sequence[Item], *, expected: Mapping[str, int] | None = None) -> list[int]:
        """Store checked items; one whose key is there replaces it whole.

        Returns:
            Their versions, in order, each larger than all there have been.

        Raises:
            Conflict: An item is of another version than the one expected; 0 expects that it is not there.
        """
        self._check_versions(expected or {})
        self._remove([item.key for item in items])
        first = self.state().last_seq + 1
        versions = range(first, first + len(items))
        self._sql.executemany(_INSERT, map(record_of, items, versions))
        self._sql.executemany(
            "INSERT INTO thumbnails (seq, checksum, jpeg) VALUES (?, ?, ?)",
            (
                (seq, zlib.crc32(item.thumbnail), item.thumbnail)
                for seq, item in zip(versions, items, strict=True)
                if item.thumbnail
            ),
        )
        self._sql.execute("UPDATE state SET change = change + 1")
        return list(versions)

    def delete(self, keys: Sequence[str], *, expected: Mapping[str, int] | None = None) -> int:
        """Delete the items of those keys; returns how many were there.

        Raises:
            Conflict: An item is of another version than the one expected; 0 expects that it is not there.
        """
        self._check_versions(expected or {})
        removed = self._remove(keys)
        if removed:
            self._sql.execute("UPDATE state SET change = change + 1")
        return removed

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes.

        Nothing that a search sees changes.
        """
        self._sql.executemany(
            "UPDATE items SET origin = ?, size = ?, mtime = ?, digest = ? WHERE key = ? AND digest = ?",
            ((*source_columns(source), key, source.digest) for key, source in sources.items()),
        )

    def publish(
        self,
        seen: State,
        *,
        index_file: str,
        checksum: str,
        count: int,
        facts: str,
        covers_removal: int,
    ) -> bool:
        """Name the FAISS file that covers the items of the state `seen`.

        Args:
            seen: The state that was read for it.
            index_file: Its name; empty where there are no items.
            checksum: Its SHA-256.
            count: How many vectors it holds.
            facts: JSON of what it is.
            covers_removal: The last removal whose item it does not hold; that of the file before, if it was
                made by adding to it.

        Returns:
            Whether it was published: not if another was since `seen`.
        """
        published = (index_file, checksum, count, seen.last_seq, covers_removal, facts)
        done = self._sql.execute(
            f"UPDATE state SET change = change + 1, generation = generation + 1, ({PUBLISHED}) ="  # noqa: S608
            " (?, ?, ?, ?, ?, ?), published_checksum = ? WHERE generation = ?",
            (*published, publication_checksum(*published), seen.generation),
        )
        if done.rowcount != 1:
            return False
        # Later ones are kept: who still has the file before follows by them (`Snapshot.advanced`), and so
        # does who opens a file that was added to.
        kept_after = min(seen.covers_removal, covers_removal)
        self._sql.execute("DELETE FROM removals WHERE id <= ?", (kept_after,))
        return True

    def want(self, index: str, recall: float) -> None:
        """Note which index is to be built from now on, and which recall it is to reach."""
        self._sql.execute(
            "UPDATE state SET change = change + 1, wanted_index = ?, wanted_recall = ?", (index, recall)
        )

    def name_taken(self, previous_name: str, previous_id: str) -> None:
        """Note under which name, and with which id, the gallery lies now whose name this one takes."""
        self._sql.execute(
            "UPDATE state SET change = change + 1, previous_name = ?, previous_id = ?",
            (previous_name, previous_id),
        )

    def _check_versions(self, expected: Mapping[str, int]) -> None:
        found = self.seqs(list(expected))
        for key, version in expected.items():
            there = found.get(key, 0)
            if there != version:
                raise Conflict(
                    f"the item {key!r} {_stands(there)} in the gallery {self._path.parent.name}; the write "
                    f"expected that it {_stands(version)}: read it again, then decide",
                    key=key,
                    expected=version,
                    found=there,
                )

    def _remove(self, keys: Sequence[str]) -> int:
        seqs = [(seq,) for seq in self.seqs(keys).values()]
        self._sql.executemany("INSERT INTO removals (seq) VALUES (?)", seqs)
        self._sql.executemany("DELETE FROM items WHERE seq = ?", seqs)
        self._sql.executemany("DELETE FROM thumbnails WHERE seq = ?", seqs)
        return len(seqs)


def _stands(version: int) -> str:
    return f"is of version {version}" if version else "is not there"
