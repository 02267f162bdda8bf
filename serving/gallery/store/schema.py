"""The tables of a gallery file, how an item stands in them, and how damage to them is told.

    meta        what never changes: format version, id, model name, fingerprint, dimension, side of thumbnails
    state       one row: a counter of changes; the published FAISS file, what it covers and what it is; what
                index is wanted; and, of a gallery that took another's name, which one that was
    items       live items; `seq` grows with every write, is never used twice, and is the item's version
    thumbnails  small JPEG pictures of some of the items
    removals    the `seq` of each item deleted or replaced that a FAISS file still in use may hold

A replaced item gets a new `seq`, so "newer than the index" is `seq > covers_seq`, and a process that knows
the gallery up to some `seq` and removal catches up by two range scans.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadArtifact
from serving.gallery.item import MAX_KEY_BYTES, CheckedItem, GalleryItem, Source, check_text, check_whole

__all__ = [
    "ADD_GIVEN", "DETACH", "FILE_NAME", "FORMAT_VERSION", "ITEM_COLUMNS", "MAX_DIMENSION",
    "MAX_THUMBNAIL_SIDE", "PUBLISHED", "SCHEMA", "UNPUBLISH", "UNREADABLE", "MadeFor", "Meta", "altered",
    "check_kinds", "check_made_for", "damaged", "given_of", "item_checksum", "item_of",
    "publication_checksum", "read_meta", "record_of", "sound", "unreadable", "vectors_of",
]  # fmt: skip

FILE_NAME = "gallery.sqlite"
FORMAT_VERSION = 2
MAX_DIMENSION = 65_536
MAX_THUMBNAIL_SIDE = 1024

# What the table state says of the published index, guarded by a checksum of its own: SQLite notices no
# altered byte in a number, and here one decides which items are searched for.
PUBLISHED = "index_file, index_checksum, index_count, covers_seq, covers_removal, index_facts"


def publication_checksum(*published: str | int) -> int:
    """Return the CRC-32 that the columns `PUBLISHED` are stored with."""
    return zlib.crc32("\0".join(map(str, published)).encode())


_UNPUBLISHED = publication_checksum("", "", 0, 0, 0, "{}")

SCHEMA = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE state (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    change INTEGER NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0,
    index_file TEXT NOT NULL DEFAULT '',
    index_checksum TEXT NOT NULL DEFAULT '',
    index_count INTEGER NOT NULL DEFAULT 0,
    covers_seq INTEGER NOT NULL DEFAULT 0,
    covers_removal INTEGER NOT NULL DEFAULT 0,
    index_facts TEXT NOT NULL DEFAULT '{{}}',  -- JSON: what it is, how it was made and measured
    published_checksum INTEGER NOT NULL DEFAULT {_UNPUBLISHED},  -- over the six before
    wanted_index TEXT NOT NULL DEFAULT 'auto',
    wanted_recall REAL NOT NULL DEFAULT 0.99,
    previous_name TEXT NOT NULL DEFAULT '',  -- where the gallery lies whose name this one took, ...
    previous_id TEXT NOT NULL DEFAULT ''  -- ... and the id by which it is known
);
INSERT INTO state (one) VALUES (1);
CREATE TABLE items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    label TEXT NOT NULL,
    uri TEXT NOT NULL,
    metadata TEXT NOT NULL,
    checksum INTEGER NOT NULL,  -- CRC-32 over the texts and the vector: `item_checksum`
    origin TEXT,  -- of an item made from a file: which data set, and the file's size, time and SHA-256
    size INTEGER,
    mtime INTEGER,
    digest BLOB,
    given TEXT,  -- what its source gave where clients have changed it: CRC-32 in hexadecimal, `Source.given`
    vector BLOB NOT NULL  -- last, so that reading the columns before it skips its overflow pages
);
CREATE INDEX items_by_origin ON items (origin, key) WHERE origin IS NOT NULL;
CREATE TABLE thumbnails (
    seq INTEGER PRIMARY KEY,
    checksum INTEGER NOT NULL,  -- CRC-32 over the picture
    jpeg BLOB NOT NULL
);
CREATE TABLE removals (id INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL);
"""  # noqa: S608 - a number

# Files of version 0.1 lack that column until they are written to; who knows nothing of it leaves it empty.
ADD_GIVEN = "ALTER TABLE items ADD COLUMN given TEXT"

# Makes of a copy a gallery of its own, whose name was nobody's before, ...
DETACH = """
UPDATE meta SET value = lower(hex(randomblob(16))) WHERE name = 'id';
UPDATE state SET previous_name = '', previous_id = '';
"""
# ... and which has no index.
UNPUBLISH = f"""
UPDATE state SET
    generation = 0, index_file = '', index_checksum = '', index_count = 0, covers_seq = 0, covers_removal = 0,
    index_facts = '{{}}', published_checksum = {_UNPUBLISHED};
DELETE FROM removals;
"""  # noqa: S608 - a number


@dataclass(frozen=True, slots=True)
class Meta:
    """What a gallery is made for; it never changes."""

    id: str  # random, 32 hexadecimal digits: no two galleries have the same
    model_name: str
    fingerprint: str
    dimension: int
    thumbnail_side: int  # longer side of its thumbnails in pixels; 0 where it keeps none
    created: str


class MadeFor(TypedDict):
    """What a new gallery is made for."""

    model_name: str
    fingerprint: str
    dimension: int
    thumbnail_side: NotRequired[int]  # longer side in pixels of the pictures kept with items; 0: none
    index: NotRequired[str]  # "auto", which is to reach the recall, "exact" or a FAISS factory string
    recall: NotRequired[float]  # of the 10 nearest


