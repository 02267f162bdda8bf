"""Exchanging the names of two folders in one step, which Python's standard library has no call for."""

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from serving.errors import NotFound, Unavailable
from serving.gallery.disk import disk_error

__all__ = ["exchange"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux, renameat2
_RENAME_SWAP = 2  # macOS, renamex_np
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(first: Path, second: Path) -> None:
    """Give two folders of one file system each other's name at once: at no moment is one missing.

    Raises:
        NotFound: One of them is not there.
        Unavailable: The system or the file system cannot do that, or the disk fails.
        ReadOnly: The folder that holds them cannot be written.
    """
    call = _call(sys.platform)
    failed = errno.ENOSYS if call is None else call(os.fsencode(first), os.fsencode(second))
    if failed in _UNSUPPORTED:
        raise Unavailable(
            f"the file system of {first} cannot exchange two folders in one step ({os.strerror(failed)}); "
            "keep the galleries on a local one (ext4, XFS, Btrfs, tmpfs, APFS)"
        )
    if failed == errno.ENOENT:
        raise NotFound(f"{first.name} or {second.name} is not there any more; the gallery was dropped")
    if failed:
        error = OSError(failed, os.strerror(failed))
        raise disk_error(error, f"the names of {first} and {second}") from error


@cache
def _call(platform: str) -> Callable[[bytes, bytes], int] | None:
    """Return what exchanges two paths and returns the error's number or 0; None where the system has none."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if platform == "darwin":
            swap = library.renamex_np
            swap.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
            return lambda first, second: ctypes.get_errno() if swap(first, second, _RENAME_SWAP) else 0
        rename = library.renameat2
    except AttributeError:
        return None
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return lambda first, second: (
        ctypes.get_errno() if rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) else 0
    )
