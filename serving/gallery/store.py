"""The truth of a gallery: its items in one SQLite file, every acknowledged write on disk.

    meta      what never changes: format version, model name, fingerprint, dimension
    state     one row: a counter of changes, and the published FAISS file with what it covers
    items     live items; `seq` grows with every write and is never used twice
    removals  the `seq` of each item deleted or replaced since the published FAISS file was made

A replaced item gets a new `seq`, so "newer than the index" is `seq > covers_seq`, and a process that knows
the gallery up to some `seq` and removal catches up by two range scans. All of it is in one SQLite
transaction: a reader sees one state for as long as its transaction lasts.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.errors import BadArtifact, NotFound, Overloaded, Unavailable
from serving.gallery.disk import is_full
from serving.gallery.transaction import Reader, Writer

__all__ = ["FILE_NAME", "FORMAT_VERSION", "Meta", "Store", "create_store"]

FILE_NAME = "gallery.sqlite"
FORMAT_VERSION = 1

_SCHEMA = """
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


def create_store(path: Path, *, model_name: str, fingerprint: str, dimension: int) -> None:
    """Make a new, empty store in a file that does not exist yet, on disk when this returns.

    Raises:
        Unavailable: The file cannot be written.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "model_name": model_name,
        "fingerprint": fingerprint,
        "dimension": dimension,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with _translated(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size=8192")  # three rows of 512 floats a page; 4096 would hold one
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(f"BEGIN; {_SCHEMA}")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("COMMIT")


class Store:
    """An open store: a pool of connections to read, one connection to write; every method is thread-safe."""

    def __init__(self, path: Path, *, busy_timeout: float = 10.0) -> None:
        """Open the file and read its meta table.

        Args:
            path: The SQLite file.
            busy_timeout: Seconds to wait for a writer of another process.

        Raises:
            NotFound: There is no such file.
            BadArtifact: It is damaged, not a gallery, or of a newer format.
            Unavailable: It cannot be read.
        """
        if not path.is_file():
            raise NotFound(f"there is no gallery file {path}; check the path, or create the gallery first")
        self.path = path
        self._timeout = busy_timeout
        self._writable = os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)
        self._guard = threading.Lock()  # of the two fields below
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._write_turn = threading.Lock()
        self._write_connection: sqlite3.Connection | None = None
        with _translated(path):
            connection = self._connect()
            try:
                self.meta = self._read_meta(connection)
            except BaseException:
                connection.close()
                raise
        self._idle.append(connection)

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """Begin a read transaction; its state is fixed by the first query in it."""
        with _translated(self.path):
            connection = self._borrow()
            try:
                connection.execute("BEGIN")
                yield Reader(connection, self.path, self.meta.dimension)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._give_back(connection)

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """Begin a write transaction; when the block ends it is committed and on disk, or undone as a whole.

        Raises:
            Overloaded: Another writer did not finish in time, or the disk is full.
            Unavailable: The gallery cannot be written.
        """
        if not self._writable:
            raise Unavailable(f"the gallery file {self.path} is read-only; make it and its folder writable")
        if not self._write_turn.acquire(timeout=self._timeout):
            raise self._busy()
        try:
            with _translated(self.path, busy=self._busy):
                connection = self._writer()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield Writer(connection, self.path, self.meta.dimension)
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        finally:
            self._write_turn.release()

    def close(self) -> None:
        """Close every connection; those in use are closed when their transaction ends."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        with self._write_turn:
            if self._write_connection is not None:
                self._write_connection.close()
                self._write_connection = None

    def _busy(self) -> Overloaded:
        return Overloaded(
            f"another writer held the gallery file {self.path} for more than {self._timeout:g} s; try again",
            retry_after=1.0,
        )

    def _connect(self) -> sqlite3.Connection:
        mode = "mode=rw"
        if not self._writable:
            # In a folder where SQLite cannot put its shared-memory file, a settled file is read as it stands.
            journal = self.path.with_name(f"{self.path.name}-wal")
            mode = "mode=ro" if journal.exists() and journal.stat().st_size else "mode=ro&immutable=1"
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=self._timeout,
            isolation_level=None,  # transactions are begun here, explicitly
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA fullfsync=ON")  # macOS: through the drive's cache as well
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_meta(self, connection: sqlite3.Connection) -> Meta:
        try:
            found = dict(connection.execute("SELECT name, value FROM meta"))
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            found = {}
        version = found.get("format_version")
        if not isinstance(version, int):
            raise BadArtifact(f"{self.path} is not a gallery: it names no format version; check the path")
        if version > FORMAT_VERSION:
            raise BadArtifact(
                f"the gallery file {self.path} is of format version {version}, and this crossbatch reads "
                f"up to version {FORMAT_VERSION}; upgrade crossbatch"
            )
        return Meta(found["model_name"], found["fingerprint"], found["dimension"], found["created"])

    def _borrow(self) -> sqlite3.Connection:
        with self._guard:
            self._refuse_closed()
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._guard:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _writer(self) -> sqlite3.Connection:
        with self._guard:
            self._refuse_closed()
        if self._write_connection is None:
            self._write_connection = self._connect()
        return self._write_connection

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Unavailable(f"the gallery file {self.path} has been closed; open the gallery again")


@contextmanager
def _translated(path: Path, *, busy: Callable[[], Exception] | None = None) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(error, path, busy) from error


def _translate(error: sqlite3.Error, path: Path, busy: Callable[[], Exception] | None) -> Exception:
    code: Any = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None  # the rest of the code is detail
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return busy() if busy else Overloaded(f"the gallery file {path} is locked; try again")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return BadArtifact(
            f"the gallery file {path} is damaged ({error}); restore it from a backup, "
            "or drop the gallery and index its images again"
        )
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Unavailable(f"the gallery file {path} cannot be used ({error}); check its permissions")
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and is_full(path.parent)):
        return Overloaded(
            f"the disk that holds the gallery file {path} is full, and nothing was stored; free some space",
            retry_after=30.0,
        )
    if primary == sqlite3.SQLITE_IOERR:
        return Unavailable(f"the gallery file {path} cannot be read or written ({error}); check the disk")
    return error  # a bug of ours
