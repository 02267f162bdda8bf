"""The tables of a gallery file.

    meta      what never changes: format version, model name, fingerprint, dimension
    state     one row: a counter of changes, and the published FAISS file with what it covers
    items     live items; `seq` grows with every write and is never used twice
    removals  the `seq` of each item deleted or replaced since the FAISS file before the published one

A replaced item gets a new `seq`, so "newer than the index" is `seq > covers_seq`, and a process that knows
the gallery up to some `seq` and removal catches up by two range scans.
"""

from dataclasses import dataclass

__all__ = ["FILE_NAME", "FORMAT_VERSION", "MAX_DIMENSION", "SCHEMA", "Meta"]

FILE_NAME = "gallery.sqlite"
FORMAT_VERSION = 1
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
    covers_removal INTEGER NOT NULL DEFAULT 0
);
INSERT INTO state (one) VALUES (1);
CREATE TABLE items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    label TEXT NOT NULL,
    uri TEXT NOT NULL,
    metadata TEXT NOT NULL,
    vector BLOB NOT NULL  -- last, so that reading the columns before it skips its overflow pages
);
CREATE TABLE removals (id INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Meta:
    """What a gallery is made for; it never changes."""

    model_name: str
    fingerprint: str
    dimension: int
    created: str
