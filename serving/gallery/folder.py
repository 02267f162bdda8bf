"""The folder of a gallery: how it comes, goes, and what a crash leaves of either.

Making happens in `.<name>.new-<token>`, dropping in `.<name>.dropped-<token>`, both beside the gallery and
turned into it, or from it, by one rename. Each is locked by who works on it, while he lives.
"""

import errno
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serving.errors import AlreadyExists, InvalidArgument
from serving.gallery.disk import disk_error, gallery_error, make_folder, sync
from serving.gallery.lock import in_the_making, is_in_the_making, names_change
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import create_store

__all__ = ["check_path", "drop_gallery", "is_taken", "made_aside", "make_gallery", "sweep"]

_LEFTOVER = re.compile(r"\.[a-z0-9][a-z0-9_.-]{0,63}\.(new|dropped)-[0-9a-f]{8}")
_STALE = 60.0  # seconds from when on one that nobody holds is a dead one's; it is held within milliseconds


def check_path(path: Path) -> None:
    """Refuse a path that FAISS cannot open.

    Raises:
        InvalidArgument: It is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the path {str(path)!a} of galleries is not valid UTF-8, and FAISS opens no other; rename it"
        ) from error


def make_gallery(
    path: Path,
    *,
    model_name: str,
    fingerprint: str,
    dimension: int,
    thumbnail_side: int,
    index: str,
    recall: float,
) -> None:
    """Make an empty gallery, on disk when this returns; the folder appears complete or not at all.

    Raises:
        AlreadyExists: There is something at `path`.
        ReadOnly: The folder cannot be written.
        Overloaded: The disk is full.
    """
    with made_aside(path) as aside:
        create_store(
            aside / FILE_NAME,
            model_name=model_name,
            fingerprint=fingerprint,
            dimension=dimension,
            thumbnail_side=thumbnail_side,
            index=index,
            recall=recall,
        )


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """Give a folder to make a gallery in; when the block ends it is at `path`, complete, or it is gone.

    Raises:
        AlreadyExists: There is something at `path`.
        ReadOnly: The folder cannot be written.
        Overloaded: The disk is full.
    """
    aside = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
    try:
        if _lies_there(path):
            raise _taken(path)
        make_folder(path.parent)
        aside.mkdir()
        try:
            with in_the_making(aside):
                yield aside
                for file in aside.iterdir():
                    sync(file)
                sync(aside)
                aside.rename(path)  # fails where a folder that is not empty came first
            sync(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if is_taken(path, error):
            raise _taken(path) from error
        raise disk_error(error, f"the gallery {path}") from error


def _lies_there(path: Path) -> bool:
    with suppress(FileNotFoundError):  # it was dropped in this moment
        return path.is_file() or (path.is_dir() and any(path.iterdir()))
    return False


def _taken(path: Path) -> AlreadyExists:
    if (path / FILE_NAME).is_file():
        return AlreadyExists(
            f"there is already a gallery called {path.name}; choose another name, or drop it first"
        )
    return AlreadyExists(f"there is already something at {path} that is no gallery; choose another name")


def is_taken(path: Path, error: OSError) -> bool:
    """Tell whether a folder could not get a name because something has it, or had it at that moment."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST) or path.exists()


def drop_gallery(path: Path) -> None:
    """Remove a gallery; its name is free at once.

    Raises:
        NotFound: Somebody else was faster.
        ReadOnly: The folder cannot be written.
        Unavailable: The disk fails.
    """
    aside = path.with_name(f".{path.name}.dropped-{secrets.token_hex(4)}")
    try:
        with names_change(path.parent):
            path.rename(aside)  # one step: never half a gallery under the name
    except OSError as error:
        raise gallery_error(error, path) from error
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what crashes left in a folder of galleries; what cannot be removed stays.

    A half-made gallery is left alone while somebody makes it, and for a minute, as it may be new; one that
    was dropped is nobody's, and may be removed by several at once.
    """
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    for path in entries:
        found = _LEFTOVER.fullmatch(path.name)
        with suppress(OSError):  # another process was faster, or may do what this one may not
            if found and path.is_dir() and (found[1] == "dropped" or _is_stale(path)):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: Path) -> bool:
    return path.stat().st_mtime < time.time() - _STALE and not is_in_the_making(path)
