"""The tables of a gallery file.

    meta        what never changes: format version, id, model name, fingerprint, dimension, side of thumbnails
    state       one row: a counter of changes; the published FAISS file, what it covers and what it is; what
                index is wanted; and, of a gallery that took another's name, which one that was
    items       live items; `seq` grows with every write, is never used twice, and is the item's version
    thumbnails  small JPEG pictures of some of the items
    removals    the `seq` of each item deleted or replaced that a FAISS file still in use may hold

A replaced item gets a new `seq`, so "newer than the index" is `seq > covers_seq`, and a process that knows
the gallery up to some `seq` and removal catches up by two range scans.
"""

from dataclasses import dataclass

__all__ = ["FILE_NAME", "FORMAT_VERSION", "MAX_DIMENSION", "SCHEMA", "Meta"]

FILE_NAME = "gallery.sqlite"
FORMAT_VERSION = 2
MAX_DIMENSION = 65_536

SCHEMA = """
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
    index_facts TEXT NOT NULL DEFAULT '{}',  -- JSON: `serving.gallery.kind.Facts`
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
    checksum INTEGER NOT NULL,  -- CRC-32 over the texts and the vector: `transaction.checksum_of`
    origin TEXT,  -- of an item made from a file: which data set, and the file's size, time and SHA-256
    size INTEGER,
    mtime INTEGER,
    digest BLOB,
    vector BLOB NOT NULL  -- last, so that reading the columns before it skips its overflow pages
);
CREATE INDEX items_by_origin ON items (origin, key) WHERE origin IS NOT NULL;
CREATE TABLE thumbnails (seq INTEGER PRIMARY KEY, jpeg BLOB NOT NULL);
CREATE TABLE removals (id INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Meta:
    """What a gallery is made for; it never changes."""

    id: str
    """Random, 32 hexadecimal digits: no two galleries have the same."""
    model_name: str
    fingerprint: str
    dimension: int
    thumbnail_side: int
    """Longer side of its thumbnails in pixels; 0 where it keeps none."""
    created: str
