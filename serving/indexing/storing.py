"""Writing to a gallery beside the encoder: one thread, one transaction at a time, never over a newer item."""

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from serving.errors import Conflict, CrossbatchError, InvalidArgument, NotFound
from serving.gallery.gallery import Gallery
from serving.gallery.item import Item, Source, check_item
from serving.indexing.target import Target, item_of

__all__ = ["ItemWrite", "Storing"]

_MOST = 1024  # changes that wait while a slow disk takes those before
_LOOKS = 100  # at items that others replace each time before they are written


@dataclass(frozen=True, slots=True)
class ItemWrite:
    """An item to store in place of the one that has its `version`, 0 where its key must be free."""

    item: Item
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
        """Take items to store, and sources to note of items whose file's time or origin is another.

        Raises:
            CrossbatchError: What was taken before could not be stored.
        """
        self._writes += writes
        self._sources |= sources or {}
        full = len(self._writes) + len(self._sources) >= _MOST
        if full or self._running is None or self._running.done():
            self._next()

    def finish(self) -> None:
        """Store the rest, and wait until it is on disk.

        Raises:
            CrossbatchError: It could not be stored.
        """
        self._next()
        self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Store what waits, also where indexing was broken off: it has cost its time."""
        with self._pool, suppress(*((CrossbatchError,) if kind else ())):
            self.finish()

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
        stored = item_of(gallery, write.item.key)
        version = stored.version if stored else 0
        if version == write.item.version:
            return write
        if stored and stored.source == write.item.source:  # another run was faster
            self.counts["unchanged"] += 1
        elif self._sync and write.embedded:
            return replace(write, item=replace(write.item, version=version))
        else:
            self.counts["changed"] += 1
        return None

    def _fits(self, gallery: Gallery, item: Item) -> bool:
        try:
            check_item(item, dimension=gallery.meta.dimension)
        except InvalidArgument as error:
            self.refused[item.key] = str(error)
            return False
        return True


def _pictured(gallery: Gallery, item: Item) -> Item:
    """Return a stored item with its thumbnail, which one that is told anew keeps."""
    with suppress(NotFound):
        return replace(item, thumbnail=gallery.thumbnail(item.key)) if gallery.meta.thumbnail_side else item
    return item
