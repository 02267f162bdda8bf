"""The truth of a gallery: its items in one SQLite file (`schema`), every acknowledged write on disk.

All that a reader sees within a transaction is one state. Who may not write reads as `access` tells, or is
refused.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from serving.errors import AlreadyExists, BadArtifact, NotFound, Overloaded, ReadOnly, Unavailable
from serving.gallery.disk import are_descriptors_out, disk_error
from serving.gallery.lock import names_stay
from serving.gallery.store.access import Access, access_to, gone, identity_of, is_writable
from serving.gallery.store.damage import damaged
from serving.gallery.store.pool import Pool
from serving.gallery.store.refusal import Code, code_of, refusal
from serving.gallery.store.schema import DETACH, SCHEMA, new_meta, read_meta
from serving.gallery.store.transaction import Reader
from serving.gallery.store.writer import Writer

__all__ = ["Replaced", "Store", "create_store"]

_NEEDS_WRITING = (Code.READONLY, Code.CANTOPEN)  # to make the file of shared memory
_OF_COPY = (Code.FULL, Code.IOERR, Code.CANTOPEN, Code.READONLY, Code.PERM)  # it is what cannot be written

_log = logging.getLogger(__name__)


class Replaced(Unavailable):
    """The file under a gallery's name is another than the one that was opened, or the store was closed."""


