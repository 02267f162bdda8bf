"""How a gallery file may be opened: to write, to read beside a writer, or as a file that nobody changes.

SQLite lets readers see writers' latest by a file of shared memory (`-shm`) beside the gallery file. Who may
write to the folder makes it where it is not; who may only read needs one that is there, which is so for as
long as somebody who may write has the gallery open.

On a file system that is itself read-only (a container's `:ro` mount) and without that file, the gallery is
settled and is read as it stands. SQLite then takes no lock and looks for no change, so that is done here: by
the sizes, times and inode of the file, before and after each transaction. What it cannot notice is a change
in place that keeps the size and falls into the same tick of the file system's clock (some milliseconds).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from serving.errors import NotFound, Unavailable

__all__ = ["Access", "access_to", "gone", "identity_of", "is_writable"]


@dataclass(frozen=True, slots=True)
class Access:
    """A way to open a file; two that differ must not share a connection."""

    mode: str
    """The parameters of SQLite's URI."""
    stamp: tuple[int, ...] = ()
    """What shows a change of a settled file; empty where SQLite itself sees to it."""


def is_writable(path: Path) -> bool:
    """Tell whether this process may write to a file and to its folder."""
    return os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)


def access_to(path: Path, *, writable: bool) -> Access:
    """Return how a gallery file is opened as things stand now.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It cannot be looked at.
    """
    if writable:
        return Access("mode=rw")
    if not os.statvfs(path).f_flag & os.ST_RDONLY or path.with_name(f"{path.name}-shm").exists():
        return Access("mode=ro")
    journal = path.with_name(f"{path.name}-wal")
    if journal.exists() and journal.stat().st_size:
        return Access("mode=ro")  # a copy of a gallery with writes under way: SQLite says what is amiss
    found = path.stat()
    return Access(
        "mode=ro&immutable=1",
        (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns),
    )


def identity_of(path: Path) -> tuple[int, int]:
    """Return the device and inode of the file that is at a path now.

    Raises:
        NotFound: There is none.
        Unavailable: It cannot be looked at.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise gone(path, error) from error
    return found.st_dev, found.st_ino


def gone(path: Path, error: OSError) -> NotFound | Unavailable:
    """Return what a user reads when a gallery file that was open cannot be looked at."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"the gallery file {path} is gone; it was dropped while it was open")
    return Unavailable(f"the gallery file {path} cannot be read ({error.strerror}); check the disk")
