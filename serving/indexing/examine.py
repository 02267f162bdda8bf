"""What becomes of one image: found out in a decoding thread, from bytes that are read once.

An item's origin says which data set it is of, so that bringing a gallery in step with one never deletes
items of another: a short hash of where the data set lies, how it is laid out and which side of its split was
taken, so that a gallery's readers learn nothing of the machine that filled it. A side lies within another
(`test` within `all`): when the wider one is indexed, its items move to the wider one's origin, and those of
a side within that are gone from the data set are gone from the wider one, too.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Catalog, Row, Split
from serving.errors import InvalidArgument, cause_of
from serving.gallery.item import MAX_THUMBNAIL_BYTES, GalleryItem, Source
from serving.model.encoder import Encoder
from serving.model.preprocess import thumbnail

__all__ = ["BadRow", "Examiner", "NewImage", "Outcome", "origins_within"]

_WITHIN: Final[dict[str, tuple[str, ...]]] = {"all": get_args(Split), "test": ("test", "query", "gallery")}


@dataclass(frozen=True, slots=True)
class BadRow:
    """There is no image; `sure` where the bytes say so, and not a disk that could not read them."""

    reason: str
    sure: bool


@dataclass(frozen=True, slots=True)
class NewImage:
    """An image to embed: pixels uint8 (S, S, 3); the item of `version` is replaced, 0 where there is none."""

    pixels: NDArray[np.uint8]
    source: Source
    thumbnail: bytes
    version: int


Outcome = BadRow | NewImage | GalleryItem | Source | Literal["unchanged", "changed"]
"""An item is the stored one with another label, URI or metadata, to be stored so; a Source is what is to be
noted of an item that is as it should be, as its file's time or its origin is another; `changed` is an item
of another file than the one that is there now, which is to stay."""


class Examiner:
    """Looks at images of one side of a data set; used by all decoding threads at once."""

    def __init__(
        self, encoder: Encoder, catalog: Catalog, split: str, *, sync: bool, thumbnail_side: int
    ) -> None:
        self._encoder, self._catalog, self._sync = encoder, catalog, sync
        self._thumbnail_side = thumbnail_side
        self._origin = _origin_of(catalog, split)
        self._kin = frozenset(origins_within(catalog, "all"))  # an image is the same file on each side

    def examine(self, row: Row, stored: GalleryItem | None) -> Outcome:
        """Find out what is to be done with a row, given the item that has its key."""
        try:
            return self._examined(row, stored)
        except OSError as error:
            return BadRow(f"the file cannot be read: {cause_of(error)}", sure=False)
        except InvalidArgument as error:  # BadImage
            return BadRow(str(error), sure=True)

    def _examined(self, row: Row, stored: GalleryItem | None) -> Outcome:
        size, mtime_ns = row.image.stamp()  # before reading: a later change shows the next time
        known = stored.source if stored else None
        if (
            stored
            and known
            and known.origin in self._kin
            and stored.uri == self._catalog.path_of(row)  # or else a table names another file by this key now
            and (known.size, known.mtime_ns) == (size, mtime_ns)
        ):
            return self._same(row, stored, replace(known, origin=self._origin))
        data = row.image.read_bytes()
        source = Source(self._origin, size, mtime_ns, hashlib.sha256(data).digest())
        if stored and known and known.digest == source.digest:
            return self._same(row, stored, source)
        pixels = self._encoder.preprocess(data)
        if stored and not self._sync:
            return "changed"
        side = self._thumbnail_side
        picture = thumbnail(data, side=side, most_bytes=MAX_THUMBNAIL_BYTES) if side else b""
        return NewImage(pixels, source, picture, stored.version if stored else 0)

    def _same(self, row: Row, stored: GalleryItem, source: Source) -> Outcome:
        uri, metadata = self._catalog.path_of(row), dict(row.metadata)
        told = replace(stored, label=row.label, uri=uri, metadata=metadata, source=source)
        if _texts(told) != _texts(stored):
            return told
        return source if source != stored.source else "unchanged"


def origins_within(catalog: Catalog, split: str) -> list[str]:
    """Return the origins of the sides of a data set that lie within `split`, itself included."""
    return [_origin_of(catalog, side) for side in _WITHIN.get(split, (split,))]


def _origin_of(catalog: Catalog, split: str) -> str:
    place = os.fsencode(catalog.table or catalog.root)
    return hashlib.sha256(b"\0".join((place, catalog.format.encode(), split.encode()))).hexdigest()[:16]


def _texts(item: GalleryItem) -> tuple[str, str, str]:
    # As JSON, since 1, 1.0 and true are equal and not the same; the order of columns says nothing.
    return item.label, item.uri, json.dumps(dict(item.metadata), sort_keys=True)
