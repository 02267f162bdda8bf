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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Catalog, Row, Split
from serving.catalog.picture import Picture
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

__all__ = [
    "Examiner", "Found", "Outcomes", "Report", "Skipped", "Stored", "embed_rows", "examined", "index_rows",
    "read_image",
]  # fmt: skip

T = TypeVar("T")
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


@dataclass(frozen=True, slots=True)
class Found:
    """A file that was read; with pixels (S, S, 3), and a thumbnail if wanted, where it is to be embedded."""

    size: int
    mtime_ns: int
    digest: bytes
    pixels: NDArray[np.uint8] | None = None
    picture: bytes = b""


Stored = tuple[Row, GalleryItem | None]
"""A row with the item that is stored of a file under its key."""
Outcome = ItemWrite | Source | Literal["unchanged", "changed"]
"""A write is of a new item, or of the stored one with other texts; a Source is to be noted of one that is as
it should be; `changed` is an item of another file than the one that is there now, which is to stay."""
Outcomes = Generator[tuple[Row, Outcome | OSError | BadImage | InvalidArgument]]
"""Rows with what becomes of them, or with what is wrong with them."""


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
    engine: Callable[..., Outcomes] | None = None,
) -> Report:
    """Bring a gallery in step with rows of a catalogue, those on the side `split`.

    Only with `sync` are items replaced whose file has changed, and deleted whose file is gone. The gallery is
    made when the first image is ready. Threads decode; 0 takes one a core. Another engine than these takes
    their place and the encoder's.
    """
    examiner = Examiner(encoder, catalog, split, sync=sync, thumbnail_side=target.thumbnail_side)
    without_key = {row.key: fault for row in rows if (fault := _key_fault(row.key))}
    fit = [row for row in rows if row.key not in without_key]
    counts = Counter[str]()
    bad, unread = dict[str, str](), dict[str, str]()  # why, by key; an item of the latter stays in any case
    looked_up, run = _looked_up(fit, target.gallery), engine or _outcomes
    found = run(examiner, looked_up, total=len(fit), batch=batch, threads=threads)
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
    examiner = Examiner(encoder, catalog, "all", sync=False, thumbnail_side=0)
    new, total = ((row, None) for row in catalog.rows), len(catalog.rows)
    with closing(_outcomes(examiner, new, total=total, batch=batch, threads=threads)) as found:
        for row, outcome in found:
            if isinstance(outcome, ItemWrite):
                yield outcome.item
            elif isinstance(outcome, Exception):
                yield Skipped(row.key, catalog.path_of(row), _reason(outcome))


def _reason(error: Exception) -> str:
    return f"the file cannot be read: {cause_of(error)}" if isinstance(error, OSError) else str(error)


def _looked_up(rows: Sequence[Row], gallery: AnyGallery | None) -> Iterator[Stored]:
    for start in range(0, len(rows), _LOOKED_UP):
        some = rows[start : start + _LOOKED_UP]
        stored = stored_of(gallery, [row.key for row in some]) if gallery else {}
        for row in some:
            yield row, stored.get(row.key)


def _outcomes(
    examiner: "Examiner", rows: Iterable[Stored], *, total: int, batch: int, threads: int
) -> Outcomes:
    """Yield each row with what becomes of it, the new images of a batch when that is encoded."""
    images = list[tuple[Row, _NewImage]]()
    looks = examined(examiner.examine, rows, ahead=2 * batch, threads=threads)
    with progress(looks, "embed", total=total, unit="image") as bar, closing(looks):
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


def examined(
    look: Callable[[Row, GalleryItem | None], T], rows: Iterable[Stored], *, ahead: int, threads: int
) -> Generator[tuple[Row, Future[T]]]:
    """Yield each row, in order, with what `look` finds, which threads do a bounded number ahead."""
    pool = ThreadPoolExecutor(threads or usable_cores(), thread_name_prefix="decode")
    try:
        waiting: deque[tuple[Row, Future[T]]] = deque()
        for row, stored in rows:
            waiting.append((row, pool.submit(look, row, stored)))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(cancel_futures=True)


