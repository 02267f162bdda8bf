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

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from serving.errors import BadArtifact
from serving.gallery.store.damage import sound
from serving.gallery.store.publication import UNPUBLISHED, publication_checksum

__all__ = [
    "FILE_NAME",
    "FORMAT_VERSION",
    "MAX_DIMENSION",
    "MAX_THUMBNAIL_SIDE",
    "SCHEMA",
    "Meta",
    "read_meta",
]

FILE_NAME = "gallery.sqlite"
FORMAT_VERSION = 2
MAX_DIMENSION = 65_536
MAX_THUMBNAIL_SIDE = 1024

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
    index_facts TEXT NOT NULL DEFAULT '{{}}',  -- JSON: `serving.gallery.index.metadata.IndexMetadata`
    published_checksum INTEGER NOT NULL DEFAULT {publication_checksum(*UNPUBLISHED)},  -- over the six before
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
    checksum INTEGER NOT NULL,  -- CRC-32 over the texts and the vector: `record.checksum_of`
    origin TEXT,  -- of an item made from a file: which data set, and the file's size, time and SHA-256
    size INTEGER,
    mtime INTEGER,
    digest BLOB,
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

DETACH = f"""
UPDATE meta SET value = lower(hex(randomblob(16))) WHERE name = 'id';
UPDATE state SET
    generation = 0, index_file = '', index_checksum = '', index_count = 0, covers_seq = 0, covers_removal = 0,
    index_facts = '{{}}', published_checksum = {publication_checksum(*UNPUBLISHED)},
    previous_name = '', previous_id = '';
DELETE FROM removals;
"""  # noqa: S608 - a number
"""Makes of a copy a gallery of its own, which has no index, and whose name was nobody's before."""


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


class _Connection(Protocol):
    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any: ...


def new_meta(
    *, model_name: str, fingerprint: str, dimension: int, thumbnail_side: int
) -> dict[str, str | int]:
    """Return what stands in the table meta of a new gallery."""
    return {
        "format_version": FORMAT_VERSION,
        "id": secrets.token_hex(16),
        "model_name": model_name,
        "fingerprint": fingerprint,
        "dimension": dimension,
        "thumbnail_side": thumbnail_side,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_meta(connection: _Connection, path: Path) -> Meta:
    """Return what the gallery of an open file is made for.

    Raises:
        BadArtifact: It is damaged, no gallery, or of another format version.
    """
    with sound(path, "its table meta"):
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE name = 'meta'").fetchall()
        found = dict(connection.execute("SELECT name, value FROM meta")) if tables else {}
    version = found.get("format_version")
    if not isinstance(version, int):
        raise BadArtifact(f"{path} is not a gallery: it names no format version; check the path")
    if version > FORMAT_VERSION:
        raise BadArtifact(
            f"the gallery file {path} is of format version {version}, and this crossbatch reads "
            f"up to version {FORMAT_VERSION}; upgrade crossbatch"
        )
    if version < FORMAT_VERSION:
        raise BadArtifact(
            f"the gallery file {path} is of format version {version}, and this crossbatch reads "
            f"version {FORMAT_VERSION}; drop the gallery and index its images again"
        )
    with sound(path, "its table meta"):
        values = [found[field.name] for field in fields(Meta)]
        if [type(value) for value in values] != [str, str, str, int, int, str]:
            raise TypeError("a value is of another kind")
        if not 1 <= found["dimension"] <= MAX_DIMENSION:
            raise ValueError(f"the dimension is {found['dimension']}")
    return Meta(*values)
