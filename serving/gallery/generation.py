"""Generations of a gallery: another takes its name in one step, and gives it back when asked to.

The two exchange their names, so the one served before lies under the other's. The one that takes a name
notes first whose it was: by that note it is given back, one switch at a time, while the gallery is there.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from serving.errors import AlreadyExists, InvalidArgument, Mismatch, NotFound, Overloaded
from serving.gallery.disk import disk_error, gallery_error, sync
from serving.gallery.exchange import exchange
from serving.gallery.folder import is_taken
from serving.gallery.lock import alone, names_change
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store

__all__ = ["give_back_name", "take_free_name", "take_name"]


def take_name(path: Path, other: Path, *, timeout: float) -> None:
    """Let the gallery at `other` have the name of the one at `path`, which gets its name.

    Args:
        path: A gallery.
        other: One beside it.
        timeout: Seconds to wait for a rebuild or switch of either.

    Raises:
        AlreadyExists: It was switched already; a second time would undo it.
        NotFound: One of them is not there.
        ReadOnly: One of them cannot be written.
        Overloaded: Somebody works on one of them for too long.
        Unavailable: The file system cannot do it.
    """
    if path == other:
        raise InvalidArgument(f"the gallery {path.name} has that name already; give that of another")
    with _held([path, other], timeout) as (current, coming):
        if _previous(current) == (other.name, coming.meta.id):
            raise AlreadyExists(
                f"the gallery {path.name} has been switched with {other.name} already; "
                f"to undo that, use rollback {path.name}"
            )
        with coming.write() as writer:
            writer.name_taken(previous_name=other.name, previous_id=current.meta.id)
        _exchange(current, coming)


def take_free_name(path: Path, other: Path, *, timeout: float) -> None:
    """Let the gallery at `other` have the name `path`, which no gallery has.

    Raises:
        AlreadyExists: There is something at `path`.
        NotFound: There is nothing at `other`.
        ReadOnly: It cannot be written.
        Overloaded: Somebody works on it for too long.
        Unavailable: The disk fails.
    """
    with _held([other], timeout) as (coming,), coming.write() as writer:
        writer.name_taken(previous_name="", previous_id="")  # an earlier switch was of another name
        try:
            with names_change(path.parent):
                other.rename(path)  # fails where a folder that is not empty came first
                sync(path.parent)
        except OSError as error:
            if is_taken(path, error):
                what = "is a gallery by now" if (path / FILE_NAME).is_file() else "is no gallery; remove it"
                raise AlreadyExists(f"there is something at {path} that {what}") from error
            raise gallery_error(error, other) from error


def give_back_name(path: Path, *, timeout: float) -> Path:
    """Undo the switch by which the gallery at `path` got its name.

    Returns:
        Where it lies now: where the gallery lay that has the name again.

    Raises:
        NotFound: It did not get its name by a switch, or the gallery before is not there any more.
        Mismatch: Another gallery lies where that one was.
        ReadOnly: One of them cannot be written.
        Overloaded: Somebody works on one of them for too long.
        Unavailable: The file system cannot do it.
    """
    with closing(Store(path / FILE_NAME)) as store:
        name, gallery = _previous(store)
    if name in ("", path.name):  # its own: a switch was broken off before anything changed
        raise NotFound(f"the gallery {path.name} did not get its name by a switch; there is nothing to undo")
    other = path.with_name(name)
    if not (other / FILE_NAME).is_file():
        raise NotFound(
            f"the gallery that was {path.name} before lay at {other} and is gone; it cannot be brought back"
        )
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


@contextmanager
def _held(paths: list[Path], timeout: float) -> Iterator[list[Store]]:
    """Open galleries that nobody rebuilds or renames meanwhile; `timeout` is for all of them together."""
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        for path in sorted(paths):  # all in one order, so that no two wait for each other
            if not (path / FILE_NAME).is_file():
                raise NotFound(f"there is no gallery {path.name} in {path.parent}; check the name")
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
    folders = first.path.parent, second.path.parent
    with first.write(), second.write(), names_change(folders[0].parent):
        exchange(*folders)
        try:
            sync(folders[0].parent)
        except OSError as error:
            raise disk_error(error, f"the folder {folders[0].parent}") from error
