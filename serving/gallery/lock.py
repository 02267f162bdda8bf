"""Locks between processes; each goes with the process that holds it, so a crash leaves none behind.

rebuild.lock        in a gallery: whoever makes its index or gives it another name
the folder itself   shared while a gallery in it is opened, alone while one in it gets another name
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from serving.errors import Overloaded

__all__ = ["alone", "folder_held", "names_change", "names_stay"]

_LOCK_FILE = "rebuild.lock"
_PAUSE = 0.05  # seconds between two attempts
_SHORT_PAUSE = 0.001  # where the lock is held for no longer than that
_MOVE = 10.0  # seconds; opening a gallery file takes a millisecond


@contextmanager
def alone(gallery: Path, timeout: float, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a gallery's lock; while it is held, the gallery keeps its name (but may be dropped).

    Overloaded tells that somebody else held it for more than `timeout` seconds, OSError that the folder
    cannot be written. Meanwhile `waiting` is called again and again; what it raises ends the wait.
    """
    deadline = time.monotonic() + timeout
    busy = f"another rebuild or switch of the gallery {gallery} is running; try again later"
    path = gallery / _LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not _is_locked(descriptor, fcntl.LOCK_EX, busy, deadline):
                waiting()
                time.sleep(_PAUSE)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
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
            stack.enter_context(folder_held(folder, busy, kind=fcntl.LOCK_SH))
        yield


def names_change(folder: Path) -> AbstractContextManager[None]:
    """Hold the names in a folder alone, to change one; open and close no gallery in it meanwhile."""
    return folder_held(folder, f"the names in {folder} are in use without a pause; try again later")


@contextmanager
def folder_held(
    folder: Path, busy: str, *, kind: int = fcntl.LOCK_EX, timeout: float | None = None
) -> Iterator[None]:
    """Hold a folder; Overloaded with the sentence `busy` where others hold it for longer."""
    deadline = time.monotonic() + (_MOVE if timeout is None else timeout)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while not _is_locked(descriptor, kind, busy, deadline):
            time.sleep(_SHORT_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, kind: int, busy: str, deadline: float) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if time.monotonic() >= deadline:
            raise Overloaded(busy, retry_after=5.0) from error
        return False
    return True
