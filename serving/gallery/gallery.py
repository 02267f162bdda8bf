"""A gallery: a folder of items with embeddings, searched while it changes.

    gallery.sqlite    the truth (`store`)
    index-*.faiss     derived from it (`index`); the one that is published is named in the store
    rebuild.lock      held by the process that makes the next one (`rebuild`)

A search runs in one read transaction of the store, with the snapshot in memory that stands for the same
state: it sees every write acknowledged before it began, by any process, and nothing of a later one.
"""

import math
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike

from serving.gallery.folder import check_path, made_aside
from serving.gallery.index.builder import Advance
from serving.gallery.index.choice import check_wanted
from serving.gallery.index.index import require_faiss
from serving.gallery.index.rebuild import Rebuilder, RebuildPolicy
from serving.gallery.item import (
    MAX_K,
    CheckedItem,
    GalleryItem,
    ItemChange,
    Neighbour,
    Source,
    change_items,
    check_cosine,
    check_items,
    check_keys,
    check_model,
    check_origin,
    check_unpictured,
    check_whole,
    in_order,
    normalize_queries,
)
from serving.gallery.search.counts import FieldCount, ValueCount, count_fields, count_values
from serving.gallery.search.duplicates import Duplicate, DuplicatesPage, duplicates, duplicates_page
from serving.gallery.search.filter import AllOf, Filter, check_filter, unknown_fields
from serving.gallery.search.others import SAME_SCORE, left_out
from serving.gallery.search.snapshot import Snapshot, SnapshotCache
from serving.gallery.status import GalleryStatus, status_of
from serving.gallery.store.schema import FILE_NAME, MadeFor, check_made_for
from serving.gallery.store.store import Store, create_store
from serving.gallery.store.transaction import Reader

if TYPE_CHECKING:
    from serving.gallery.vectors import Maker
    from serving.model.spec import ModelSpec

__all__ = ["Gallery", "GalleryItem", "GalleryStatus", "MadeFor", "Neighbour", "RebuildPolicy"]


