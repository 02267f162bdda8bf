"""What becomes of one image: found out in a decoding thread, from bytes that are read once."""

import hashlib
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Catalog, Row
from serving.errors import InvalidArgument
from serving.gallery.info import ModelIdentity
from serving.gallery.item import MAX_THUMBNAIL_BYTES, Item, Source, check_item, check_key
from serving.gallery.validation import metadata_json
from serving.model.preprocess import thumbnail

__all__ = ["Bad", "Changed", "EncoderLike", "Examiner", "Fresh", "Outcome", "Retold", "Unchanged"]


class EncoderLike(Protocol):
    """What indexing needs of a `serving.model.encoder.Encoder`."""

    @property
    def spec(self) -> ModelIdentity:
        """The model's own account."""

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        """Decode one image to (S, S, 3)."""

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embed images (B, S, S, 3) as unit vectors (B, d)."""


@dataclass(frozen=True, slots=True)
class Bad:
    """There is no image; `sure` where the bytes say so, and not a disk that could not read them."""

    reason: str
    sure: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """The stored item is of another file than the one that is there now, and is to stay."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The stored item is as it should be; `source` is given where its file's time or origin is another."""

    source: Source | None


@dataclass(frozen=True, slots=True)
class Retold:
    """The image is the stored one, and its label, URI or metadata is another; the vector is as stored."""

    item: Item


@dataclass(frozen=True, slots=True)
class Fresh:
    """An image to embed: pixels uint8 (S, S, 3); the item of `version` is replaced, 0 where there is none."""

    pixels: NDArray[np.uint8]
    source: Source
    thumbnail: bytes
    version: int


Outcome = Bad | Changed | Unchanged | Retold | Fresh


@dataclass(frozen=True, slots=True)
class Examiner:
    """Looks at images; used by all decoding threads at once."""

    encoder: EncoderLike
    catalog: Catalog
    origin: str
    """Of the items that are stored now."""
    kin: frozenset[str]
    """Origins whose items are of the same files."""
    sync: bool
    """Whether an item of a file that has changed is replaced."""
    thumbnail_side: int

    def examine(self, row: Row, stored: Item | None) -> Outcome:
        """Find out what is to be done with a row, given the item that has its key."""
        try:
            check_key(row.key)
            return self._examined(row, stored)
        except OSError as error:
            return Bad(f"the file cannot be read: {error.strerror or error}", sure=False)
        except InvalidArgument as error:  # BadImage
            return Bad(str(error), sure=True)

    def _examined(self, row: Row, stored: Item | None) -> Outcome:
        size, mtime_ns = row.image.stamp()  # before reading: a later change shows the next time
        known = stored.source if stored else None
        if (
            stored
            and known
            and known.origin in self.kin
            and stored.uri == self.catalog.path_of(row)  # or else a table names another file by this key now
            and (known.size, known.mtime_ns) == (size, mtime_ns)
        ):
            return self._same(row, stored, replace(known, origin=self.origin))
        data = row.image.read_bytes()
        source = Source(self.origin, size, mtime_ns, hashlib.sha256(data).digest())
        if stored and known and known.digest == source.digest:
            return self._same(row, stored, source)
        pixels = self.encoder.preprocess(data)
        if stored and not self.sync:
            return Changed()
        picture = self._thumbnail(data) if self.thumbnail_side else b""
        return Fresh(pixels, source, picture, stored.version if stored else 0)

    def _thumbnail(self, data: bytes) -> bytes:
        return thumbnail(data, side=self.thumbnail_side, most_bytes=MAX_THUMBNAIL_BYTES)

    def _same(self, row: Row, stored: Item, source: Source) -> Outcome:
        told = replace(
            stored,
            label=row.label,
            uri=self.catalog.path_of(row),
            metadata=dict(row.metadata),
            source=source,
        )
        if _texts(told) != _texts(stored):
            return Retold(check_item(told, dimension=self.encoder.spec.dimension))
        return Unchanged(source if source != stored.source else None)


def _texts(item: Item) -> tuple[str, str, str]:
    # As JSON, since 1, 1.0 and true are equal and not the same; the order of columns says nothing.
    return item.label, item.uri, metadata_json(dict(sorted(item.metadata.items())))
