"""The gallery that is filled: opened or made, looked up, and written to beside the encoder.

One thread writes, one transaction at a time, and never over a newer item.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Self

from serving.errors import AlreadyExists, BadSetting, Conflict, CrossbatchError, InvalidArgument, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.index.choice import check_type
from serving.gallery.item import GalleryItem, Source, check_item
from serving.model.spec import ModelSpec

__all__ = ["ItemWrite", "Storing", "Target", "delete_items", "keys_of", "stored_of"]

_THUMBNAIL_SIDE = 256
_PAGE = 1024  # keys read at once
_MOST = 1024  # changes that wait while a slow disk takes those before
_LOOKS = 100  # at items that others replace each time before they are written


class Target:
    """One name in a folder of galleries, and the model whose embeddings go there."""

    def __init__(
        self,
        directory: GalleryDirectory,
        name: str,
        model: ModelSpec,
        *,
        thumbnails: bool = False,
        index: str | None = None,
        recall: float | None = None,
    ) -> None:
        """Open the gallery, if there is one; a new one gets `index`, `recall` and, if wanted, thumbnails.

        Raises:
            CrossbatchError: The gallery is of another model, keeps no thumbnails, or is damaged; or the index
                cannot be that of a gallery.
        """
        if index is not None:  # now, and not when all images have been embedded
            check_type(index, dimension=model.dimension)
        self._directory, self._name, self._model = directory, name, model
        self._thumbnails = thumbnails
        self._wanted = {"index": index, "recall": recall}
        self.gallery = self._existing()

    @property
    def thumbnail_side(self) -> int:
        """Longer side in pixels of the thumbnails that the gallery keeps, or will; 0 for none."""
        if self.gallery is not None:
            return self.gallery.meta.thumbnail_side
        return _THUMBNAIL_SIDE if self._thumbnails else 0

    def made(self) -> Gallery:
        """Return the gallery, made where it is not there; another run may have made it meanwhile."""
        if self.gallery is None:
            model, wanted = self._model, {name: it for name, it in self._wanted.items() if it is not None}
            try:
                self.gallery = self._directory.create(
                    self._name,
                    model_name=model.name,
                    fingerprint=model.fingerprint,
                    dimension=model.dimension,
                    thumbnail_side=self.thumbnail_side,
                    **wanted,  # type: ignore[arg-type]
                )
            except AlreadyExists:
                self.gallery = self._existing()
                if self.gallery is None:  # it is something else that is in the way
                    raise
        return self.gallery

    def _existing(self) -> Gallery | None:
        try:
            gallery = self._directory.get(self._name)
        except NotFound:
            return None
        gallery.check_model(self._model)
        if self._thumbnails and not gallery.meta.thumbnail_side:
            raise BadSetting(
                f"the gallery {self._name} was made without thumbnails and keeps none; leave --thumbnails "
                "out, or index into a new gallery"
            )
        return gallery


def stored_of(gallery: Gallery, keys: Sequence[str]) -> dict[str, GalleryItem]:
    """Return the items of those keys that were made of files.

    One that was put in by other means is found when its key turns out to be taken: to look for each key
    would cost more than to embed those few.
    """
    return {key: item for key, item in gallery.find(keys).items() if item.source}


def keys_of(gallery: Gallery, origin: str) -> Iterator[list[str]]:
    """Yield all keys of an origin, ascending, page by page."""
    after = ""
    while keys := gallery.keys_of(origin, after=after, limit=_PAGE):
        yield keys
        after = keys[-1]


def delete_items(gallery: Gallery, keys: Sequence[str], origins: Sequence[str]) -> int:
    """Delete items of those origins, unless somebody has just put in others; returns how many went."""
    while True:
        versions = {
            key: item.version
            for key, item in stored_of(gallery, keys).items()
            if item.source and item.source.origin in origins
        }
        try:
            return gallery.delete(list(versions), expected=versions)
        except Conflict:  # look again at whose they are now
            continue


class ItemWrite(NamedTuple):
    """An item to store in place of the one that has its `version`, 0 where its key must be free."""

    item: GalleryItem
    embedded: bool
    """Whether the vector is new; else that of an item whose texts have changed."""


class Storing:
    """Stores what it is given, in order; while one transaction runs, the next one grows.

    A commit waits for the disk. Whatever has come meanwhile goes into one transaction, so a slow disk makes
    transactions larger and not the encoder idle.
    """

    def __init__(self, target: Target, *, sync: bool) -> None:
        """Store into a gallery; with `sync` an item that others wrote meanwhile is replaced."""
        self.counts = Counter[str]()
        """By field of `Report`: what has become of the items, those on disk alone."""
        self.refused: dict[str, str] = {}
        """By key, why an item cannot be stored: its metadata are larger than may be, say."""
        self._target, self._sync = target, sync
        self._writes: list[ItemWrite] = []
        self._sources: dict[str, Source] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._running: Future[None] | None = None

    def put(self, writes: Iterable[ItemWrite] = (), sources: Mapping[str, Source] | None = None) -> None:
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
            self._settle()

    def _next(self) -> None:
        self._settle()
        if self._writes or self._sources:
            writes, sources = self._writes, self._sources
            self._writes, self._sources = [], {}
            self._running = self._pool.submit(self._store, self._target.made(), writes, sources)

    def _settle(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _store(self, gallery: Gallery, writes: list[ItemWrite], sources: Mapping[str, Source]) -> None:
        if sources:
            gallery.touch(sources)
        for _ in range(_LOOKS):
            items = [write.item if write.embedded else _pictured(gallery, write.item) for write in writes]
            try:
                gallery.upsert(items, expected={item.key: item.version for item in items})
            except Conflict:
                writes = [again for write in writes if (again := self._again(gallery, write))]
            except InvalidArgument:
                fitting = [write for write in writes if self._fits(gallery, write.item)]
                if len(fitting) == len(writes):
                    raise
                writes = fitting
            else:
                self.counts.update("stored" if write.embedded else "updated" for write in writes)
                return
        raise Conflict(f"the items of {gallery.name} are replaced by others all the time; index again later")

    def _again(self, gallery: Gallery, write: ItemWrite) -> ItemWrite | None:
        """Return what to write of an item after a conflict, if anything."""
        stored = gallery.find([write.item.key]).get(write.item.key)
        version = stored.version if stored else 0
        if version == write.item.version:
            return write
        if stored and stored.source == write.item.source:  # another run was faster
            self.counts["unchanged"] += 1
        elif self._sync and write.embedded:
            return ItemWrite(replace(write.item, version=version), embedded=True)
        else:
            self.counts["changed"] += 1
        return None

    def _fits(self, gallery: Gallery, item: GalleryItem) -> bool:
        try:
            check_item(item, dimension=gallery.meta.dimension)
        except InvalidArgument as error:
            self.refused[item.key] = str(error)
        return item.key not in self.refused


def _pictured(gallery: Gallery, item: GalleryItem) -> GalleryItem:
    """Return a stored item with its thumbnail, which one that is told anew keeps."""
    if not gallery.meta.thumbnail_side:
        return item
    stored = gallery.find([item.key], thumbnails=True).get(item.key)
    return replace(item, thumbnail=stored.thumbnail) if stored else item
