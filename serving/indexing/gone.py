"""Items whose image is gone from its data set, or is no image any more: counted, or deleted."""

from collections.abc import Collection, Iterator, Sequence

from serving.errors import Conflict
from serving.gallery.gallery import Gallery
from serving.indexing.lookup import stored_of
from serving.indexing.report import Report

__all__ = ["tidy"]

_PAGE = 1024  # keys read at once


def tidy(
    gallery: Gallery,
    there: Collection[str],
    origins: Sequence[str],
    report: Report,
    *,
    spoilt: Sequence[str],
    unreadable: Sequence[str],
    sync: bool,
) -> None:
    """Count in `report`, and delete with `sync`, the items that have no image any more.

    Args:
        gallery: The gallery.
        there: The keys of all images that the data set has.
        origins: Whose items are meant; those of others stay.
        report: Where it is counted.
        spoilt: Keys of files that hold no image any more.
        unreadable: Keys of files that could not be read, and may hold what they held: their items stay.
        sync: Whether items are deleted.
    """
    for origin in origins:
        for keys in _pages(gallery, origin):
            gone = [key for key in keys if key not in there]
            if sync:
                report.deleted += _delete(gallery, gone, origins)
            else:
                report.gone += len(gone)
    if sync:
        report.deleted += _delete(gallery, spoilt, origins)
    report.kept += sum(len(stored_of(gallery, [key])) for key in (*spoilt, *unreadable))


def _pages(gallery: Gallery, origin: str) -> Iterator[list[str]]:
    """Yield all keys of an origin, ascending, page by page."""
    after = ""
    while keys := gallery.keys_of(origin, after=after, limit=_PAGE):
        yield keys
        after = keys[-1]


def _delete(gallery: Gallery, keys: Sequence[str], origins: Collection[str]) -> int:
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
