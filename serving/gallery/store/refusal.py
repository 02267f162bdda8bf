"""What a user reads when SQLite refuses: the table from its result codes to our errors."""

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from serving.errors import Overloaded, ReadOnly, Unavailable
from serving.gallery.disk import TOO_MANY_OPEN, are_descriptors_out, is_full
from serving.gallery.store.damage import damaged

__all__ = ["Code", "code_of", "refusal"]


class Code(IntEnum):
    """SQLite's primary result codes that a user can cause; a released SQLite never changes them."""

    ERROR = 1
    PERM = 3
    BUSY = 5
    LOCKED = 6
    READONLY = 8
    IOERR = 10
    CORRUPT = 11
    FULL = 13
    CANTOPEN = 14
    PROTOCOL = 15
    MISMATCH = 20
    FORMAT = 24
    NOTADB = 26


# The statements are constant and tested: that one fails as such (no such column, an unsupported file format)
# shows a file that is not as it was made. None stands for text in it that is not UTF-8.
_DAMAGE = (Code.CORRUPT, Code.NOTADB, Code.ERROR, Code.MISMATCH, Code.FORMAT, None)


def code_of(error: Exception) -> int | None:
    """Return the primary result code of an error of SQLite, None where it has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None  # the rest of it is detail


def refusal(error: Exception, path: Path, busy: Callable[[], Exception] | None) -> Exception:
    """Return what is raised in the place of an error of SQLite.

    Args:
        error: What it raised.
        path: The file that it worked on.
        busy: Makes what is raised where another writer was waited for in vain.
    """
    code = code_of(error)
    if code in (Code.BUSY, Code.LOCKED, Code.PROTOCOL):
        return busy() if busy else Overloaded(f"the gallery file {path} is locked; try again")
    if code in _DAMAGE:
        return damaged(path, error)
    if code in (Code.READONLY, Code.PERM):
        return ReadOnly(f"the gallery file {path} cannot be written ({error}); check its permissions")
    if code in (Code.CANTOPEN, Code.IOERR) and are_descriptors_out():
        return Unavailable(f"the gallery file {path} cannot be opened: {TOO_MANY_OPEN}")
    if code == Code.CANTOPEN:
        return Unavailable(f"the gallery file {path} cannot be opened ({error}); check its permissions")
    if code == Code.FULL or (code == Code.IOERR and is_full(path.parent)):
        return Overloaded(
            f"the disk that holds the gallery file {path} is full, and nothing was stored; free some space",
            retry_after=30.0,
        )
    if code == Code.IOERR:
        return Unavailable(f"the gallery file {path} cannot be read or written ({error}); check the disk")
    return error  # a bug of ours
