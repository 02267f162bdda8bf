"""A gallery: a folder of items with embeddings, searched while it changes.

    gallery.sqlite    the truth (`store`)
    index-*.faiss     derived from it (`index`); the one that is published is named in the store
    rebuild.lock      held by the process that makes the next one (`rebuild`)

A search runs in one read transaction of the store, with the snapshot in memory that stands for the same
state: it sees every write acknowledged before it began, by any process, and nothing of a later one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from numpy.typing import ArrayLike

from serving.errors import InvalidArgument, NotFound
from serving.gallery.folder import check_path, make_gallery
from serving.gallery.index.builder import Advance
from serving.gallery.index.factory import check_recall, check_type
from serving.gallery.index.index import require_faiss
from serving.gallery.index.metadata import IndexMetadata
from serving.gallery.index.rebuild import Rebuilder, RebuildPolicy
from serving.gallery.info import GalleryInfo, check_model
from serving.gallery.item import (
    MAX_K,
    MAX_KEY_BYTES,
    Hit,
    Item,
    Source,
    check_items,
    check_key,
    check_keys,
    check_origin,
    check_source,
    check_versions,
)
from serving.gallery.search.filter import Filter, check_filter, check_kinds, unknown_fields
from serving.gallery.search.snapshot import SnapshotCache
from serving.gallery.store.schema import FILE_NAME, FORMAT_VERSION, MAX_DIMENSION, MAX_THUMBNAIL_SIDE
from serving.gallery.store.store import Store
from serving.gallery.validation import check_number, check_text, check_whole, normalize_queries

if TYPE_CHECKING:
    from serving.model.spec import ModelSpec

__all__ = ["MAX_PAGE", "Gallery", "GalleryInfo", "Hit", "Item", "RebuildPolicy"]

MAX_PAGE = 10_000


class Gallery:
    """An open gallery: its items, and search over them; every method is thread-safe.

    All that is given is checked, and InvalidArgument tells what is out of bounds. Any call may raise
    BadArtifact (the gallery file is damaged), NotFound (it is gone) and Unavailable (the disk fails, another
    gallery has this one's name, or it is closed). A write that fails is undone as a whole, with Overloaded
    where another writer was too slow or the disk is full, or ReadOnly; one that returns is on disk.
    """

    def __init__(self, path: Path, store: Store, policy: RebuildPolicy, device: str) -> None:
        """Use `open` or `create`."""
        self.path = path
        self.name = path.name
        self.meta = store.meta  # the model and dimension it is made for
        self._store = store
        self._rebuilder = Rebuilder(store, policy)
        self._snapshots = SnapshotCache(store, self._rebuilder.consider, device=device)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        model_name: str,
        fingerprint: str,
        dimension: int,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float = 0.99,
        policy: RebuildPolicy | None = None,
        device: str = "cpu",
    ) -> Self:
        """Make a new, empty gallery for vectors of a model and open it; AlreadyExists: there is something.

        The folder appears complete or not at all. `thumbnail_side` is the longer side in pixels of pictures
        kept with items, 0: none. The index is "auto", which is to reach this recall@10, "exact" or a FAISS
        factory string; `policy` tells when it is made anew. The device is "cpu", or "cuda" for the first GPU.
        """
        dimension = check_whole(dimension, "the dimension", least=1, most=MAX_DIMENSION)
        side = check_whole(thumbnail_side, "the side of thumbnails", least=0, most=MAX_THUMBNAIL_SIDE)
        check_recall(check_number(recall, "the wanted recall"))
        check_type(check_text(index, "type of the index", least=0, most=MAX_KEY_BYTES), dimension=dimension)
        check_path(path)
        make_gallery(
            path,
            model_name=check_text(model_name, "name of the model", least=0, most=MAX_KEY_BYTES),
            fingerprint=check_text(fingerprint, "fingerprint of the model", least=0, most=MAX_KEY_BYTES),
            dimension=dimension,
            thumbnail_side=side,
            index=index,
            recall=recall,
        )
        return cls.open(path, policy=policy, device=device)

    @classmethod
    def open(cls, path: Path, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> Self:
        """Open a gallery and its index, to be searched on a device as `create` tells.

        Raises:
            NotFound: There is no gallery at `path`.
            ReadOnly: This process may not write to it, and nobody has it open who may.
            BadSetting: FAISS is not installed, or there is no such device.
        """
        require_faiss(device)
        check_path(path)
        if not (path / FILE_NAME).is_file():
            raise NotFound(f"there is no gallery at {path}; create it with crossbatch index")
        gallery = cls(path, Store(path / FILE_NAME), policy or RebuildPolicy(), device)
        try:
            with gallery._snapshots.open():
                pass
        except BaseException:
            gallery.close()
            raise
        return gallery

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode of the file that was opened."""
        return self._store.identity

    def info(self) -> GalleryInfo:
        """Return what the gallery is and how it stands."""
        with self._snapshots.open() as (snapshot, _):
            index, state, meta = snapshot.sealed.index, snapshot.state, self.meta
            dead, newer_dead = snapshot.dead, snapshot.growing.dead
            facts = index.facts if index else IndexMetadata()
            previous = state.previous_name
            if previous in ("", self.name) or not (self.path.with_name(previous) / FILE_NAME).is_file():
                previous = ""
            return GalleryInfo(
                name=self.name,
                path=str(self.path),
                model_name=meta.model_name,
                fingerprint=meta.fingerprint,
                dimension=meta.dimension,
                items=int((~dead).sum()),
                fresh=int((~newer_dead).sum()),
                deleted=int(dead.sum()),
                index_type=facts.type,
                wanted_index=state.wanted_index,
                recall=facts.recall,
                wanted_recall=state.wanted_recall,
                latency_ms=facts.latency_ms,
                parameters=facts.parameters,
                trials=facts.trials,
                note=facts.note,
                index_items=len(index) if index else 0,
                index_bytes=index.bytes if index else 0,
                store_bytes=self._store.bytes,
                generation=state.generation,
                previous_name=previous,
                format_version=FORMAT_VERSION,
                created=meta.created,
            )

    def check_model(self, model: "ModelSpec") -> None:
        """Accept the gallery's own model, and a file of lower precision made from it; else ModelMismatch."""
        check_model(self.name, self.meta, model)

    def search(
        self,
        vectors: ArrayLike,
        k: int,
        *,
        minimum_score: float | None = None,
        exclude: Sequence[str] = (),
        filter: Filter | None = None,
        group_by_label: bool = False,
    ) -> list[list[Hit]]:
        """Find the k items nearest to each query.

        Args:
            vectors: Unit vectors (Q, d).
            k: How many to find; all where there are fewer.
            minimum_score: The least cosine of a hit.
            exclude: Keys of items that are passed over, for every query.
            filter: What the label and metadata of a hit must fulfil.
            group_by_label: Whether of the items of one label only the best is a hit; an item with an empty
                label stands for itself.

        Returns:
            For each query its hits, best first, ties in the order of their keys. Hits of one item share
            their metadata: do not write to it.

        Raises:
            InvalidArgument: An argument is out of bounds, or the filter compares a field with a kind of value
                that no item holds there. A condition on a field that no item has holds for no item.
        """
        queries = normalize_queries(vectors, dimension=self.meta.dimension)
        k = check_whole(k, "k", least=1, most=MAX_K)
        least = -math.inf if minimum_score is None else check_number(minimum_score, "the minimum score")
        if minimum_score is not None and not -1.0 <= minimum_score <= 1.0:  # NaN too
            raise InvalidArgument(f"the minimum score is {minimum_score}; expected a cosine in [-1, 1]")
        keys = [] if exclude == () else check_keys(exclude)
        demanded = None if filter is None else check_filter(filter)
        with self._snapshots.open() as (snapshot, reader):
            if demanded is not None and not snapshot.dead.all():
                check_kinds(demanded, snapshot.kinds_of)
            found = snapshot.search(
                queries,
                k,
                minimum_score=least,
                excluded=reader.seqs(keys).values() if keys else (),
                filter=demanded,
                by_label=group_by_label,
            )
            rows = reader.rows({seq for near in found for seq, _ in near})
        best = []
        for near in found:
            order = sorted([(-score, rows[seq].key, seq) for seq, score in near])
            if group_by_label:
                first: dict[str | int, tuple[float, str, int]] = {}
                for each in order:
                    first.setdefault(rows[each[2]].label or each[2], each)
                order = list(first.values())
            best.append(order[:k])
        metadata = reader.metadata([rows[seq] for seq in {seq for order in best for _, _, seq in order}])
        return [
            [  # a cosine, though vectors are of unit length but for rounding
                Hit(key, (row := rows[seq]).label, row.uri, metadata[seq], max(-1.0, min(1.0, -minus)), seq)
                for minus, key, seq in order
            ]
            for order in best
        ]

    def fields(self) -> dict[str, tuple[str, ...]]:
        """Return the fields of the metadata by name, and the kinds of value that each holds, sorted.

        Those that deleted items had may be among them, until the next rebuild at the latest; one that holds
        only objects has no kind.
        """
        with self._snapshots.open() as (snapshot, _):
            return snapshot.fields()

    def unknown_fields(self, filter: Filter) -> tuple[str, ...]:
        """Return the fields of a filter that no item has, sorted, for who may have misspelt one."""
        demanded = check_filter(filter)
        with self._snapshots.open() as (snapshot, _):
            return unknown_fields(demanded, snapshot.kinds_of)

    def upsert(self, items: Iterable[Item], *, expected: Mapping[str, int] | None = None) -> list[int]:
        """Store items; one whose key is there is replaced whole. Returns their versions, in order.

        Args:
            items: What is stored; no key twice.
            expected: Which version some keys must have now, those of `items` or others; 0: not be there.

        Raises:
            Conflict: An item is of another version than the one expected.
        """
        checked = check_items(items, dimension=self.meta.dimension)
        versions = check_versions(expected)
        pictured = [item.key for item in checked if item.thumbnail]
        if pictured and not self.meta.thumbnail_side:
            raise InvalidArgument(
                f"the item {pictured[0]!r} has a thumbnail, and the gallery {self.name} keeps none: "
                "leave it out, or make the gallery with thumbnails"
            )
        if not checked and not versions:
            return []
        with self._store.write() as writer:
            stored = writer.upsert(checked, expected=versions)
            state = writer.state()
        self._rebuilder.consider(state)
        return stored

    def delete(self, keys: Sequence[str], *, expected: Mapping[str, int] | None = None) -> int:
        """Delete the items of `keys` that are there, on conditions as `upsert`; returns how many were."""
        checked, versions = check_keys(keys), check_versions(expected)
        with self._store.write() as writer:
            deleted = writer.delete(checked, expected=versions)
            state = writer.state()
        self._rebuilder.consider(state)
        return deleted

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes."""
        checked = {check_key(key): check_source(source) for key, source in sources.items()}
        with self._store.write() as writer:
            writer.touch(checked)

    def get(self, keys: Sequence[str], *, thumbnails: bool = False) -> list[Item]:
        """Return the items of `keys`, in that order; NotFound names the first that is not there."""
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
        """Return the JPEG picture that was stored with an item; NotFound where there is none."""
        check_key(key)
        with self._store.read() as reader:
            found = reader.thumbnail(key)
        if found is None:
            raise NotFound(f"there is no item {key!r} with a thumbnail in the gallery {self.name}")
        return found

    def sources(self, keys: Sequence[str]) -> dict[str, Source]:
        """Return which file each item was made from, of those of `keys` that were made from one."""
        wanted = check_keys(keys)
        with self._store.read() as reader:
            return reader.sources(wanted)

    def keys_of(self, origin: str, *, after: str = "", limit: int = 1000) -> list[str]:
        """Return the first `limit` keys after `after` of items made from a data set's files, ascending."""
        check_origin(origin)
        check_text(after, "key to begin after", least=0, most=MAX_KEY_BYTES)
        most = check_whole(limit, "the limit of a page", least=1, most=MAX_PAGE)
        with self._store.read() as reader:
            return reader.keys_of(origin, after=after, limit=most)

    def list(self, *, after: str = "", limit: int = 100, prefix: str = "") -> list[Item]:
        """Return the first `limit` items by key of those that follow `after` and begin with `prefix`."""
        check_text(after, "key to begin after", least=0, most=MAX_KEY_BYTES)
        check_text(prefix, "prefix of keys", least=0, most=MAX_KEY_BYTES)
        most = check_whole(limit, "the limit of a page", least=1, most=MAX_PAGE)
        with self._store.read() as reader:
            return reader.page(after=after, limit=most, prefix=prefix)

    def rebuild(
        self,
        index: str | None = None,
        recall: float | None = None,
        *,
        whole: bool = True,
        progress: Advance = lambda *_: None,
    ) -> None:
        """Make the index anew from the store and publish it; searches go on meanwhile.

        Args:
            index: The type wanted from now on, as `create` tells.
            recall: The recall at 10 wanted from now on.
            whole: Whether to build it anew even where adding what is newer would do.
            progress: Called with the stage, what is done of it and its total; what it raises ends the work.
        """
        if index is not None:
            check_text(index, "type of the index", least=0, most=MAX_KEY_BYTES)
            check_type(index, dimension=self.meta.dimension)
        if recall is not None:
            check_recall(check_number(recall, "the wanted recall"))
        if index is not None or recall is not None:
            with self._store.write() as writer:
                state = writer.state()
                writer.want(
                    state.wanted_index if index is None else index,
                    state.wanted_recall if recall is None else recall,
                )
        if not whole:
            with self._snapshots.open() as (snapshot, _):
                whole = snapshot.damaged
        self._rebuilder.run(whole=whole, progress=progress)

    def retire(self) -> None:
        """Keep no file open and nothing in memory between calls from now on; each call costs more."""
        self._store.retire()
        self._snapshots.retire()

    def close(self) -> None:
        """Stop the background rebuild and close the files; calls that are running still end well."""
        self._rebuilder.close()
        self._snapshots.retire()  # a mapped file of columns is an open one
        self._store.close()
