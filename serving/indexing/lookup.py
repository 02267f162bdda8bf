"""Looking up the items that rows of a data set have in a gallery."""

from collections.abc import Iterator, Sequence

from serving.catalog.catalog import Row
from serving.errors import InvalidArgument, NotFound
from serving.gallery.gallery import Gallery
from serving.gallery.item import Item, check_key

__all__ = ["item_of", "looked_up", "stored_of"]

_AT_ONCE = 256


def looked_up(rows: Sequence[Row], gallery: Gallery | None) -> Iterator[tuple[Row, Item | None]]:
    """Yield each row with the item that is stored of a file under its key."""
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        stored = stored_of(gallery, [row.key for row in some]) if gallery else {}
        for row in some:
            yield row, stored.get(row.key)


def stored_of(gallery: Gallery, keys: Sequence[str]) -> dict[str, Item]:
    """Return the items of those keys that were made of files.

    One that was put in by other means is found when its key turns out to be taken (`Storing`): to look for
    each key would cost more than to embed those few.
    """
    possible = [key for key in keys if _is_key(key)]
    while True:
        known = list(gallery.sources(possible))
        try:
            return {item.key: item for item in gallery.get(known)}
        except NotFound:  # deleted since
            continue


def item_of(gallery: Gallery, key: str) -> Item | None:
    """Return the item of a key, whatever it was made of; None where there is none."""
    try:
        return gallery.get([key])[0]
    except NotFound:
        return None


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except InvalidArgument:  # the row's own outcome says why
        return False
    return True