class Gallery:
    """An open gallery: its items, and search over them; every method is thread-safe.

    What is written or searched for is checked, and InvalidArgument tells what is out of bounds. Any call may
    raise BadArtifact (the gallery file is damaged), NotFound (it is gone) and Unavailable (the disk fails,
    another gallery has this one's name, or it is closed). A write that returns is on disk; one that fails is
    undone as a whole, with Overloaded where another writer was too slow or the disk is full, or ReadOnly.
    """

    def __init__(self, path: Path, store: Store, policy: RebuildPolicy, device: str) -> None:
        """Use `open` or `create`."""
        self.path = path
        self.name = path.name
        self.meta = store.meta  # the model and dimension it is made for
        self.identity = store.identity  # device and inode of the file that was opened
        self._store = store
        self._rebuilder = Rebuilder(store, policy)
        self._snapshots = SnapshotCache(store, self._rebuilder, device=device)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        policy: RebuildPolicy | None = None,
        device: str = "cpu",
        **made_for: Unpack[MadeFor],
    ) -> Self:
        """Make a new, empty gallery for vectors of a model and open it; AlreadyExists: there is something.

        The folder appears complete or not at all. `policy` tells when the index is made anew, the device
        ("cpu", or "cuda" for the first GPU) where it is searched.
        """
        check_made_for(made_for)
        check_wanted(made_for.get("index"), made_for.get("recall"), dimension=made_for["dimension"])
        check_path(path)
        with made_aside(path) as aside:
            create_store(aside / FILE_NAME, **made_for)
        return cls.open(path, policy=policy, device=device)

    @classmethod
    def open(cls, path: Path, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> Self:
        """Open a gallery and its index, to be searched on a device as `create` tells.

        ReadOnly tells that this process may not write to it, and nobody has it open who may.
        """
        require_faiss(device)
        check_path(path)
        gallery = cls(path, Store(path / FILE_NAME), policy or RebuildPolicy(), device)
        try:
            with gallery._snapshots.open():
                pass
        except BaseException:
            gallery.close()
            raise
        return gallery

    def info(self) -> GalleryStatus:
        """Return what the gallery is and how it stands."""
        with self._snapshots.open() as (snapshot, _):
            return status_of(self.path, self._store, snapshot)

    def check_model(self, model: "ModelSpec | Maker") -> None:
        """Accept the gallery's own model, and a file of lower precision made from it; else ModelMismatch."""
        check_model(self.meta, model, self.name)

    def search(
        self,
        vectors: ArrayLike,
        k: int,
        *,
        minimum_score: float | None = None,
        exclude: Sequence[str] = (),
        filter: Filter | None = None,
        group_by_label: bool = False,
        exclude_same: str = "",
        exclude_same_above: float = SAME_SCORE,
        query_keys: Sequence[str] = (),
        with_vectors: bool = False,
        with_thumbnails: bool = False,
    ) -> list[list[Neighbour]]:
        """Find the k items nearest to each query, unit vectors (Q, d); all where there are fewer.

        With `group_by_label` only the best item of each label is a hit; one without stands for itself. The
        keys in `exclude` are passed over, and with `exclude_same`, a field, all that have the value there of
        the item that a query shows (`left_out`): that of its key, where `query_keys` has one for it, or the
        best hit of at least `exclude_same_above`.

        Returns:
            For each query its hits, best first, ties in the order of their keys. Hits of one item share
            their metadata: do not write to it.

        Raises:
            BadVector: A vector is not finite or not of unit norm; `row` tells which.
            InvalidArgument: Another argument is out of bounds, or the filter compares a field with a kind of
                value that no item holds there. A condition on a field that no item has holds for no item.
        """
        queries = normalize_queries(vectors, dimension=self.meta.dimension)
        k = check_whole(k, "k", least=1, most=MAX_K)
        least = -math.inf if minimum_score is None else minimum_score
        scores = {"the minimum score": minimum_score or 0.0, "exclude_same_above": exclude_same_above}
        for what, score in scores.items():
            check_cosine(what, score)
        demanded = None if filter is None else check_filter(filter)
        with self._snapshots.open() as (snapshot, reader):
            excluded = list(reader.seqs(check_keys(exclude)).values()) if exclude else []
            snapshot.check(demanded)
            if exclude_same:
                found = []
                for row, key in enumerate(query_keys or [""] * len(queries)):
                    query = queries[row : row + 1]
                    own, other = left_out(snapshot, reader, query, key, exclude_same, exclude_same_above)
                    both = other if demanded is None else AllOf((demanded, other))
                    found += snapshot.search(query, k, least, own + excluded, both, by_label=group_by_label)
            else:
                found = snapshot.search(queries, k, least, excluded, demanded, by_label=group_by_label)
            more = {"vectors": with_vectors, "thumbnails": with_thumbnails}
            return snapshot.neighbours(reader, found, k, by_label=group_by_label, **more)

    def count(self, filter: Filter | None = None) -> int:
        """Return how many items fulfil a filter, which is checked as in `search`; all of them with none."""
        demanded = None if filter is None else check_filter(filter)
        with self._snapshots.open() as (snapshot, _):
            snapshot.check(demanded)
            return snapshot.count(demanded)

    def matching(self, filter: Filter, *, after: int = 0, thumbnails: bool = False) -> Generator[GalleryItem]:
        """Yield the items that fulfil a filter, checked as in `search`, by version, of those above `after`.

        They are of one state of the gallery, and are read as they are asked for.
        """
        demanded = check_filter(filter)
        with self._snapshots.open() as (snapshot, reader):
            snapshot.check(demanded)
            seqs = snapshot.seqs(snapshot.places(demanded))
            found = reader.by_seq(seqs[np.searchsorted(seqs, after, "right") :])
            yield from reader.pictured(found) if thumbnails else found

    def sample(
        self, size: int, *, filter: Filter | None = None, seed: int = 0, thumbnails: bool = False
    ) -> Generator[GalleryItem]:
        """Yield `size` items that fulfil a filter, or all where there are fewer, each as likely as any other.

        The same `seed` draws the same of an unchanged gallery, 0 draws anew. They are read as in `matching`.
        """
        demanded = None if filter is None else check_filter(filter)
        with self._snapshots.open() as (snapshot, reader):
            snapshot.check(demanded)
            places = snapshot.places(demanded)
            drawn = np.random.default_rng(seed or None).choice(places, min(size, len(places)), replace=False)
            found = reader.by_seq(snapshot.seqs(drawn))
            yield from reader.pictured(found) if thumbnails else found

    def duplicates(self, above: float, *, progress: Advance = lambda *_: None) -> list[Duplicate]:
        """Find pairs of items that score at least `above`, by their clusters, the largest first.

        Each item is compared with its nearest by the index, which may miss some as a search may; `progress`
        gets stage, done and total.
        """
        check_cosine("above", above)
        with self._snapshots.open() as (snapshot, reader):
            return duplicates(snapshot, reader, above, progress)

    def duplicates_page(
        self, above: float, *, after: int = 0, limit: int = 100, progress: Advance = lambda *_: None
    ) -> DuplicatesPage:
        """Find likewise the pairs of the first `limit` items, by version, of those above `after`."""
        check_cosine("above", above)
        with self._snapshots.open() as (snapshot, reader):
            return duplicates_page(snapshot, reader, above, after, limit, progress)

    def fields(self, limit: int = sys.maxsize) -> list[FieldCount]:
        """Return the fields of the metadata, and the label's: by name, the `limit` fullest."""
        with self._snapshots.open() as (snapshot, _):
            return count_fields(snapshot.columns(), limit)

    def values(self, field: str, *, prefix: str = "", limit: int = 100) -> tuple[list[ValueCount], int]:
        """Return the `limit` most frequent values of a field, in order, and how many there are in all.

        With a prefix it is strings that begin with it, whatever the case of their letters.
        """
        with self._snapshots.open() as (snapshot, _):
            return count_values(snapshot.columns(), field, prefix, limit)

    def unknown_fields(self, filter: Filter) -> tuple[str, ...]:
        """Return the fields of a filter that no item has, sorted, for who may have misspelt one."""
        demanded = check_filter(filter)
        with self._snapshots.open() as (snapshot, _):
            return unknown_fields(demanded, snapshot.kinds_of)

    def upsert(self, items: Iterable[GalleryItem], *, expected: Mapping[str, int] | None = None) -> list[int]:
        """Store items; one whose key is there is replaced. Returns their versions, in order.

        An item of the same vector, to the bit, keeps the thumbnail and the source of the one that it
        replaces, where it brings none. No key may come twice. It is a Conflict where a key, of `items` or
        another, has not the version that is `expected` of it now (0: not to be there).
        """
        return self.upsert_checked(check_items(items, dimension=self.meta.dimension), expected=expected)

    def upsert_checked(
        self, items: Sequence[CheckedItem], *, expected: Mapping[str, int] | None = None
    ) -> list[int]:
        """Store, as `upsert` does, items that were checked one by one; no key twice."""
        if not self.meta.thumbnail_side:
            check_unpictured(items, self.name)
        with self._store.write() as writer:
            stored = writer.upsert(items, expected or {})
            state = writer.reader.state()
        self._rebuilder.consider(state)
        return stored

    def delete(self, keys: Sequence[str], *, expected: Mapping[str, int] | None = None) -> int:
        """Delete the items of `keys` that are there, on conditions as `upsert`; returns how many were."""
        checked = check_keys(keys)
        with self._store.write() as writer:
            deleted = writer.delete(checked, expected or {})
            state = writer.reader.state()
        self._rebuilder.consider(state)
        return deleted

    def update(
        self, changes: Sequence[ItemChange], *, expected: Mapping[str, int] | None = None
    ) -> list[int]:
        """Change the texts of items that are there, whose rest stays, on conditions as `upsert`.

        All are changed or none, each key once; NotFound names the first that is not there. Returns their
        versions, in order.
        """
        keys = check_keys([change.key for change in changes])
        with self._store.write() as writer:
            items = change_items(changes, writer.reader.items(keys))
            versions = writer.upsert(items, expected or {})
            state = writer.reader.state()
        self._rebuilder.consider(state)
        return versions

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes."""
        check_keys(list(sources))
        for source in sources.values():
            check_origin(source.origin)
        with self._store.write() as writer:
            writer.touch(sources)

    def find(self, keys: Sequence[str], *, thumbnails: bool = False) -> dict[str, GalleryItem]:
        """Return the items of those `keys` that are there."""
        wanted = check_keys(keys)
        with self._store.read() as reader:
            found = reader.items(wanted)
            return {it.key: it for it in reader.pictured(found.values())} if thumbnails else found

    def get(self, keys: Sequence[str], *, thumbnails: bool = False) -> list[GalleryItem]:
        """Return the items of `keys`, in that order; NotFound names the first that is not there."""
        return in_order(keys, self.find(keys, thumbnails=thumbnails), self.name)

    def keys_of(self, origin: str, *, after: str = "", limit: int = 1000) -> list[str]:
        """Return the first `limit` keys after `after` of items made from a data set's files, ascending."""
        check_origin(origin)
        with self._store.read() as reader:
            return reader.keys_of(origin, after=after, limit=limit)

    def list(self, *, after: str = "", limit: int = 100, prefix: str = "") -> list[GalleryItem]:
        """Return the first `limit` items by key of those that follow `after` and begin with `prefix`."""
        return [*islice(self.by_key(after=after, prefix=prefix), limit)]

    def by_key(
        self, *, after: str = "", prefix: str = "", thumbnails: bool = False
    ) -> Generator[GalleryItem]:
        """Yield the items by key that follow `after` and begin with `prefix`, read as in `matching`."""
        with self._store.read() as reader:
            found = reader.by_key(after=after, prefix=prefix)
            yield from reader.pictured(found) if thumbnails else found

    def rebuild(
        self,
        index: str | None = None,
        recall: float | None = None,
        *,
        whole: bool = True,
        progress: Advance = lambda *_: None,
    ) -> None:
        """Make the index anew from the store and publish it; searches go on meanwhile.

        Index and recall are what is wanted from now on, as `create` tells; it is built `whole` even where
        adding what is newer would do. `progress` gets stage, done and total; what it raises ends the work.
        """
        check_wanted(index, recall, dimension=self.meta.dimension)
        if index is not None or recall is not None:
            with self._store.write() as writer:
                writer.want(index, recall)
        if not whole:
            with self._snapshots.open() as (snapshot, _):
                whole = snapshot.damaged
        self._rebuilder.run(whole=whole, progress=progress)

    def reading(self) -> AbstractContextManager[tuple[Snapshot, Reader]]:
        """Begin a read transaction, with what is in memory brought to its state."""
        return self._snapshots.open()

    def retire(self) -> None:
        """Keep no file open and nothing in memory between calls from now on; each call costs more."""
        self._store.retire()
        self._snapshots.retire()

    def close(self) -> None:
        """Stop the background rebuild and close the files; calls that are running still end well."""
        self._rebuilder.close()
        self._snapshots.retire()  # a mapped file of columns is an open one
        self._store.close()