def read_image(
    image: Picture,
    stamp: tuple[int, int],
    preprocess: Callable[[bytes], NDArray[np.uint8]],
    *,
    known: bytes,
    side: int | None,
) -> Found:
    """Read a file, of that stamp before, and decode it, unless its digest is the `known` one.

    Its pixels are kept, and a thumbnail of that side if it is not 0, unless `side` is None: then it is only
    seen whether it holds an image. Raises OSError and BadImage.
    """
    data = image.read_bytes()
    found = Found(*stamp, hashlib.sha256(data).digest())
    if found.digest == known:
        return found
    pixels = preprocess(data)
    if side is None:
        return found
    picture = thumbnail(data, side=side, most_bytes=MAX_THUMBNAIL_BYTES) if side else b""
    return replace(found, pixels=pixels, picture=picture)


class Examiner:
    """Looks at images of one side of a data set; used by all decoding threads at once."""

    def __init__(
        self, encoder: Encoder, catalog: Catalog, split: str, *, sync: bool, thumbnail_side: int
    ) -> None:
        self._encoder, self._catalog, self._sync = encoder, catalog, sync
        self._thumbnail_side = thumbnail_side
        self._origin = _origin_of(catalog, split)
        self._kin = frozenset(_origins_within(catalog, "all"))  # an image is the same file on each side

    def examine(self, row: Row, stored: GalleryItem | None) -> Outcome | _NewImage:
        """Find out what is to be done with a row, given the item that has its key."""
        stamp = row.image.stamp()  # before reading: a later change shows the next time
        if (outcome := self.by_stamp(row, stored, stamp)) is not None:
            return outcome
        known, side = self.reading(stored)
        found = read_image(row.image, stamp, self._encoder.preprocess, known=known, side=side)
        outcome = self.by_content(row, stored, found, None if found.pixels is None else _NO_VECTOR)
        if found.pixels is None or not isinstance(outcome, ItemWrite):
            return outcome
        return _NewImage(found.pixels, outcome)

    def by_stamp(self, row: Row, stored: GalleryItem | None, stamp: tuple[int, int]) -> Outcome | None:
        """Tell what is to be done as far as a file's size and time of change show it; None: read the file."""
        known = stored.source if stored else None
        uri = self._catalog.path_of(row)
        if (
            stored
            and known
            and known.origin in self._kin
            and (known.uri_given() or stored.uri) == uri  # or else a table names another file by this key now
            and (known.size, known.mtime_ns) == stamp
        ):
            return _same(row, uri, stored, replace(known, origin=self._origin, given=""))
        return None

    def reading(self, stored: GalleryItem | None) -> tuple[bytes, int | None]:
        """Return how `read_image` is to take a file: `known` and `side`."""
        known = stored.source.digest if stored and stored.source else b""
        return known, None if stored and not self._sync else self._thumbnail_side

    def by_content(
        self, row: Row, stored: GalleryItem | None, found: Found, vector: NDArray[np.float32] | None
    ) -> Outcome:
        """Tell what is to be done with a file that was read; the vector is None where none was wanted."""
        source = Source(self._origin, found.size, found.mtime_ns, found.digest)
        uri = self._catalog.path_of(row)
        if stored and stored.source and stored.source.digest == found.digest:
            return _same(row, uri, stored, source)
        if vector is None:
            return "changed"
        item = GalleryItem(row.key, vector, row.label, uri, row.metadata, source, found.picture)
        check_fields(item)
        return ItemWrite.merged(item, stored, embedded=True)

    def embedded(self, images: Sequence[tuple[Row, _NewImage]]) -> Iterator[tuple[Row, ItemWrite]]:
        """Yield the writes of new images with their vectors."""
        vectors = self._encoder.encode(np.stack([image.pixels for _, image in images]))  # (B, d)
        for (row, image), vector in zip(images, vectors, strict=True):
            yield row, image.write._replace(item=replace(image.write.item, vector=vector))


def _same(row: Row, uri: str, stored: GalleryItem, source: Source) -> Outcome:
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
