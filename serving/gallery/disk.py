"""Bringing files to the disk, their checksums, and saying so when the disk refuses."""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from serving.cores import usable_cores
from serving.errors import AlreadyExists, CrossbatchError, NotFound, Overloaded, ReadOnly, Unavailable

__all__ = [
    "TOO_MANY_OPEN", "are_descriptors_out", "disk_error", "file_checksum", "gallery_error", "is_full",
    "make_folder", "rewrite", "stamp_of", "sync", "written_aside", "written_once",
]  # fmt: skip

TOO_MANY_OPEN = (
    "this process or the machine has as many files open as it may; raise the limit (`ulimit -n`, or "
    "LimitNOFILE= of systemd)"
)

_OUT = (errno.EMFILE, errno.ENFILE)
_A_FEW = 4  # files that SQLite opens together: one that fails may have let go of some of them
_LEAST = 1 << 20  # bytes; file systems keep some back, so a full one is seldom at zero
_STALE = 3600.0  # seconds until what a crash has left is removed
_HASHED = 1 << 24  # bytes of a file that one core takes at a time, ...
_PIECE = 1 << 20  # ... so many read at once: they stay in its cache until they are hashed


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
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    sync(path.parent)


def rewrite(path: Path, text: str) -> None:
    """Put a text into a file that one process at a time writes; it has the text before or this one, whole."""
    try:
        for left in path.parent.glob(f"{path.name}.*.tmp"):  # by a crash
            left.unlink(missing_ok=True)
        with written_aside(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, f"the file {path}") from error


@contextmanager
def written_once(file: Path) -> Iterator[Path]:
    """Give a path to write a file to; when the block ends it is at `file`, on disk, unless one is there."""
    taken = f"there is already something at {file}; choose another name, or remove it first"
    if not file.parent.is_dir():
        raise NotFound(f"there is no folder {file.parent} to write {file.name} to; make it first")
    for path in file.parent.glob(f".{file.name}.new-*"):  # what a crash has left
        with suppress(OSError):
            if max(each.stat().st_mtime for each in (path, *path.iterdir())) < time.time() - _STALE:
                shutil.rmtree(path)
    if os.path.lexists(file):
        raise AlreadyExists(taken)
    folder = file.with_name(f".{file.name}.new-{secrets.token_hex(4)}")
    aside = folder / file.name
    try:
        folder.mkdir(0o700)
        yield aside
        aside.chmod(aside.stat().st_mode & 0o644)
        sync(aside)
        _put(aside, file)
        sync(file.parent)
    except FileExistsError as error:
        raise AlreadyExists(taken) from error
    except OSError as error:
        raise disk_error(error, f"the file {file}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(aside: Path, file: Path) -> None:
    """Give a file its name, never that of another file."""
    try:
        os.link(aside, file)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))  # nobody else takes it now
        os.replace(aside, file)


def file_checksum(path: Path) -> str:
    """Return SHA-256 over the SHA-256 of each block of a regular file, made by every core, as hex digits."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # looked at first: to open a pipe would wait for a writer
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file, ThreadPoolExecutor(usable_cores()) as threads:

        def block(start: int) -> bytes:
            digest = hashlib.sha256()
            for offset in range(start, start + _HASHED, _PIECE):
                digest.update(os.pread(file.fileno(), _PIECE, offset))
            return digest.digest()

        starts = range(0, os.fstat(file.fileno()).st_size, _HASHED)
        return hashlib.sha256(b"".join(threads.map(block, starts))).hexdigest()


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
        return ReadOnly(f"{what} cannot be written: {str(error.strerror).lower()}; make it writable")
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


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; nothing while it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
