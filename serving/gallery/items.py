"""The items of a gallery by key: written, read, listed, compared with the files they were made from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from serving.errors import InvalidArgument, NotFound
from serving.gallery.argument import check_whole
from serving.gallery.item import (
    Item,
    Source,
    check_items,
    check_key,
    check_keys,
    check_origin,
    check_source,
    check_start,
    check_versions,
)
from serving.gallery.store.schema import Meta
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import State

__all__ = ["MAX_PAGE", "Items"]

MAX_PAGE = 10_000


class Items:
    """What can be done with an open gallery's items, but for search; every method is thread-safe."""

    def __init__(self, path: Path, store: Store, consider: Callable[[State], None]) -> None:
        """Use a store, and show the state after each write to `consider`."""
        self.path = path
        self.name = path.name
        self._store = store
        self._consider = consider

    @property
    def meta(self) -> Meta:
        """The model and dimension the gallery is made for."""
        return self._store.meta

    def upsert(self, items: Iterable[Item], *, expected: Mapping[str, int] | None = None) -> list[int]:
        """Store items, all or none; an item whose key is there is replaced whole.

        Args:
            items: What is stored.
            expected: Which version some keys must have now, those of `items` or others; 0: not be there.

        Returns:
            Their versions, in order; they are on disk.

        Raises:
            InvalidArgument: An item is out of bounds, or a key comes twice.
            Conflict: An item is of another version than the one expected; nothing was stored.
            Overloaded: Another writer was too slow, or the disk is full.
            ReadOnly: This process may not write to the gallery.
            Unavailable: The disk fails, another gallery has this one's name, or it is closed.
        """
        checked = check_items(items, dimension=self.meta.dimension)
        versions = check_versions(expected)
        if not self.meta.thumbnail_side:
            for item in checked:
                if item.thumbnail:
                    raise InvalidArgument(
                        f"the item {item.key!r} has a thumbnail, and the gallery {self.name} keeps none: "
                        "leave it out, or make the gallery with thumbnails"
                    )
        if not checked and not versions:
            return []
        with self._store.write() as writer:
            stored = writer.upsert(checked, expected=versions)
            state = writer.state()
        self._consider(state)
        return stored

    def delete(self, keys: Sequence[str], *, expected: Mapping[str, int] | None = None) -> int:
        """Delete items, all or none; keys that are not there are passed over.

        Args:
            keys: Whose items are deleted.
            expected: Which version some keys must have now, those of `keys` or others; 0: not be there.

        Returns:
            How many were there.

        Raises:
            InvalidArgument: A key is out of bounds.
            Conflict: An item is of another version than the one expected; nothing was deleted.
            Overloaded: Another writer was too slow, or the disk is full.
            ReadOnly: This process may not write to the gallery.
            Unavailable: The disk fails, another gallery has this one's name, or it is closed.
        """
        checked, versions = check_keys(keys), check_versions(expected)
        with self._store.write() as writer:
            deleted = writer.delete(checked, expected=versions)
            state = writer.state()
        self._consider(state)
        return deleted

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes.

        The items and their versions stay; the others are passed over.

        Raises:
            InvalidArgument: A key or source is out of bounds.
            Overloaded: Another writer was too slow, or the disk is full.
            ReadOnly: This process may not write to the gallery.
            Unavailable: The disk fails, another gallery has this one's name, or it is closed.
        """
        checked = {check_key(key): check_source(source) for key, source in sources.items()}
        with self._store.write() as writer:
            writer.touch(checked)

    def get(self, keys: Sequence[str], *, thumbnails: bool = False) -> list[Item]:
        """Return the items of `keys`, in that order; with their thumbnails only if asked to.

        Raises:
            NotFound: A key is not there.
            BadArtifact: The gallery file is damaged.
        """
        wanted = check_keys(keys)
        with self._store.read() as reader:
            found = reader.items(wanted)
            if thumbnails:
                found = {
                    key: replace(item, thumbnail=reader.thumbnail(key) or b"") for key, item in found.items()
                }
        missing = [key for key in wanted if key not in found]
        if missing:
            more = f" (nor are {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise NotFound(f"there is no item {missing[0]!r} in the gallery {self.name}{more}")
        return [found[key] for key in keys]

    def thumbnail(self, key: str) -> bytes:
        """Return the JPEG picture that was stored with an item.

        Raises:
            NotFound: There is no such item, or it has none.
            BadArtifact: The gallery file is damaged.
        """
        check_key(key)
        with self._store.read() as reader:
            found = reader.thumbnail(key)
        if found is None:
            raise NotFound(f"there is no item {key!r} with a thumbnail in the gallery {self.name}")
        return found

    def sources(self, keys: Sequence[str]) -> dict[str, Source]:
        """Return which file each item was made from, of those of `keys` that were made from one.

        Raises:
            InvalidArgument: A key is out of bounds.
            BadArtifact: The gallery file is damaged.
        """
        wanted = check_keys(keys)
        with self._store.read() as reader:
            return reader.sources(wanted)

    def keys_of(self, origin: str, *, after: str = "", limit: int = 1000) -> list[str]:
        """Return one page of the keys of items made from a data set's files, ascending.

        Args:
            origin: Which data set.
            after: The last key of the page before.
            limit: How many keys there are on a page; the last one has fewer.

        Raises:
            InvalidArgument: An argument is out of bounds.
            BadArtifact: The gallery file is damaged.
        """
        check_origin(origin)
        check_start(after, "key to begin after")
        most = _check_limit(limit)
        with self._store.read() as reader:
            return reader.keys_of(origin, after=after, limit=most)

    def list(self, *, after: str = "", limit: int = 100, prefix: str = "") -> list[Item]:
        """Return one page of items, ascending by key; all pages together are of no one state.

        Args:
            after: The last key of the page before.
            limit: How many items there are on a page; the last one has fewer.
            prefix: How their keys begin.

        Raises:
            InvalidArgument: A text cannot be part of a key, or the limit is out of range.
            BadArtifact: The gallery file is damaged.
        """
        check_start(after, "key to begin after")
        check_start(prefix, "prefix of keys")
        most = _check_limit(limit)
        with self._store.read() as reader:
            return reader.page(after=after, limit=most, prefix=prefix)


def _check_limit(limit: int) -> int:
    return check_whole(limit, "the limit of a page", least=1, most=MAX_PAGE)
