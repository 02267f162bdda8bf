"""Locks between processes; each goes with the process that holds it, so a crash leaves none behind.

rebuild.lock        in a gallery: whoever makes its index or gives it another name
the folder itself   shared while a gallery in it is opened, alone while one in it gets another name
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from serving.errors import Overloaded
from serving.gallery.disk import disk_error

__all__ = ["alone", "in_the_making", "is_in_the_making", "names_change", "names_stay"]

_LOCK_FILE = "rebuild.lock"
_PAUSE = 0.05  # seconds between two attempts
_SHORT_PAUSE = 0.001  # where the lock is held for no longer than that
_MOVE = 10.0  # seconds; opening a gallery file takes a millisecond


@contextmanager
def alone(gallery: Path, timeout: float, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a gallery's lock; while it is held, the gallery keeps its name (but may be dropped).

    Args:
        gallery: Its folder.
        timeout: Seconds to wait for somebody else who holds it.
        waiting: Called again and again meanwhile; what it raises ends the wait.

    Raises:
        Overloaded: Somebody else held it for longer.
        OSError: The gallery's folder cannot be written.
    """
    deadline = time.monotonic() + timeout
    busy = f"another rebuild or switch of the gallery {gallery} is running; try again later"
    path = gallery / _LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _acquire(descriptor, fcntl.LOCK_EX, busy, deadline=deadline, pause=_PAUSE, waiting=waiting)
            held, found = os.fstat(descriptor), path.stat()
            if (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino):
                yield
                return
        finally:
            os.close(descriptor)  # another gallery came in this one's place meanwhile: its lock is wanted


@contextmanager
def names_stay(folder: Path) -> Iterator[None]:
    """Let no gallery in the folder get another name meanwhile; Overloaded where one is getting it for long.

    SQLite opens a gallery's files one after the other, by name: they have to be of one gallery. Where the
    folder cannot be locked, no name in it is changed by us either.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            busy = f"a gallery in {folder} is getting another name and does not end; try again later"
            stack.enter_context(_held(folder, fcntl.LOCK_SH, busy))
        yield


@contextmanager
def names_change(folder: Path) -> Iterator[None]:
    """Hold the names in a folder alone, to change one; open and close no gallery in it meanwhile.

    Raises:
        Overloaded: Galleries were being opened all the time.
    """
    with ExitStack() as stack:
        try:
            busy = f"the names in {folder} are in use without a pause; try again later"
            stack.enter_context(_held(folder, fcntl.LOCK_EX, busy))
        except OSError as error:
            raise disk_error(error, f"the names in {folder}") from error
        yield


@contextmanager
def in_the_making(folder: Path) -> Iterator[None]:
    """Show others that a folder is no leftover."""
    with _held(folder, fcntl.LOCK_EX, f"the folder {folder} is in use without a pause; try again later"):
        yield


def is_in_the_making(folder: Path) -> bool:
    """Tell whether a living process holds a folder by `in_the_making`."""
    try:
        with _held(folder, fcntl.LOCK_EX, "", timeout=0.0):
            return False
    except Overloaded:
        return True


@contextmanager
def _held(folder: Path, kind: int, busy: str, *, timeout: float | None = None) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + (_MOVE if timeout is None else timeout)
        _acquire(descriptor, kind, busy, deadline=deadline, pause=_SHORT_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int,
    kind: int,
    busy: str,
    *,
    deadline: float,
    pause: float,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise Overloaded(busy, retry_after=5.0) from error
        waiting()
        time.sleep(pause)
