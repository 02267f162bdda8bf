"""The truth of a gallery: its items in one SQLite file (`schema`), every acknowledged write on disk.

All that a reader sees within a transaction is one state. Who may not write reads as `access` tells, or is
refused.
"""

import logging
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.errors import BadArtifact, NotFound, Overloaded, ReadOnly, Unavailable
from serving.gallery.access import Access, access_to, is_writable
from serving.gallery.damage import damaged, sound
from serving.gallery.disk import is_full
from serving.gallery.schema import FORMAT_VERSION, MAX_DIMENSION, SCHEMA, Meta
from serving.gallery.transaction import Reader, Writer

__all__ = ["Store", "create_store"]

_NEEDS_WRITING = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)  # to make the file of shared memory
# The statements are constant and tested: that one fails as such (no such column, an unsupported file format)
# shows a file that is not as it was made. None stands for text in it that is not UTF-8.
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
    None,
)

_log = logging.getLogger(__name__)


def create_store(
    path: Path, *, model_name: str, fingerprint: str, dimension: int, thumbnail_side: int = 0
) -> None:
    """Make a new, empty store in a file that does not exist yet, on disk when this returns.

    Raises:
        Unavailable: The file cannot be written.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "id": secrets.token_hex(16),
        "model_name": model_name,
        "fingerprint": fingerprint,
        "dimension": dimension,
        "thumbnail_side": thumbnail_side,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(
                "PRAGMA page_size=8192"
            )  # three rows of 512 floats a page; 4096 would hold one
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(f"BEGIN; {SCHEMA}")
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise _translate(error, path, None) from error


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
            ReadOnly: This process may not write to it, and as it stands it cannot be read without.
            Unavailable: It cannot be read.
        """
        if not path.is_file():
            raise NotFound(f"there is no gallery file {path}; check the path, or create the gallery first")
        self.path = path
        self._timeout = busy_timeout
        self._writable = is_writable(path)
        self._inode = _inode(path)
        self._guard = threading.Lock()  # of the four fields below
        self._access = self._look()
        self._idle: list[sqlite3.Connection] = []
        self._pooling = True
        self._closed = False
        self._write_turn = threading.Lock()
        self._write_connection: sqlite3.Connection | None = None
        with self._translated():
            connection = self._connect(self._access)
            try:
                self.meta = self._read_meta(connection)
            except BaseException:
                connection.close()
                raise
        self._idle.append(connection)

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """Begin a read transaction; its state is fixed by the first query in it.

        Raises:
            Overloaded: A file on a read-only file system was changed meanwhile; what was read may be amiss.
            Unavailable: The file was replaced by another gallery, or this store is closed.
            NotFound: The file is gone.
        """
        with self._translated():
            connection, access = self._borrow()
            try:
                connection.execute("BEGIN")
                yield Reader(connection, self.path, self.meta.dimension)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._give_back(connection, access)
                if access.stamp and access != self._look():
                    raise Overloaded(
                        f"the gallery file {self.path} was changed while it was read; try again",
                        retry_after=1.0,
                    )

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """Begin a write transaction; when the block ends it is committed and on disk, or undone as a whole.

        Raises:
            Overloaded: Another writer did not finish in time, or the disk is full.
            ReadOnly: This process may not write to the gallery.
            Unavailable: The disk fails, the file was replaced by another gallery, or this store is closed.
            NotFound: The file is gone.
        """
        if not self._writable:
            raise ReadOnly(f"the gallery file {self.path} is read-only; make it and its folder writable")
        if not self._write_turn.acquire(timeout=self._timeout):
            raise self._busy()
        try:
            with self._translated(busy=self._busy):
                connection = self._writer()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield Writer(connection, self.path, self.meta.dimension)
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        finally:
            if not self._pooling:
                self._close_writer()
            self._write_turn.release()

    def retire(self) -> None:
        """Keep no connection between transactions from now on; the store works on, at a cost for each."""
        with self._guard:
            self._pooling = False
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._write_turn.acquire(blocking=False):  # or else the writer does it when it is done
            self._close_writer()
            self._write_turn.release()

    def close(self) -> None:
        """Close every connection; those in use are closed when their transaction ends."""
        with self._guard:
            self._closed = True
        self.retire()
        with self._write_turn:
            self._close_writer()

    def _close_writer(self) -> None:
        if self._write_connection is not None:
            self._write_connection.close()
            self._write_connection = None

    def _busy(self) -> Overloaded:
        return Overloaded(
            f"another writer held the gallery file {self.path} for more than {self._timeout:g} s; try again",
            retry_after=1.0,
        )

    def _connect(self, access: Access) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{access.mode}",
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

    def _connect_again(self, access: Access) -> sqlite3.Connection:
        """Connect, and refuse a file that has come in the place of the one that was opened at first."""
        if _inode(self.path) == self._inode:
            connection = self._connect(access)
            try:
                if self._read_meta(connection) == self.meta and _inode(self.path) == self._inode:
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise Unavailable(
            f"the gallery file {self.path} has been replaced by another; open the gallery again"
        )

    def _look(self) -> Access:
        """Return how the file is to be opened now."""
        try:
            return access_to(self.path, writable=self._writable)
        except OSError as error:
            raise _gone(self.path, error) from error

    def _read_meta(self, connection: sqlite3.Connection) -> Meta:
        try:
            with sound(self.path, "its table meta"):
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
        if version < FORMAT_VERSION:
            raise BadArtifact(
                f"the gallery file {self.path} is of format version {version}, and this crossbatch reads "
                f"version {FORMAT_VERSION}; drop the gallery and index its images again"
            )
        with sound(self.path, "its table meta"):
            values = [found[field.name] for field in fields(Meta)]
            if [type(value) for value in values] != [str, str, str, int, int, str]:
                raise TypeError("a value is of another kind")
            if not 1 <= found["dimension"] <= MAX_DIMENSION:
                raise ValueError(f"the dimension is {found['dimension']}")
        return Meta(*values)

    def _borrow(self) -> tuple[sqlite3.Connection, Access]:
        with self._guard:
            self._refuse_closed()
            if not self._writable and (access := self._look()) != self._access:
                _log.warning("the gallery file %s has changed on its read-only file system", self.path)
                stale, self._idle, self._access = self._idle, [], access
                for connection in stale:
                    connection.close()
            if self._idle:
                return self._idle.pop(), self._access
            access = self._access
        return self._connect_again(access), access

    def _give_back(self, connection: sqlite3.Connection, access: Access) -> None:
        with self._guard:
            if self._pooling and access == self._access:
                self._idle.append(connection)
                return
        connection.close()

    def _writer(self) -> sqlite3.Connection:
        with self._guard:
            self._refuse_closed()
        if self._write_connection is None:
            self._write_connection = self._connect_again(self._access)
        return self._write_connection

    @contextmanager
    def _translated(self, *, busy: Callable[[], Exception] | None = None) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # of SQLite's own message, which quotes the file
            raise damaged(self.path, error) from error
        except sqlite3.Error as error:
            if self._writable or (getattr(error, "sqlite_errorcode", 0) & 0xFF) not in _NEEDS_WRITING:
                raise _translate(error, self.path, busy) from error
            raise ReadOnly(
                f"the gallery file {self.path} can be read now only by who may write to its folder, as "
                "nobody has it open who may; give that right, or mount its folder read-only"
            ) from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Unavailable(f"the gallery file {self.path} has been closed; open the gallery again")


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise _gone(path, error) from error
    return found.st_dev, found.st_ino


def _gone(path: Path, error: OSError) -> NotFound | Unavailable:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"the gallery file {path} is gone; it was dropped while it was open")
    return Unavailable(f"the gallery file {path} cannot be read ({error.strerror}); check the disk")


def _translate(error: sqlite3.Error, path: Path, busy: Callable[[], Exception] | None) -> Exception:
    code: Any = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None  # the rest of the code is detail
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return busy() if busy else Overloaded(f"the gallery file {path} is locked; try again")
    if primary in _DAMAGE and not isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return damaged(path, error)
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ReadOnly(f"the gallery file {path} cannot be written ({error}); check its permissions")
    if primary == sqlite3.SQLITE_CANTOPEN:
        return Unavailable(f"the gallery file {path} cannot be opened ({error}); check its permissions")
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and is_full(path.parent)):
        return Overloaded(
            f"the disk that holds the gallery file {path} is full, and nothing was stored; free some space",
            retry_after=30.0,
        )
    if primary == sqlite3.SQLITE_IOERR:
        return Unavailable(f"the gallery file {path} cannot be read or written ({error}); check the disk")
    return error  # a bug of ours
