"""How an item stands in the table of items, and how it is read back."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.gallery.item import Item, Source
from serving.gallery.metadata import metadata_text
from serving.gallery.store.damage import altered, damaged, sound

__all__ = [
    "COLUMNS",
    "check_texts",
    "checksum_of",
    "item_of",
    "metadata_of",
    "record_of",
    "source_columns",
    "source_of",
    "vectors_of",
]

COLUMNS = "seq, key, label, uri, metadata, checksum, origin, size, mtime, digest, vector"


def record_of(item: Item, seq: int) -> tuple[object, ...]:
    """Return what stands in `COLUMNS` of a checked item."""
    texts, vector = (item.key, item.label, item.uri, metadata_text(item.metadata)), _blob(item)
    return seq, *texts, checksum_of(*texts, vector), *source_columns(item.source), vector


def item_of(record: Sequence[Any], path: Path, dimension: int) -> Item:
    """Return the item of what was read from `COLUMNS` of a gallery file.

    Raises:
        BadArtifact: It is not as it was written.
    """
    seq, key, label, uri, metadata, checksum, *source, vector = record
    with sound(path, f"the item {key!r}"):
        row = vectors_of([vector], path, dimension)[0]
        if checksum_of(key, label, uri, metadata, vector) != checksum:
            raise altered(path, f"the item {key!r}")
        return Item(key, row, label, uri, metadata_of(metadata), source=source_of(*source), version=seq)


def checksum_of(key: str, label: str, uri: str, metadata: str, vector: bytes) -> int:
    """Return the CRC-32 that an item is stored with: it tells an item that the disk has altered.

    Raises:
        TypeError: One of the texts is none, or the vector is no bytes.
    """
    return zlib.crc32(vector, zlib.crc32("\0".join((key, label, uri, metadata)).encode()))


def source_columns(source: Source | None) -> tuple[object, ...]:
    """Return origin, size, time and digest as they are stored."""
    return (source.origin, source.size, source.mtime_ns, source.digest) if source else (None,) * 4


def source_of(origin: object, size: object, mtime_ns: object, digest: object) -> Source | None:
    """Return what `source_columns` was made of.

    Raises:
        TypeError: A column is of another kind.
    """
    match origin, size, mtime_ns, digest:
        case None, None, None, None:
            return None
        case str(), int(), int(), bytes():
            return Source(origin, size, mtime_ns, digest)
    raise TypeError("a column of its source is of another kind")


def metadata_of(text: str) -> dict[str, Any]:
    """Return the metadata of its JSON text.

    Raises:
        TypeError: It is no object.
        ValueError: It is no JSON.
    """
    found: dict[str, Any] = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError("it is no JSON object")
    return found


def vectors_of(blobs: Sequence[bytes], path: Path, dimension: int) -> NDArray[np.float32]:
    """Return vectors as float32 (b, d); their bytes are copied once.

    Raises:
        BadArtifact: One is of another length.
    """
    size = 4 * dimension
    if {*map(len, blobs)} != {size}:
        raise damaged(path, f"a vector in it is not {size} bytes long")
    return np.frombuffer(b"".join(blobs), "<f4").reshape(-1, dimension).astype(np.float32, copy=False)


def check_texts(*values: object) -> None:
    """Check the kind of what is read as text.

    Raises:
        TypeError: One is of another kind.
    """
    if {*map(type, values)} - {str}:
        raise TypeError("a text is of another kind")


def _blob(item: Item) -> bytes:
    return item.vector.astype("<f4").tobytes()
