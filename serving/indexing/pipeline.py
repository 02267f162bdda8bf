"""Rows of a data set into a gallery: decoded in threads, encoded in batches, stored beside.

Images are decoded a bounded number ahead of the encoder, and stored in the order of their keys. A run that
is broken off anywhere leaves whole items; the next one finds by their sources what is done.

An item's origin says which data set it is of, so that bringing a gallery in step with one never deletes
items of another: a short hash of where the data set lies, how it is laid out and which side of its split was
taken. A side lies within another (`test` within `all`): when the wider one is indexed, its items move there.
"""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Catalog, Row, Split
from serving.cores import usable_cores
from serving.errors import BadImage, InvalidArgument, cause_of
from serving.gallery.item import (
    MAX_THUMBNAIL_BYTES,
    GalleryItem,
    Source,
    check_fields,
    check_key,
    given_by_source,
)
from serving.gallery.merge import same_given
from serving.gallery.place import AnyGallery
from serving.indexing.target import ItemWrite, Storing, Target, delete_items, stored_of
from serving.model.encoder import Encoder
from serving.model.preprocess import thumbnail
from serving.progress import progress

__all__ = ["Report", "Skipped", "embed_rows", "index_rows"]

_LOOKED_UP: Final = 256  # keys at once
_NO_VECTOR: Final = np.ones(1, np.float32)  # until the image is embedded
_WITHIN: Final[dict[str, tuple[str, ...]]] = {"all": get_args(Split), "test": ("test", "query", "gallery")}


@dataclass(frozen=True, slots=True)
class Skipped:
    """An image that was not stored, and why; `path` starts from the data set's root."""

    key: str
    path: str
    reason: str


@dataclass(slots=True)
class Report:
    """What indexing did; each row of the data set counts once, as one of the first five."""

    skipped: list[Skipped]
    stored: int = 0  # images that were embedded, each on disk
    updated: int = 0  # items of unchanged images whose label, URI or metadata was another
    unchanged: int = 0
    changed: int = 0  # items that are no longer of their file as it is now, and were left as they are
    kept: int = 0  # skipped images of which an item of an earlier run stays
    gone: int = 0  # items whose image is no longer in the data set, and which were left as they are
    deleted: int = 0
    conflicts: list[str] = field(default_factory=list)
    """Fields, each after its item's key, that a client had changed and the data set then changed, too."""


@dataclass(frozen=True, slots=True)
class _NewImage:
    """An image to embed: pixels uint8 (S, S, 3), and the write whose item is to get its vector."""

    pixels: NDArray[np.uint8]
    write: ItemWrite


_Outcome = ItemWrite | Source | Literal["unchanged", "changed"]
"""A write is of a new item, or of the stored one with other texts; a Source is to be noted of one that is as
it should be; `changed` is an item of another file than the one that is there now, which is to stay."""


def index_rows(
    encoder: Encoder,
    catalog: Catalog,
    rows: Sequence[Row],
    target: Target,
    *,
    split: str = "all",
    sync: bool = False,
    batch: int = 32,
    threads: int = 0,
) -> Report:
    """Bring a gallery in step with rows of a catalogue, those on the side `split`.

    Only with `sync` are items replaced whose file has changed, and deleted whose file is gone. The gallery is
    made when the first image is ready. Threads decode; 0 takes one a core.
    """
    examiner = _Examiner(encoder, catalog, split, sync=sync, thumbnail_side=target.thumbnail_side)
    without_key = {row.key: fault for row in rows if (fault := _key_fault(row.key))}
    fit = [row for row in rows if row.key not in without_key]
    counts = Counter[str]()
    bad, unread = dict[str, str](), dict[str, str]()  # why, by key; an item of the latter stays in any case
    found = _outcomes(examiner, _looked_up(fit, target.gallery), total=len(fit), batch=batch, threads=threads)
    with Storing(target, sync=sync) as storing, closing(found):
        for row, outcome in found:
            match outcome:
                case BadImage():
                    bad[row.key] = _reason(outcome)
                case Exception():
                    unread[row.key] = _reason(outcome)
                case ItemWrite():
                    storing.put(outcome)
                case Source():
                    counts["unchanged"] += 1
                    storing.put(sources={row.key: outcome})
                case _:
                    counts[outcome] += 1
    counts += storing.counts
    reasons = without_key | bad | unread
    if target.gallery is not None:
        sync = sync and len(reasons) < len(rows)
        # Files that could not be read may hold what they held.
        there = {row.key for row in rows if row.key not in bad or not sync}
        counts += _tidy(target.gallery, there, _origins_within(catalog, split), sync=sync)
        counts["kept"] = len(stored_of(target.gallery, [*bad, *unread]))
    skipped = [Skipped(row.key, catalog.path_of(row), reasons[row.key]) for row in rows if row.key in reasons]
    return Report(skipped, conflicts=storing.conflicts, **counts)


def embed_rows(
    encoder: Encoder, catalog: Catalog, *, batch: int = 32, threads: int = 0
) -> Iterator[GalleryItem | Skipped]:
    """Yield a new item for each row of a catalogue, or why there is none."""
    examiner = _Examiner(encoder, catalog, "all", sync=False, thumbnail_side=0)
    new, total = ((row, None) for row in catalog.rows), len(catalog.rows)
    with closing(_outcomes(examiner, new, total=total, batch=batch, threads=threads)) as found:
        for row, outcome in found:
            if isinstance(outcome, ItemWrite):
                yield outcome.item
            elif isinstance(outcome, Exception):
                yield Skipped(row.key, catalog.path_of(row), _reason(outcome))


def _reason(error: Exception) -> str:
    return f"the file cannot be read: {cause_of(error)}" if isinstance(error, OSError) else str(error)


