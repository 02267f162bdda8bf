"""The truth of a gallery: its items in one SQLite file (`schema`), every acknowledged write on disk.

All that a reader sees within a transaction is one state.

SQLite lets readers see writers' latest by a file of shared memory (`-shm`) beside the gallery file. Who may
write to the folder makes it where it is not; who may only read needs one that is there, which is so for as
long as somebody who may write has the gallery open. On a file system that is itself read-only (a container's
`:ro` mount) and without that file, nothing writes: each transaction reads the file as it then stands.
"""

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from serving.errors import BadArtifact, NotFound, Overloaded, ReadOnly, Unavailable
from serving.gallery.disk import TOO_MANY_OPEN, are_descriptors_out, is_full
from serving.gallery.lock import names_stay
from serving.gallery.store.schema import DETACH, FORMAT_VERSION, SCHEMA, UNPUBLISH, damaged, read_meta
from serving.gallery.store.transaction import Reader, Writer

__all__ = ["Replaced", "Store", "create_store", "refusal"]

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
# The statements are constant and tested: that one fails as such (no such column, an unsupported file format)
# shows a file that is not as it was made. None stands for text in it that is not UTF-8.
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT, None,
)  # fmt: skip
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
_NO_SHARED_MEMORY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)  # who may not write cannot make it
_OF_COPY = (*_UNWRITABLE, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_FAILURES = (sqlite3.Error, UnicodeDecodeError)  # the latter of SQLite's own message, which quotes the file


class Replaced(Unavailable):
    """The file under a gallery's name is another than the one that was opened, or the store was closed."""


def create_store(path: Path, *, index: str = "auto", recall: float = 0.99, **made_for: str | int) -> None:
    """Make a new, empty store in a file that does not exist yet, on disk when this returns.

    It is `made_for` a `model_name`, its `fingerprint` and `dimension`, and a `thumbnail_side`.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "id": secrets.token_hex(16),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "thumbnail_side": 0,
        **made_for,
    }
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            # Three rows of 512 floats a page; one of 4096 bytes would hold a single one.
            connection.execute("PRAGMA page_size=8192")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(f"BEGIN; {SCHEMA}")
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.execute("UPDATE state SET wanted_index = ?, wanted_recall = ?", (index, recall))
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise refusal(error, path) from error


class Store:
    """An open store and its idle connections; every method is thread-safe.

    Each raises Replaced where the store is closed or the file is another gallery's by now.
    """

    def __init__(self, path: Path, *, busy_timeout: float = 10.0) -> None:
        """Open the file; a writer of another process is waited for as many seconds as `busy_timeout`.

        ReadOnly tells that this process may not write to it, and as it stands it cannot be read without.
        """
        if not path.is_file():
            raise NotFound(f"there is no gallery file {path}; check the path, or make it by crossbatch index")
        self.path = path
        self._timeout = busy_timeout
        self._folder = path.absolute().parent.parent
        with names_stay(self._folder):  # or they might be those of two files
            self.identity = _identity_of(path)  # device and inode
            self._writable = is_writable(path)
        self._guard = threading.Lock()  # of the two fields below
        self._idle: list[sqlite3.Connection] = []  # those of who may write
        self._retired = False
        self._closed = False
        self._write_turn = threading.Lock()
        self._dimension = 0  # which is not known yet
        try:
            with self._borrowed() as reader:
                self.meta = read_meta(reader.sql, path)
        except BaseException:
            self.close()
            raise
        self._dimension = self.meta.dimension

    def read(self) -> AbstractContextManager[Reader]:
        """Begin a read transaction; its state is fixed by the first query in it."""
        return self._borrowed("BEGIN")

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """Begin a write transaction; when the block ends it is on disk, or undone as a whole."""
        if not self._writable:
            raise ReadOnly(f"the gallery file {self.path} is read-only; make it and its folder writable")
        if not self._write_turn.acquire(timeout=self._timeout):
            raise _busy(self.path)
        try:
            with self._borrowed("BEGIN IMMEDIATE") as reader:
                self.check_name()  # or the write would land in what lost the name
                yield Writer(reader)
                reader.sql.execute("COMMIT")
        finally:
            self._write_turn.release()

    def copy_to(self, path: Path, *, indexed: bool = False) -> None:
        """Write one file of a single state, while writes go on: a gallery of its own.

        It names no index, or `indexed` the same one, whose files are not copied.
        """
        with self._borrowed() as reader:
            try:
                reader.sql.execute("VACUUM INTO ?", (str(path),))
                with closing(sqlite3.connect(path, isolation_level=None)) as copy:
                    copy.execute("PRAGMA journal_mode=WAL")
                    copy.execute("PRAGMA synchronous=FULL")
                    copy.executescript(f"BEGIN; {DETACH} {'' if indexed else UNPUBLISH} COMMIT")
            except sqlite3.Error as error:
                if _code(error) in _OF_COPY:
                    raise refusal(error, path) from error
                raise

    def check(self) -> list[str]:
        """Return what SQLite's own integrity check finds wrong; nothing where the file is sound."""
        try:
            with self._borrowed() as reader:
                found = [str(line) for (line,) in reader.sql.execute("PRAGMA integrity_check")]
        except BadArtifact as error:  # so wrong that the check itself cannot go on
            return [str(error)]
        return [] if found == ["ok"] else found

    def check_name(self) -> None:
        """Check that the gallery still has the name that it was opened by."""
        if _identity_of(self.path) != self.identity:
            raise Replaced(f"the gallery file {self.path} has been replaced by another; open it again")

    @property
    def bytes(self) -> int:
        """The size of the file, with what is written and not yet moved into it."""
        try:
            size = self.path.stat().st_size
            with suppress(FileNotFoundError):  # it comes and goes
                size += self.path.with_name(f"{self.path.name}-wal").stat().st_size
        except OSError as error:
            raise _gone(self.path, error) from error
        return size

    def retire(self) -> None:
        """Keep no connection between transactions from now on; the store works on, at a cost for each."""
        with self._guard:
            self._retired = True
            idle, self._idle = self._idle, []
        if idle:
            self._disconnect(*idle)

    def close(self) -> None:
        """Close every connection; those in use are closed when their transaction ends."""
        self._closed = True
        self.retire()

    @contextmanager
    def _borrowed(self, begin: str = "") -> Iterator[Reader]:
        if self._closed:
            raise Replaced(f"the gallery file {self.path} has been closed; open the gallery again")
        try:
            with self._guard:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                with names_stay(self._folder):
                    self.check_name()
                    connection = self._connect()
            try:
                if begin:
                    connection.execute(begin)
                yield Reader(connection, self.path, self._dimension)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                with self._guard:
                    kept = self._writable and not self._retired
                    if kept:
                        self._idle.append(connection)
                if not kept:
                    self._disconnect(connection)
        except _FAILURES as error:
            raise self._refusal(error) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{'mode=rw' if self._writable else _reading_mode(self.path)}",
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

    def _disconnect(self, *connections: sqlite3.Connection) -> None:
        with ExitStack() as names:
            # With the last connection SQLite removes the files beside this one by its name: they must be its.
            with suppress(Overloaded):
                names.enter_context(names_stay(self._folder))
            for connection in connections:
                connection.close()

    def _refusal(self, error: Exception) -> Exception:
        if isinstance(error, UnicodeDecodeError):
            return damaged(self.path, error)
        if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):  # bugs of ours
            return error
        if self._writable or _code(error) not in _NO_SHARED_MEMORY or are_descriptors_out():
            return refusal(error, self.path)
        return ReadOnly(
            f"the gallery file {self.path} can be read now only by who may write to its folder, as "
            "nobody has it open who may; give that right, or mount its folder read-only"
        )