def check_made_for(made_for: MadeFor) -> None:
    """Raise InvalidArgument for what no gallery can be made for; the index wanted is not looked at."""
    side = made_for.get("thumbnail_side", 0)
    check_whole(made_for["dimension"], "the dimension", least=1, most=MAX_DIMENSION)
    check_whole(side, "the side of thumbnails", least=0, most=MAX_THUMBNAIL_SIDE)
    check_text(made_for["model_name"], "name of the model", most=MAX_KEY_BYTES)
    check_text(made_for["fingerprint"], "fingerprint of the model", most=MAX_KEY_BYTES)


def damaged(path: Path, what: object) -> BadArtifact:
    """Return what a user reads when a gallery file is damaged."""
    return BadArtifact(
        f"the gallery file {path} is damaged ({what}); restore it from a backup, "
        "or drop the gallery and index its images again"
    )


def altered(path: Path, what: str) -> BadArtifact:
    """Return what a user reads when something has another checksum than the one it was stored with."""
    return damaged(path, f"{what} has been altered: its checksum does not match")


# A UnicodeDecodeError and a JSONDecodeError are ValueErrors.
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError)


def unreadable(path: Path, what: str, error: Exception) -> BadArtifact:
    """Return what a user reads when there is no sense in something that was read."""
    return damaged(path, f"{what} cannot be read: {type(error).__name__} {error}")


@contextmanager
def sound(path: Path, what: str) -> Iterator[None]:
    """Make sense of what was read from a gallery file; BadArtifact where there is none in `what`."""
    try:
        yield
    except UNREADABLE as error:
        raise unreadable(path, what, error) from error


def check_kinds(values: Sequence[object], record: type) -> None:
    """Raise TypeError for a value that is not of the type of its field in a dataclass."""
    if [*map(type, values)] != [field.type for field in fields(record)]:
        raise TypeError("a value is of another kind")


def read_meta(connection: Any, path: Path) -> Meta:
    """Return what an open file is made for; BadArtifact: it is damaged, no gallery, or of another format."""
    with sound(path, "its table meta"):
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE name = 'meta'").fetchall()
        found = dict(connection.execute("SELECT name, value FROM meta")) if tables else {}
    version = found.get("format_version")
    if not isinstance(version, int):
        raise BadArtifact(f"{path} is not a gallery: it names no format version; check the path")
    if version != FORMAT_VERSION:
        newer = f"up to version {FORMAT_VERSION}; upgrade crossbatch"
        older = f"version {FORMAT_VERSION}; drop the gallery and index its images again"
        raise BadArtifact(
            f"the gallery file {path} is of format version {version}, and this crossbatch reads "
            f"{newer if version > FORMAT_VERSION else older}"
        )
    with sound(path, "its table meta"):
        values = [found[field.name] for field in fields(Meta)]
        check_kinds(values, Meta)
        if not 1 <= found["dimension"] <= MAX_DIMENSION:
            raise ValueError(f"the dimension is {found['dimension']}")
    return Meta(*values)


ITEM_COLUMNS = "seq, key, label, uri, metadata, checksum, origin, size, mtime, digest, given, vector"


def record_of(checked: CheckedItem, seq: int) -> tuple[object, ...]:
    """Return what stands in `ITEM_COLUMNS` of an item."""
    item, metadata = checked
    texts = item.key, item.label, item.uri, metadata
    vector = item.vector.astype("<f4").tobytes()
    *source, given = astuple(item.source) if item.source else (None,) * 5
    source.append(f"{zlib.crc32(given.encode()):08x}{given}" if given else None)
    return seq, *texts, item_checksum(*texts, vector), *source, vector


def item_of(record: Sequence[Any], path: Path, dimension: int) -> GalleryItem:
    """Return the item of what was read from `ITEM_COLUMNS`; BadArtifact: it is not as it was written."""
    seq, key, label, uri, metadata, checksum, *source, vector = record
    with sound(path, f"the item {key!r}"):
        row = vectors_of([vector], path, dimension)[0]
        if item_checksum(key, label, uri, metadata, vector) != checksum:
            raise altered(path, f"the item {key!r}")
        held = json.loads(metadata)
        if not isinstance(held, dict):
            raise TypeError("its metadata is no JSON object")
        return GalleryItem(key, row, label, uri, held, source=_source_of(*source), version=seq)


def item_checksum(key: str, label: str, uri: str, metadata: str, vector: bytes) -> int:
    """Return the CRC-32 that an item is stored with; TypeError: a text is none, or the vector is no bytes."""
    return zlib.crc32(vector, zlib.crc32("\0".join((key, label, uri, metadata)).encode()))


def _source_of(
    origin: object, size: object, mtime_ns: object, digest: object, given: str | None
) -> Source | None:
    match origin, size, mtime_ns, digest:
        case None, None, None, None:
            return None
        case str(), int(), int(), bytes():
            return Source(origin, size, mtime_ns, digest, given_of(given.encode()) if given else "")
    raise TypeError("a column of its source is of another kind")


def given_of(stored: bytes) -> str:
    """Return `Source.given` of what stands in the column `given`; ValueError: it was altered."""
    if stored[:8] != b"%08x" % zlib.crc32(stored[8:]):
        raise ValueError("what its source gave has been altered")
    return stored[8:].decode()


def vectors_of(blobs: Sequence[bytes], path: Path, dimension: int) -> NDArray[np.float32]:
    """Return vectors as float32 (b, d), copied once; BadArtifact: one is of another length."""
    size = 4 * dimension
    if {*map(len, blobs)} != {size}:
        raise damaged(path, f"a vector in it is not {size} bytes long")
    return np.frombuffer(b"".join(blobs), "<f4").reshape(-1, dimension).astype(np.float32, copy=False)
