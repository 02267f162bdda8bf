"""The checksum of a large file, made by every core: SHA-256 over the SHA-256 of each of its blocks."""

import errno
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving.cores import usable_cores

__all__ = ["file_checksum"]

_BLOCK = 1 << 24  # bytes
_PIECE = 1 << 20  # bytes read at once: it stays in the core's cache until it is hashed


def file_checksum(path: Path) -> str:
    """Return the checksum of a regular file, 64 hexadecimal digits."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # looked at first: to open a pipe would wait for a writer
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file, ThreadPoolExecutor(usable_cores()) as threads:

        def block(start: int) -> bytes:
            digest = hashlib.sha256()
            for offset in range(start, start + _BLOCK, _PIECE):
                digest.update(os.pread(file.fileno(), _PIECE, offset))
            return digest.digest()

        starts = range(0, os.fstat(file.fileno()).st_size, _BLOCK)
        return hashlib.sha256(b"".join(threads.map(block, starts))).hexdigest()
