"""Files that are written whole or not at all: aside, flushed, then renamed; and locked folders."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from serving.errors import CrossbatchError

__all__ = ["aside_of", "locked", "replacing", "write_file"]


def write_file(path: Path, contents: bytes) -> None:
    """Replace a file in one step, or leave the previous one as it is, with a `CrossbatchError`."""
    with replacing(path) as aside:
        aside.write_bytes(contents)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the place for a file's new contents, which replace the file in one step when the block ends well.

    Raises:
        CrossbatchError: If it cannot be written, the disk being full for one.
    """
    aside = aside_of(path)
    try:
        if path.exists() and not path.is_file():  # a device, for one
            raise OSError(0, "something is there that is no plain file", str(path))
        yield aside
        with aside.open("r+b") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CrossbatchError(
            f"{path} cannot be written ({(error.strerror or str(error)).lower()}); a previous one is"
            " unharmed: make room or choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def aside_of(path: Path) -> Path:
    """Tell where a file is written before it has its name, over what a killed process left there."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep every other process that asks out of a folder, until the block or the process ends.

    Raises:
        BlockingIOError: If another process has it, and this one does not `wait`.
    """
    if os.name != "posix":  # where folders cannot be locked
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)  # and with it the lock, as at whatever end of the process


def _sync_folder(path: Path) -> None:
    """Flush a rename to the disk, where the system lets a folder be opened."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
