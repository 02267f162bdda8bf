"""The gallery that is filled: opened or made, and written to by one thread, never over a newer item."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from serving.errors import AlreadyExists, BadSetting, Conflict, CrossbatchError, InvalidArgument, NotFound
from serving.gallery.gallery import Gallery
from serving.gallery.index.choice import check_type
from serving.gallery.item import GalleryItem, Source, check_fields
from serving.gallery.merge import merge
from serving.gallery.place import AnyGallery, Galleries
from serving.model.spec import ModelSpec

__all__ = ["ItemWrite", "Storing", "Target", "delete_items", "stored_of"]

_THUMBNAIL_SIDE = 256
_MOST = 1024  # changes that wait while a slow disk takes those before


@dataclass
class Target:
    """One name in a place of galleries, and the model whose embeddings go there.

    A gallery that is there is opened, and must be of that model; a new one gets `index`, `recall` and, if
    wanted, thumbnails.
    """

    directory: Galleries
    name: str
    model: ModelSpec
    thumbnails: bool = False
    index: str | None = None
    recall: float | None = None

    def __post_init__(self) -> None:
        if self.index is not None:  # now, and not when all images have been embedded
            check_type(self.index, dimension=self.model.dimension)
        self.gallery = self._existing()

    @property
    def thumbnail_side(self) -> int:
        """Longer side in pixels of the thumbnails that the gallery keeps, or will; 0 for none."""
        if self.gallery is not None:
            return self.gallery.meta.thumbnail_side
        return _THUMBNAIL_SIDE if self.thumbnails else 0

    def made(self) -> AnyGallery:
        """Return the gallery, made where it is not there; another run may have made it meanwhile."""
        if self.gallery is None:
            wanted: dict[str, Any] = {"index": self.index, "recall": self.recall}
            try:
                self.gallery = self.directory.create(
                    self.name,
                    model_name=self.model.name,
                    fingerprint=self.model.fingerprint,
                    dimension=self.model.dimension,
                    thumbnail_side=self.thumbnail_side,
                    **{name: it for name, it in wanted.items() if it is not None},
                )
            except AlreadyExists:
                self.gallery = self._existing()
                if self.gallery is None:  # it is something else that is in the way
                    raise
        return self.gallery

    def _existing(self) -> AnyGallery | None:
        try:
            gallery = self.directory.get(self.name)
        except NotFound:
            return None
        gallery.check_model(self.model)
        if self.thumbnails and not gallery.meta.thumbnail_side:
            raise BadSetting(
                f"the gallery {self.name} was made without thumbnails; leave --thumbnails out, or index into"
                " a new gallery"
            )
        return gallery


def stored_of(gallery: AnyGallery, keys: Sequence[str]) -> dict[str, GalleryItem]:
    """Return the items of those keys that were made of files; others are found when their key is taken."""
    return {key: item for key, item in gallery.find(keys).items() if item.source}


def delete_items(gallery: AnyGallery, keys: Sequence[str], origins: Sequence[str]) -> int:
    """Delete items of those origins, unless somebody has just put in others; returns how many went."""
    while True:
        stored = stored_of(gallery, keys).items()
        versions = {key: it.version for key, it in stored if it.source and it.source.origin in origins}
        try:
            return gallery.delete(list(versions), expected=_demand(gallery, versions))
        except Conflict:  # look again at whose they are now
            continue


def _demand(gallery: AnyGallery, expected: Mapping[str, int]) -> Mapping[str, int] | None:
    """Return what a write is to expect; as Milvus knows no conditions, they are looked at here before it."""
    if isinstance(gallery, Gallery):
        return expected
    stored = gallery.find(list(expected))
    for key, version in expected.items():
        found = stored[key].version if key in stored else 0
        if found != version:
            raise Conflict(f"the item {key!r} was written meanwhile", key=key, expected=version, found=found)
    return None


class ItemWrite(NamedTuple):
    """An item to store in place of the one that has its `version`, 0 where its key must be free."""

    item: GalleryItem
    embedded: bool
    """Whether the vector is new; else that of an item whose texts have changed."""
    conflicts: tuple[str, ...] = ()
    """Fields that a client had changed and that the item has as the data set has them."""

    @classmethod
    def merged(cls, told: GalleryItem, stored: GalleryItem | None, *, embedded: bool) -> Self:
        """Make the write of an item as the data set tells it, in place of one that has a source, if any.

        InvalidArgument tells that the metadata of both are too large together.
        """
        if stored is None:
            return cls(told, embedded)
        item, conflicts = merge(told, stored)
        check_fields(item)
        return cls(replace(item, version=stored.version), embedded, conflicts)


class Storing:
    """Stores what it is given, in order; while one transaction runs, the next one grows.

    A commit waits for the disk. Whatever has come meanwhile goes into one transaction, so a slow disk makes
    transactions larger and not the encoder idle.
    """

    def __init__(self, target: Target, *, sync: bool) -> None:
        """Store into a gallery; with `sync` an item that others wrote meanwhile is replaced."""
        self.counts = Counter[str]()
        """By field of `Report`: what has become of the items, those on disk alone."""
        self.conflicts = list[str]()
        self._target, self._sync = target, sync
        self._writes: list[ItemWrite] = []
        self._sources: dict[str, Source] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._running: Future[None] | None = None

    def put(self, *writes: ItemWrite, sources: Mapping[str, Source] | None = None) -> None:
        """Take items to store, and sources to note; raises where those before could not be stored."""
        self._writes += writes
        self._sources |= sources or {}
        full = len(self._writes) + len(self._sources) >= _MOST
        if full or self._running is None or self._running.done():
            self._next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Store what waits, also where indexing was broken off: it has cost its time."""
        with self._pool, suppress(*((CrossbatchError,) if kind else ())):
            self._next()
            self._next()  # which waits for the one before

    def _next(self) -> None:
        if self._running is not None:
            self._running.result()
        if self._writes or self._sources:
            gallery = self._target.made()
            self._running = self._pool.submit(self._store, gallery, self._writes, self._sources)
            self._writes, self._sources = [], {}

    def _store(self, gallery: AnyGallery, writes: list[ItemWrite], sources: Mapping[str, Source]) -> None:
        if sources:
            gallery.touch(sources)
        while writes:
            try:
                expected = _demand(gallery, {it.key: it.version for it, *_ in writes})
                gallery.upsert([write.item for write in writes], expected=expected)
            except Conflict:
                writes = [again for write in writes if (again := self._again(gallery, write))]
            else:
                self.counts.update("stored" if write.embedded else "updated" for write in writes)
                self.conflicts += [f"{write.item.key}: {it}" for write in writes for it in write.conflicts]
                return

    def _again(self, gallery: AnyGallery, write: ItemWrite) -> ItemWrite | None:
        """Return what to write of an item after a conflict, if anything."""
        stored = gallery.find([write.item.key]).get(write.item.key)
        version = stored.version if stored else 0
        if version == write.item.version:
            return write
        if stored and stored.source == write.item.source:  # another run was faster
            self.counts["unchanged"] += 1
        elif self._sync and write.embedded and stored and stored.source:  # a client has updated it
            with suppress(InvalidArgument):  # which tells that it has become too large
                return ItemWrite.merged(write.item, stored, embedded=True)
            self.counts["changed"] += 1
        elif self._sync and write.embedded:
            return write._replace(item=replace(write.item, version=version))
        else:
            self.counts["changed"] += 1
        return None
