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
    """Return the checksum of a file, 64 hexadecimal digits.

    Raises:
        OSError: The file cannot be read, or it is no regular one.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # looked at first: to open a pipe would wait for a writer
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(descriptor).st_size, _BLOCK)
        whole = hashlib.sha256()
        with ThreadPoolExecutor(usable_cores()) as threads:
            for digest in threads.map(lambda start: _block_digest(descriptor, start), starts):
                whole.update(digest)
        return whole.hexdigest()
    finally:
        os.close(descriptor)


def _block_digest(descriptor: int, start: int) -> bytes:
    digest = hashlib.sha256()
    for offset in range(start, start + _BLOCK, _PIECE):
        digest.update(os.pread(descriptor, _PIECE, offset))
    return digest.digest()
