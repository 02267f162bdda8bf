"""A whole file that somebody named: its bytes, read without waiting and up to a limit, and its stamp."""

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_whole", "stamp_of"]

_LEAST = 1 << 16  # bytes that are asked for, as some file systems do not tell a file's size


def read_whole(path: Path, limit: int) -> bytes:
    """Read a regular file; anything else could keep the reader waiting or never end.

    Args:
        path: Of the file, or of a link to it.
        limit: The most bytes that it may have.

    Raises:
        OSError: if it cannot be read, is no regular file (a pipe, a device), or has more bytes.
    """
    # To open a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        data = file.read(min(max(found.st_size, _LEAST), limit) + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes")
    return data


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; nothing while it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
