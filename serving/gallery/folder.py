"""The folder of a gallery: how it comes, goes, and gets another name, and what a crash leaves of that.

Making happens in `.<name>.new-<token>`, dropping in `.<name>.dropped-<token>`, both beside the gallery and
turned into it, or from it, by one rename. Two galleries exchange their names in one step, so the one served
before lies under the other's name. The one that takes a name notes first whose it was: by that note it is
given back, one switch at a time.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from serving.errors import AlreadyExists, InvalidArgument, Mismatch, NotFound, Overloaded, Unavailable
from serving.gallery.disk import disk_error, gallery_error, make_folder, sync
from serving.gallery.lock import alone, folder_held, names_change
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store

__all__ = ["check_path", "claimed", "drop_gallery", "give_back_name", "made_aside", "sweep", "take_name"]

_LEFTOVER = re.compile(r"\.[a-z0-9][a-z0-9_.-]{0,63}\.(new|dropped)-[0-9a-f]{8}")
_STALE = 60.0  # seconds from when on one that nobody holds is a dead one's; it is held within milliseconds
_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def check_path(path: Path) -> None:
    """Raise InvalidArgument for a path that FAISS cannot open: one that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the path {str(path)!a} of galleries is not valid UTF-8, and FAISS opens no other; rename it"
        ) from error


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """Give a folder to make a gallery in; when the block ends it is at `path`, complete, or it is gone.

    AlreadyExists tells that there is something at `path`.
    """
    aside = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
    try:
        with suppress(FileNotFoundError, NotADirectoryError):  # what was there may go in this moment
            if os.listdir(path):
                raise _taken(path)
        make_folder(path.parent)
        aside.mkdir()
        try:
            with folder_held(aside, f"the folder {aside} is in use without a pause; try again later"):
                yield aside
                for file in aside.iterdir():
                    sync(file)
                sync(aside)
                aside.rename(path)  # fails where a folder that is not empty came first
            sync(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if _is_taken(path, error):
            raise _taken(path) from error
        raise disk_error(error, f"the gallery {path}") from error


@contextmanager
def claimed(gallery: Path, work: str) -> Iterator[Path]:
    """Do some work on a gallery's name as the only process; yields a folder for it, which is empty.

    Overloaded tells that another one does that work.
    """
    folder = gallery.with_name(f".{gallery.name}.{work}")
    busy = f"another crossbatch gallery {work} {gallery.name} is running in {gallery.parent}; one is enough"
    with ExitStack() as held:
        try:
            make_folder(folder)
            held.enter_context(folder_held(folder, busy, timeout=0.0))
            for left in folder.iterdir():  # by a crash
                left.unlink()
        except OSError as error:
            raise disk_error(error, f"the folder {folder}") from error
        yield folder


def drop_gallery(path: Path) -> None:
    """Remove a gallery; its name is free at once. NotFound where somebody else was faster."""
    aside = path.with_name(f".{path.name}.dropped-{secrets.token_hex(4)}")
    try:
        with names_change(path.parent):
            path.rename(aside)  # one step: never half a gallery under the name
    except OSError as error:
        raise gallery_error(error, path) from error
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what crashes left in a folder of galleries; what cannot be removed stays."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            found = _LEFTOVER.fullmatch(path.name)
            with suppress(OSError):  # another process was faster, or may do what this one may not
                if found and path.is_dir() and (found[1] == "dropped" or _is_stale(path)):
                    shutil.rmtree(path, ignore_errors=True)


def take_name(path: Path, other: Path, *, timeout: float) -> None:
    """Let the gallery at `other` have the name of `path`; a gallery that has it gets the other's name.

    AlreadyExists tells that it was switched already, as a second time would undo it, or that what has the
    name is no gallery; Overloaded, that somebody works on one of them for longer than `timeout` seconds.
    """
    if path == other:
        raise InvalidArgument(f"the gallery {path.name} has that name already; give that of another")
    if not (path / FILE_NAME).is_file():
        _take_free_name(path, other, timeout)
        return
    with _held([path, other], timeout) as (current, coming):
        if _previous(current) == (other.name, coming.meta.id):
            raise AlreadyExists(
                f"the gallery {path.name} has been switched with {other.name} already; "
                f"to undo that, use rollback {path.name}"
            )
        with coming.write() as writer:
            writer.name_taken(previous_name=other.name, previous_id=current.meta.id)
        _exchange(current, coming)


def give_back_name(path: Path, *, timeout: float) -> Path:
    """Undo the switch by which the gallery at `path` got its name; returns where it lies now."""
    with closing(Store(path / FILE_NAME)) as store:
        name, gallery = _previous(store)
    if name in ("", path.name):  # its own: a switch was broken off before anything changed
        raise NotFound(f"the gallery {path.name} did not get its name by a switch; there is nothing to undo")
    other = path.with_name(name)
    if not (other / FILE_NAME).is_file():
        raise NotFound(f"the gallery that was {path.name} before lay at {other}, and is gone")
    with _held([path, other], timeout) as (current, before):
        if _previous(current) != (name, gallery):
            raise Overloaded(f"the gallery {path.name} was switched in this moment; look, and try again")
        if before.meta.id != gallery:
            raise Mismatch(
                f"the gallery {name} is not the one that was {path.name} before; to serve it all the same, "
                f"use switch {path.name} {name}"
            )
        _exchange(current, before)
    return other


def _take_free_name(path: Path, other: Path, timeout: float) -> None:
    with _held([other], timeout) as (coming,), coming.write() as writer:
        writer.name_taken(previous_name="", previous_id="")  # an earlier switch was of another name
        try:
            with names_change(path.parent):
                other.rename(path)  # fails where a folder that is not empty came first
                sync(path.parent)
        except OSError as error:
            if _is_taken(path, error):
                raise _taken(path) from error
            raise gallery_error(error, other) from error


@contextmanager
def _held(paths: list[Path], timeout: float) -> Iterator[list[Store]]:
    """Open galleries that nobody rebuilds or renames meanwhile; `timeout` is for all of them together."""
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        for path in sorted(paths):  # all in one order, so that no two wait for each other
            try:
                stack.enter_context(alone(path, deadline - time.monotonic()))
            except OSError as error:
                raise gallery_error(error, path) from error
        yield [stack.enter_context(closing(Store(path / FILE_NAME))) for path in paths]


def _previous(store: Store) -> tuple[str, str]:
    with store.read() as reader:
        state = reader.state()
    return state.previous_name, state.previous_id


def _exchange(first: Store, second: Store) -> None:
    """Exchange the folders of two galleries while nobody writes to either, or opens one."""
    one, other = first.path.parent, second.path.parent
    with first.write(), second.write():
        try:
            with names_change(one.parent):
                exchange_names(one, other)
                sync(one.parent)
        except FileNotFoundError as error:
            raise NotFound(f"{one.name} or {other.name} is gone; the gallery was dropped") from error
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                raise Unavailable(
                    f"the file system of {one} cannot exchange two folders in one step ({error.strerror}); "
                    "keep the galleries on a local one (ext4, XFS, Btrfs, tmpfs, APFS)"
                ) from error
            raise disk_error(error, f"the names of {one} and {other}") from error


def exchange_names(first: Path, second: Path) -> None:
    """Give two folders of one file system each other's name at once, for which Python has no call."""
    library = ctypes.CDLL(None, use_errno=True)
    names = ctypes.c_char_p(os.fsencode(first)), ctypes.c_char_p(os.fsencode(second))
    try:
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, _EXCHANGE)
        else:
            failed = library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE)
        number = ctypes.get_errno() if failed else 0
    except AttributeError:
        number = errno.ENOSYS
    if number:
        raise OSError(number, os.strerror(number))


def _taken(path: Path) -> AlreadyExists:
    if (path / FILE_NAME).is_file():
        return AlreadyExists(
            f"there is already a gallery called {path.name}; choose another name, or drop it first"
        )
    return AlreadyExists(f"there is already something at {path} that is no gallery; choose another name")


def _is_taken(path: Path, error: OSError) -> bool:
    """Tell whether a folder could not get a name because something has it, or had it at that moment."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST) or path.exists()


def _is_stale(path: Path) -> bool:
    """Tell whether nobody makes a gallery in a folder any more."""
    if path.stat().st_mtime >= time.time() - _STALE:
        return False
    try:
        with folder_held(path, "", timeout=0.0):
            return True
    except Overloaded:
        return False
