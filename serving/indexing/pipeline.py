"""Rows of a data set into a gallery: decoded in threads, encoded in batches, stored beside.

Images are decoded a bounded number ahead of the encoder, and stored in the order of their keys. A run that
is broken off anywhere leaves whole items; the next one finds by their sources what is done.
"""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import numpy as np

from serving.catalog.catalog import Catalog, Row
from serving.cores import usable_cores
from serving.errors import InvalidArgument
from serving.gallery.item import Item, check_item
from serving.indexing.gone import tidy
from serving.indexing.lookup import looked_up
from serving.indexing.origin import covered, kin, origin_of
from serving.indexing.outcome import (
    Bad,
    Changed,
    EncoderLike,
    Examiner,
    Fresh,
    Outcome,
    Retold,
    Unchanged,
)
from serving.indexing.report import Report, Skipped
from serving.indexing.storing import Storing, Write
from serving.indexing.target import Target
from serving.progress import progress

__all__ = ["index_rows"]


def index_rows(
    encoder: EncoderLike,
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

    Returns:
        What was done; all of it is on disk.

    Raises:
        CrossbatchError: The gallery is damaged, or cannot be written.
    """
    report, bad = Report(), list[tuple[Row, Bad]]()
    examiner = Examiner(
        encoder, catalog, origin_of(catalog, split), kin(catalog), sync, target.thumbnail_side
    )
    outcomes = _examined(examiner, looked_up(rows, target.gallery), ahead=2 * batch, threads=threads)
    steps: Iterable[None] = ()
    with (
        Storing(target.made, sync=sync) as storing,
        progress(steps, "index", total=len(rows), unit="image") as bar,
        closing(outcomes),
    ):
        ready = list[tuple[Row, Fresh]]()
        for row, outcome in outcomes:
            match outcome:
                case Fresh():
                    ready.append((row, outcome))
                    if len(ready) == batch:
                        storing.put(_encoded(examiner, ready, bad))
                        ready = []
                case Retold(item):
                    storing.put([Write(item, embedded=False)])
                case Unchanged(source):
                    report.unchanged += 1
                    if source:
                        storing.put(sources={row.key: source})
                case Changed():
                    report.changed += 1
                case Bad():
                    bad.append((row, outcome))
            bar.update(1)
        if ready:
            storing.put(_encoded(examiner, ready, bad))
        storing.finish()
    for name, count in storing.counts.items():
        setattr(report, name, getattr(report, name) + count)
    bad.sort(key=lambda pair: pair[0].key)
    report.skipped = [Skipped(row.key, catalog.path_of(row), each.reason) for row, each in bad]
    if target.gallery is not None:
        unreadable = [row.key for row, each in bad if not each.sure]
        spoilt = [row.key for row, each in bad if each.sure]
        tidy(
            target.gallery,
            {row.key for row in rows},
            covered(catalog, split),
            report,
            spoilt=spoilt,
            unreadable=unreadable,
            sync=sync and len(bad) < len(rows),
        )
    return report


def _examined(
    examiner: Examiner, rows: Iterable[tuple[Row, Item | None]], *, ahead: int, threads: int
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


def _encoded(
    examiner: Examiner, ready: Sequence[tuple[Row, Fresh]], bad: list[tuple[Row, Bad]]
) -> list[Write]:
    """Embed images; those whose row cannot be stored go to `bad`."""
    encoder = examiner.encoder
    vectors = encoder.encode(np.stack([image.pixels for _, image in ready]))  # (B, d)
    writes = []
    for (row, image), vector in zip(ready, vectors, strict=True):
        item = Item(
            row.key,
            vector,
            row.label,
            examiner.catalog.path_of(row),
            row.metadata,
            source=image.source,
            thumbnail=image.thumbnail,
            version=image.version,
        )
        try:
            writes.append(Write(check_item(item, dimension=encoder.spec.dimension), embedded=True))
        except InvalidArgument as error:  # metadata larger than may be, say
            bad.append((row, Bad(str(error), sure=True)))
    return writes