def create_store(
    path: Path,
    *,
    model_name: str,
    fingerprint: str,
    dimension: int,
    thumbnail_side: int = 0,
    index: str = "auto",
    recall: float = 0.99,
) -> None:
    """Make a new, empty store in a file that does not exist yet, on disk when this returns.

    Raises:
        Unavailable: The file cannot be written.
    """
    meta = new_meta(
        model_name=model_name, fingerprint=fingerprint, dimension=dimension, thumbnail_side=thumbnail_side
    )
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(
                "PRAGMA page_size=8192"
            )  # three rows of 512 floats a page; 4096 would hold one
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(f"BEGIN; {SCHEMA}")
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.execute("UPDATE state SET wanted_index = ?, wanted_recall = ?", (index, recall))
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise refusal(error, path, None) from error


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
        self._folder = path.absolute().parent.parent
        self._access = self._look()
        self._pool = Pool[sqlite3.Connection](self._access)
        self._retired = self._closed = False
        self._write_turn = threading.Lock()
        self._write_connection: sqlite3.Connection | None = None
        with self._translated(), names_stay(self._folder):
            self.identity = identity_of(path)
            connection = self._connect(self._access)
            try:
                self.meta = read_meta(connection, self.path)
            except BaseException:
                connection.close()
                raise
        self._pool.give_back(connection, self._access)

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """Begin a read transaction; its state is fixed by the first query in it.

        Raises:
            Overloaded: A file on a read-only file system was changed meanwhile; what was read may be amiss.
            Replaced: The file was replaced by another gallery, or this store is closed.
            NotFound: The file is gone.
        """
        with self._translated(), self._borrowed() as connection:
            connection.execute("BEGIN")
            yield Reader(connection, self.path, self.meta.dimension)

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """Begin a write transaction; when the block ends it is committed and on disk, or undone as a whole.

        Raises:
            Overloaded: Another writer did not finish in time, or the disk is full.
            ReadOnly: This process may not write to the gallery.
            Replaced: The file was replaced by another gallery, or this store is closed.
            Unavailable: The disk fails.
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
                    self.check_name()  # or the write would land in what lost the name
                    yield Writer(connection, self.path, self.meta.dimension)
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        finally:
            self._write_turn.release()
            if self._retired:  # looked at after the release: `retire` may have found the lock taken
                self._rest()

    def copy_to(self, path: Path) -> None:
        """Write one compact file of a single state, while writes go on: a gallery of its own, without index.

        Raises:
            AlreadyExists: There is something at `path`.
            ReadOnly: The folder of `path` cannot be written.
            Overloaded: The disk that `path` is on is full.
            Unavailable: There is no such folder, or the disk fails.
            BadArtifact: The gallery file is damaged.
        """
        try:
            path.touch(exist_ok=False)  # so that nobody else's file is written or removed
        except FileExistsError as error:
            raise AlreadyExists(f"there is already something at {path}; choose another name") from error
        except OSError as error:
            raise disk_error(error, f"the copy {path}") from error
        try:
            with self._translated(), self._borrowed() as connection:
                try:
                    connection.execute("VACUUM INTO ?", (str(path),))
                    _detach(path)
                except sqlite3.Error as error:
                    if code_of(error) in _OF_COPY:
                        raise refusal(error, path, None) from error
                    raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def check(self) -> list[str]:
        """Return what SQLite's own integrity check finds wrong; nothing where the file is sound."""
        try:
            with self._translated(), self._borrowed() as connection:
                found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check")]
        except BadArtifact as error:  # so wrong that the check itself cannot go on
            return [str(error)]
        return [] if found == ["ok"] else found

    def check_name(self) -> None:
        """Check that the gallery still has the name that it was opened by.

        Raises:
            Replaced: Another has it now.
            NotFound: None has.
        """
        if identity_of(self.path) != self.identity:
            raise self._replaced()

    @property
    def bytes(self) -> int:
        """The size of the file, with what is written and not yet moved into it.

        Raises:
            NotFound: It is gone.
            Unavailable: It cannot be looked at.
        """
        try:
            size = self.path.stat().st_size
            with suppress(FileNotFoundError):  # it comes and goes
                size += self.path.with_name(f"{self.path.name}-wal").stat().st_size
        except OSError as error:
            raise gone(self.path, error) from error
        return size

    def retire(self) -> None:
        """Keep no connection between transactions from now on; the store works on, at a cost for each."""
        self._retired = True
        self._pool.keep_none()
        self._rest()

    def close(self) -> None:
        """Close every connection; those in use are closed when their transaction ends."""
        self._closed = True
        self.retire()
        with self._write_turn:
            self._close_writer()

    def _rest(self) -> None:
        if self._write_turn.acquire(blocking=False):  # or else the writer does it when it is done
            self._close_writer()
            self._write_turn.release()

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
        with names_stay(self._folder):
            self.check_name()
            connection = self._connect(access)
            try:
                if read_meta(connection, self.path) == self.meta and identity_of(self.path) == self.identity:
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise self._replaced()

    def _replaced(self) -> Replaced:
        return Replaced(f"the gallery file {self.path} has been replaced by another; open the gallery again")

    def _look(self) -> Access:
        """Return how the file is to be opened now."""
        try:
            return access_to(self.path, writable=self._writable)
        except OSError as error:
            raise gone(self.path, error) from error

    @contextmanager
    def _borrowed(self) -> Iterator[sqlite3.Connection]:
        self._refuse_closed()
        access = self._access if self._writable else self._look()
        connection, changed = self._pool.take(access)
        if changed:
            _log.warning("the gallery file %s has changed on its read-only file system", self.path)
        if connection is None:
            connection = self._connect_again(access)
        try:
            yield connection
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._pool.give_back(connection, access)
            if access.stamp and access != self._look():
                raise Overloaded(
                    f"the gallery file {self.path} was changed while it was read; try again",
                    retry_after=1.0,
                )

    def _writer(self) -> sqlite3.Connection:
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
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):  # bugs of ours
            raise
        except sqlite3.Error as error:
            if self._writable or code_of(error) not in _NEEDS_WRITING or are_descriptors_out():
                raise refusal(error, self.path, busy) from error
            raise ReadOnly(
                f"the gallery file {self.path} can be read now only by who may write to its folder, as "
                "nobody has it open who may; give that right, or mount its folder read-only"
            ) from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Replaced(f"the gallery file {self.path} has been closed; open the gallery again")


def _detach(path: Path) -> None:
    """Make of a copy a gallery of its own, which has no index, and was never switched to."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(f"BEGIN; {DETACH} COMMIT")
