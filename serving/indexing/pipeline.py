"""Rows of a data set into a gallery: decoded in threads, encoded in batches, stored beside.

Images are decoded a bounded number ahead of the encoder, and stored in the order of their keys. A run that
is broken off anywhere leaves whole items; the next one finds by their sources what is done.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice

import numpy as np

from serving.catalog.catalog import Catalog, Row
from serving.cores import usable_cores
from serving.errors import InvalidArgument
from serving.gallery.gallery import Gallery
from serving.gallery.item import GalleryItem, Source, check_key
from serving.indexing.examine import BadRow, Examiner, NewImage, Outcome, origins_within
from serving.indexing.report import Report, Skipped
from serving.indexing.target import ItemWrite, Storing, Target, delete_items, keys_of, stored_of
from serving.model.encoder import Encoder
from serving.progress import progress

__all__ = ["index_rows"]

_LOOKED_UP = 256  # keys at once


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
    """Bring a gallery in step with rows of a catalogue, as far as that takes nothing away.

    Args:
        encoder: The model.
        catalog: The data set.
        rows: Those of its rows that are on the side `split`.
        target: The gallery, which is made when the first image is ready.
        split: The side of the data set; with the place of the data set it says whose the items are.
        sync: Whether items are replaced whose file has changed, and deleted whose file is gone; not where
            all rows are bad.
        batch: Images encoded at once.
        threads: Threads that decode; 0 takes one a core.
    """
    examiner = Examiner(encoder, catalog, split, sync=sync, thumbnail_side=target.thumbnail_side)
    bad = {row.key: BadRow(reason, sure=True) for row in rows if (reason := _key_fault(row.key))}
    fit = [row for row in rows if row.key not in bad]
    outcomes = _examined(examiner, _looked_up(fit, target.gallery), ahead=2 * batch, threads=threads)
    counts = Counter[str]()

    def ready() -> Iterator[tuple[Row, NewImage]]:
        """Yield images to embed; what becomes of the other rows is settled on the way."""
        for row, outcome in outcomes:
            match outcome:
                case NewImage():
                    yield row, outcome
                case BadRow():
                    bad[row.key] = outcome
                case GalleryItem():
                    storing.put([ItemWrite(outcome, embedded=False)])
                case Source():
                    counts["unchanged"] += 1
                    storing.put(sources={row.key: outcome})
                case _:
                    counts[outcome] += 1
            bar.update(1)

    with (
        Storing(target, sync=sync) as storing,
        progress(tuple[None, ...](), "index", total=len(rows), unit="image") as bar,
        closing(outcomes),
    ):
        bar.update(len(bad))
        images = ready()
        while some := list(islice(images, batch)):
            storing.put(_encoded(encoder, catalog, some))
    bad |= {key: BadRow(reason, sure=True) for key, reason in storing.refused.items()}
    counts += storing.counts
    if target.gallery is not None:
        sides = origins_within(catalog, split)
        counts += _tidy(target.gallery, rows, bad, sides, sync=sync and len(bad) < len(rows))
    skipped = [Skipped(row.key, catalog.path_of(row), bad[row.key].reason) for row in rows if row.key in bad]
    return Report(skipped, **counts)


def _looked_up(rows: Sequence[Row], gallery: Gallery | None) -> Iterator[tuple[Row, GalleryItem | None]]:
    """Yield each row with the item that is stored of a file under its key."""
    for start in range(0, len(rows), _LOOKED_UP):
        some = rows[start : start + _LOOKED_UP]
        stored = stored_of(gallery, [row.key for row in some]) if gallery else {}
        for row in some:
            yield row, stored.get(row.key)


def _examined(
    examiner: Examiner, rows: Iterable[tuple[Row, GalleryItem | None]], *, ahead: int, threads: int
) -> Generator[tuple[Row, Outcome]]:
    """Yield each row, in order, with what becomes of it."""
    pool = ThreadPoolExecutor(threads or usable_cores(), thread_name_prefix="decode")
    try:
        waiting: deque[tuple[Row, Future[Outcome]]] = deque()
        for row, stored in rows:
            waiting.append((row, pool.submit(examiner.examine, row, stored)))
            if len(waiting) > ahead:
                first, outcome = waiting.popleft()
                yield first, outcome.result()
        for first, outcome in waiting:
            yield first, outcome.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encoded(encoder: Encoder, catalog: Catalog, ready: Sequence[tuple[Row, NewImage]]) -> list[ItemWrite]:
    """Embed images, as one batch."""
    vectors = encoder.encode(np.stack([image.pixels for _, image in ready]))  # (B, d)
    writes = []
    for (row, image), vector in zip(ready, vectors, strict=True):
        uri, more = catalog.path_of(row), (image.source, image.thumbnail, image.version)
        writes.append(
            ItemWrite(GalleryItem(row.key, vector, row.label, uri, row.metadata, *more), embedded=True)
        )
    return writes


def _tidy(
    gallery: Gallery, rows: Sequence[Row], bad: Mapping[str, BadRow], origins: Sequence[str], *, sync: bool
) -> Counter[str]:
    """Count, and delete with `sync`, the items of these origins that have no image any more."""
    there, counts = {row.key for row in rows}, Counter[str]()
    for origin in origins:
        for keys in keys_of(gallery, origin):
            gone = [key for key in keys if key not in there]
            if sync:
                counts["deleted"] += delete_items(gallery, gone, origins)
            else:
                counts["gone"] += len(gone)
    possible = [key for key in bad if not _key_fault(key)]
    if sync:  # files that could not be read may hold what they held: their items stay
        counts["deleted"] += delete_items(gallery, [key for key in possible if bad[key].sure], origins)
    counts["kept"] = len(stored_of(gallery, possible))
    return counts


def _key_fault(key: str) -> str:
    try:
        check_key(key)
    except InvalidArgument as error:
        return str(error)
    return ""
