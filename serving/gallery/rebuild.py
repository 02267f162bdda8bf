"""Making the next FAISS file of a gallery: one process at a time, beside the searches, published at once."""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serving.errors import CrossbatchError, Overloaded
from serving.gallery.disk import disk_error
from serving.gallery.index import build_index
from serving.gallery.store import Store
from serving.gallery.transaction import State

__all__ = ["RebuildPolicy", "Rebuilder"]

_LOCK_FILE = "rebuild.lock"
_PAUSE = 30.0  # seconds until a background rebuild that failed is tried again

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RebuildPolicy:
    """When the index is made anew without being asked for.

    Attributes:
        least: Changes below which it never is; items up to here are searched in a plain matrix.
        share: The part of the index's items that may have changed before it is.
        automatic: Whether it is at all.
    """

    least: int = 4096
    share: float = 0.1
    automatic: bool = True

    def is_due(self, state: State) -> bool:
        """Tell whether so much is newer than the index, or deleted from it, that searches are slowed."""
        changes = max(state.last_seq - state.covers_seq, state.last_removal - state.covers_removal)
        return changes > max(self.least, self.share * state.index_count)


class Rebuilder:
    """Rebuilds one gallery's index, when asked or in a thread of its own."""

    def __init__(self, store: Store, policy: RebuildPolicy) -> None:
        self._store = store
        self._folder = store.path.parent
        self._policy = policy
        self._guard = threading.Lock()  # of the thread and the time below
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self._stopping = threading.Event()

    def consider(self, state: State, *, damaged: bool = False) -> None:
        """Start a rebuild in the background if it is due and none is running."""
        if not self._policy.automatic or not (damaged or self._policy.is_due(state)):
            return
        with self._guard:
            running = self._thread is not None and self._thread.is_alive()
            if running or self._stopping.is_set() or time.monotonic() < self._not_before:
                return
            # A daemon, since a process may end in the middle: what is built aside is then thrown away.
            self._thread = threading.Thread(
                target=self._in_background, args=(damaged,), name=f"rebuild {self._folder.name}", daemon=True
            )
            self._thread.start()

    def run(self, *, timeout: float = 600.0) -> None:
        """Build an index over every item there is and publish it.

        Args:
            timeout: Seconds to wait for a rebuild by another thread or process.

        Raises:
            Overloaded: That one took too long, or the disk is full.
            ReadOnly: The folder cannot be written.
        """
        try:
            with _alone(self._folder / _LOCK_FILE, timeout):
                self._build(only_if_due=False)
        except OSError as error:
            raise disk_error(error, f"the index of the gallery {self._folder}") from error

    def close(self) -> None:
        """Stop the background rebuild, if one runs, at its next block."""
        self._stopping.set()
        with self._guard:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _in_background(self, damaged: bool) -> None:
        try:
            with _alone(self._folder / _LOCK_FILE, 0.0):
                self._build(only_if_due=not damaged)
        except Overloaded as error:  # most often another process is at it
            self._later(f"the index of {self._folder} is not rebuilt now: {error}", logging.INFO)
        except CrossbatchError as error:
            self._later(f"the index of {self._folder} was not rebuilt: {error}", logging.WARNING)
        except OSError as error:
            self._later(f"the index of {self._folder} was not rebuilt: {error}", logging.WARNING)
        except Exception:
            self._later(f"the index of {self._folder} was not rebuilt", logging.ERROR, trace=True)

    def _later(self, message: str, level: int, *, trace: bool = False) -> None:
        if self._stopping.is_set():
            return
        _log.log(level, "%s; searches go on without it", message, exc_info=trace)
        with self._guard:
            self._not_before = time.monotonic() + _PAUSE

    def _build(self, *, only_if_due: bool) -> None:
        older = list(self._folder.glob("index-*"))  # than what is built here
        with self._store.read() as reader:
            seen = reader.state()
            if only_if_due and not self._policy.is_due(seen):
                return  # another process was faster
            _remove(older, but=seen.index_file)  # what a crash has left: the room may be needed
            path = self._folder / f"index-{seen.last_seq}-{secrets.token_hex(4)}.faiss"
            built = build_index(
                path,
                ((block.seqs, block.vectors) for block in reader.blocks_since(0)),
                dimension=self._store.meta.dimension,
                proceed=lambda: not self._stopping.is_set(),
            )
        if built is None:
            return
        checksum, count = built
        file = path.name if count else ""  # an empty gallery has no index
        with self._store.write() as writer:
            writer.publish(
                seen,
                index_file=file,
                checksum=checksum,
                count=count,
                facts="{}",
                covers_removal=seen.last_removal,
            )
            named = writer.state().index_file  # of another, where it was faster
        _remove([*older, path], but=named)


def _remove(files: Iterable[Path], *, but: str) -> None:
    """Remove FAISS files but the published one.

    A process that has one of them mapped keeps it; one about to open it finds the newer one named.
    """
    for path in files:
        if path.name != but:
            with suppress(FileNotFoundError):
                path.unlink()


@contextmanager
def _alone(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file; the lock goes with the process, so a crash leaves none behind."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise Overloaded(
                        f"another rebuild of the gallery {path.parent} is running; try again later",
                        retry_after=5.0,
                    ) from error
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
