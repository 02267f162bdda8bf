"""What the disk does to a gallery: bringing files to it, and saying so when it refuses."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from serving.errors import CrossbatchError, NotFound, Overloaded, ReadOnly, Unavailable

__all__ = [
    "TOO_MANY_OPEN", "are_descriptors_out", "disk_error", "gallery_error", "is_full", "make_folder",
    "sync", "written_aside",
]  # fmt: skip

TOO_MANY_OPEN = (
    "this process or the machine has as many files open as it may; raise the limit (`ulimit -n`, or "
    "LimitNOFILE= of systemd)"
)

_OUT = (errno.EMFILE, errno.ENFILE)
_A_FEW = 4  # files that SQLite opens together: one that fails may have let go of some of them
_LEAST = 1 << 20  # bytes; file systems keep some back, so a full one is seldom at zero


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a path to write a file to, and put what was written at `path` when the block ends, on disk.

    The file appears whole or not at all, and where the block fails nothing is left.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are not there, and bring their entries to the disk."""
    if path.exists():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)  # another process may be making it too
    sync(path.parent)


def is_full(folder: Path) -> bool:
    """Tell whether the file system of a folder has no room; libraries that fail to write do not say why."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _LEAST


def are_descriptors_out() -> bool:
    """Tell whether no further files can be opened; libraries that fail to open one do not say why."""
    with ExitStack() as opened:
        try:
            for _ in range(_A_FEW):
                opened.enter_context(open(os.devnull, "rb"))
        except OSError as error:
            return error.errno in _OUT
    return False


def disk_error(error: OSError, what: str) -> CrossbatchError:
    """Return what a user reads when `what` could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Overloaded(f"{what} cannot be written: the disk is full; free some space", retry_after=30.0)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ReadOnly(
            f"{what} cannot be written: {(error.strerror or str(error)).lower()}; make it writable"
        )
    if error.errno in _OUT:
        return Unavailable(f"{what} cannot be written: {TOO_MANY_OPEN}")
    return Unavailable(f"{what} cannot be written ({error.strerror or error}); check permissions and disk")


def gallery_error(error: OSError, path: Path) -> CrossbatchError:
    """Return what a user reads when the folder of a gallery could not be changed, or is gone."""
    if isinstance(error, FileNotFoundError):
        return NotFound(
            f"there is no gallery {path.name} in {path.parent} any more; it was dropped or got another name"
        )
    return disk_error(error, f"the gallery {path}")