def refusal(error: Exception, path: Path) -> Exception:
    """Return what is raised in the place of an error of SQLite about a file."""
    code, file = _code(error), f"the gallery file {path}"
    if code in _BUSY:
        return _busy(path)
    if code in _DAMAGE:
        return damaged(path, error)
    if code in _UNWRITABLE:
        return ReadOnly(f"{file} cannot be written ({error}); check its permissions")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR) and are_descriptors_out():
        return Unavailable(f"{file} cannot be opened: {TOO_MANY_OPEN}")
    if code == sqlite3.SQLITE_CANTOPEN:
        return Unavailable(f"{file} cannot be opened ({error}); check its permissions")
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and is_full(path.parent)):
        full = f"the disk that holds {file} is full, and nothing was stored; free some space"
        return Overloaded(full, retry_after=30.0)
    if code == sqlite3.SQLITE_IOERR:
        return Unavailable(f"{file} cannot be read or written ({error}); check the disk")
    return error  # a bug of ours


def _busy(path: Path) -> Overloaded:
    return Overloaded(f"another writer held the gallery file {path} for too long; try again", retry_after=1.0)


def _code(error: Exception) -> int | None:
    """Return SQLite's primary result code, None where an error has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None  # the rest of it is detail


def is_writable(path: Path) -> bool:
    """Tell whether this process may write to a file and to its folder."""
    return os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)


def _reading_mode(path: Path) -> str:
    """Return how who may not write opens the file as things stand now, as parameters of SQLite's URI."""
    try:
        if not os.statvfs(path).f_flag & os.ST_RDONLY or path.with_name(f"{path.name}-shm").exists():
            return "mode=ro"
        # A copy of a gallery with writes under way is not settled: SQLite says what is amiss.
        journal = path.with_name(f"{path.name}-wal")
        return "mode=ro" if journal.exists() and journal.stat().st_size else "mode=ro&immutable=1"
    except OSError as error:
        raise _gone(path, error) from error


def _identity_of(path: Path) -> tuple[int, int]:
    """Return the device and inode of the file that is at a path now."""
    try:
        found = path.stat()
    except OSError as error:
        raise _gone(path, error) from error
    return found.st_dev, found.st_ino


def _gone(path: Path, error: OSError) -> NotFound | Unavailable:
    """Return what a user reads when a gallery file that was open cannot be looked at."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"the gallery file {path} is gone; it was dropped while it was open")
    return Unavailable(f"the gallery file {path} cannot be read ({error.strerror}); check the disk")