def _looked_up(rows: Sequence[Row], gallery: AnyGallery | None) -> Iterator[tuple[Row, GalleryItem | None]]:
    """Yield each row with the item that is stored of a file under its key."""
    for start in range(0, len(rows), _LOOKED_UP):
        some = rows[start : start + _LOOKED_UP]
        stored = stored_of(gallery, [row.key for row in some]) if gallery else {}
        for row in some:
            yield row, stored.get(row.key)


def _outcomes(
    examiner: "_Examiner",
    rows: Iterable[tuple[Row, GalleryItem | None]],
    *,
    total: int,
    batch: int,
    threads: int,
) -> Generator[tuple[Row, _Outcome | OSError | BadImage | InvalidArgument]]:
    """Yield each row with what becomes of it, the new images of a batch when that is encoded."""
    images = list[tuple[Row, _NewImage]]()
    examined = _examined(examiner, rows, ahead=2 * batch, threads=threads)
    with progress(examined, "embed", total=total, unit="image") as bar, closing(examined):
        for row, future in bar:
            try:
                outcome = future.result()
            except (OSError, BadImage, InvalidArgument) as error:  # the last of metadata too large, say
                yield row, error
                continue
            if isinstance(outcome, _NewImage):
                images.append((row, outcome))
            else:
                yield row, outcome
            if len(images) == batch:
                yield from examiner.embedded(images)
                images = []
        if images:
            yield from examiner.embedded(images)


def _examined(
    examiner: "_Examiner", rows: Iterable[tuple[Row, GalleryItem | None]], *, ahead: int, threads: int
) -> Generator[tuple[Row, Future[_Outcome | _NewImage]]]:
    """Yield each row, in order, with what becomes of it."""
    pool = ThreadPoolExecutor(threads or usable_cores(), thread_name_prefix="decode")
    try:
        waiting: deque[tuple[Row, Future[_Outcome | _NewImage]]] = deque()
        for row, stored in rows:
            waiting.append((row, pool.submit(examiner.examine, row, stored)))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(cancel_futures=True)


class _Examiner:
    """Looks at images of one side of a data set; used by all decoding threads at once."""

    def __init__(
        self, encoder: Encoder, catalog: Catalog, split: str, *, sync: bool, thumbnail_side: int
    ) -> None:
        self._encoder, self._catalog, self._sync = encoder, catalog, sync
        self._thumbnail_side = thumbnail_side
        self._origin = _origin_of(catalog, split)
        self._kin = frozenset(_origins_within(catalog, "all"))  # an image is the same file on each side

    def examine(self, row: Row, stored: GalleryItem | None) -> _Outcome | _NewImage:
        """Find out what is to be done with a row, given the item that has its key."""
        size, mtime_ns = row.image.stamp()  # before reading: a later change shows the next time
        known = stored.source if stored else None
        uri = self._catalog.path_of(row)
        if (
            stored
            and known
            and known.origin in self._kin
            and (known.uri_given() or stored.uri) == uri  # or else a table names another file by this key now
            and (known.size, known.mtime_ns) == (size, mtime_ns)
        ):
            return _same(row, uri, stored, replace(known, origin=self._origin, given=""))
        data = row.image.read_bytes()
        source = Source(self._origin, size, mtime_ns, hashlib.sha256(data).digest())
        if stored and known and known.digest == source.digest:
            return _same(row, uri, stored, source)
        pixels = self._encoder.preprocess(data)
        if stored and not self._sync:
            return "changed"
        side = self._thumbnail_side
        picture = thumbnail(data, side=side, most_bytes=MAX_THUMBNAIL_BYTES) if side else b""
        item = GalleryItem(row.key, _NO_VECTOR, row.label, uri, row.metadata, source, picture)
        check_fields(item)
        return _NewImage(pixels, ItemWrite.merged(item, stored, embedded=True))

    def embedded(self, images: Sequence[tuple[Row, _NewImage]]) -> Iterator[tuple[Row, ItemWrite]]:
        """Yield the writes of new images with their vectors."""
        vectors = self._encoder.encode(np.stack([image.pixels for _, image in images]))  # (B, d)
        for (row, image), vector in zip(images, vectors, strict=True):
            yield row, image.write._replace(item=replace(image.write.item, vector=vector))


def _same(row: Row, uri: str, stored: GalleryItem, source: Source) -> _Outcome:
    told = replace(stored, label=row.label, uri=uri, metadata=row.metadata, source=source)
    check_fields(told)
    if not same_given(given_by_source(told), given_by_source(stored)):
        return ItemWrite.merged(told, stored, embedded=False)
    moved = stored.source is None or stored.source != replace(source, given=stored.source.given)
    return source if moved else "unchanged"


def _tidy(gallery: AnyGallery, there: set[str], origins: Sequence[str], *, sync: bool) -> Counter[str]:
    """Count, and delete with `sync`, the items of these origins that have no image any more."""
    counts = Counter[str]()
    for origin in origins:
        after = ""
        while keys := gallery.keys_of(origin, after=after):
            after, gone = keys[-1], [key for key in keys if key not in there]
            if sync:
                counts["deleted"] += delete_items(gallery, gone, origins)
            else:
                counts["gone"] += len(gone)
    return counts


def _key_fault(key: str) -> str:
    try:
        check_key(key)
    except InvalidArgument as error:
        return str(error)
    return ""


def _origins_within(catalog: Catalog, split: str) -> list[str]:
    """Return the origins of the sides of a data set that lie within `split`, itself included."""
    return [_origin_of(catalog, side) for side in _WITHIN.get(split, (split,))]


def _origin_of(catalog: Catalog, split: str) -> str:
    place = os.fsencode(catalog.table or catalog.root)
    return hashlib.sha256(b"\0".join((place, catalog.format.encode(), split.encode()))).hexdigest()[:16]
