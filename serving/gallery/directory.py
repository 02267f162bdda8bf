"""A folder of galleries, one sub-folder each, opened when first asked for."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar, Unpack
from weakref import WeakSet

from serving.errors import InvalidArgument, NotFound, Overloaded, Unavailable
from serving.gallery.folder import check_path, drop_gallery, give_back_name, sweep, take_name
from serving.gallery.gallery import Gallery, MadeFor, RebuildPolicy
from serving.gallery.index.index import require_faiss
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Replaced

__all__ = ["MOST_OPEN", "GalleryDirectory", "check_name", "no_gallery"]

MOST_OPEN = 64  # each holds three files or more, and in memory what is newer than its index
_NAME = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9_.-]{0,63}")
_SHOWN = 10
_PAUSES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # seconds until a call is tried anew after a switch
_PATIENCE = 10.0  # seconds to wait for whoever opens, makes or drops the same gallery
_TURNS = 64  # locks that the names share

T = TypeVar("T")


def check_name(name: str) -> str:
    """Return `name`, a single visible folder name, or raise InvalidArgument if no gallery can have it."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:80]!r} cannot name a gallery; use 1 to 64 of a-z, 0-9, '_', '-' and '.', "
            "a letter or digit first, and no '..'"
        )
    return name


def no_gallery(name: str, where: str, names: Sequence[str]) -> NotFound:
    """Return what a user reads where a place, which holds `names`, has no gallery of that name."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN]) or "none"
    return NotFound(f"there is no gallery {name!r} {where}; it holds {shown}{more}")


class GalleryDirectory:
    """The galleries of a folder; every method may be called from several threads at once.

    Each is opened on its own: one that is damaged raises its error when it is asked for, and the others are
    served. One that another process dropped or replaced is noticed the next time. So many are kept open at
    most; the one not asked for longest is put to rest, and works on for those who still hold it.

    A method that takes a name raises InvalidArgument where nothing can have it, and NotFound.
    """

    def __init__(self, path: Path, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> None:
        """Keep the path, which need not exist until a gallery is created, and remove what crashes left in it.

        BadSetting tells that FAISS is not installed, or that there is no such device ("cpu", "cuda").
        """
        require_faiss(device)
        check_path(path)
        if path.exists() and not path.is_dir():
            raise NotFound(f"{path} is a file; expected the folder that holds the galleries")
        self.path = path
        self._policy = policy
        self._device = device
        self._guard = threading.Lock()  # of the three fields below
        self._open: dict[str, Gallery] = {}  # the one not asked for longest first
        self._retired = WeakSet[Gallery]()
        self._closed = False
        self._turns = [threading.Lock() for _ in range(_TURNS)]
        sweep(path)

    def names(self) -> list[str]:
        """Return the names of the galleries there, sorted, damaged ones included."""
        try:
            found = [entry.name for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"the folder {self.path} cannot be read: {error.strerror}") from error
        return sorted(
            each for each in found if _NAME.fullmatch(each) and (self.path / each / FILE_NAME).is_file()
        )

    def open_names(self) -> list[str]:
        """Return the names of the galleries that are open, the one not asked for longest first."""
        with self._guard:
            return list(self._open)

    def path_of(self, name: str) -> Path:
        """Return the folder of a gallery, a damaged one too."""
        path = self.path / check_name(name)
        if not (path / FILE_NAME).is_file():
            raise no_gallery(name, f"in {self.path}", self.names())
        return path

    def get(self, name: str) -> Gallery:
        """Return the gallery of that name, open, as `Gallery.open` does; do not close it."""
        if known := self._known(name):
            return known
        with self._turn(name):
            if known := self._known(name):
                return known
            self._forget(name)
            path = self.path_of(name)
            return self._keep(name, Gallery.open(path, policy=self._policy, device=self._device))

    def create(self, name: str, **made_for: Unpack[MadeFor]) -> Gallery:
        """Make a new, empty gallery, as `Gallery.create` does, and return it open; do not close it."""
        check_name(name)
        sweep(self.path)
        with self._turn(name):
            gallery = Gallery.create(self.path / name, policy=self._policy, device=self._device, **made_for)
            self._forget(name)
            return self._keep(name, gallery)

    def using(self, name: str, work: Callable[[Gallery], T]) -> T:
        """Return what `work` does with a gallery, begun anew where another took its name meanwhile."""
        for pause in _PAUSES:
            try:
                return work(self.get(name))
            except Replaced:
                time.sleep(pause)
        return work(self.get(name))

    def switch(self, name: str, other: str, *, timeout: float = 60.0) -> None:
        """Let the gallery `other` have the name `name`, at once; one that had it gets the name `other`."""
        check_name(name)
        take_name(self.path / name, self.path_of(other), timeout=timeout)

    def rollback(self, name: str, *, timeout: float = 60.0) -> str:
        """Undo the switch by which the gallery got its name; returns the name that it has now."""
        return give_back_name(self.path_of(name), timeout=timeout).name

    def drop(self, name: str) -> None:
        """Remove a gallery, a damaged one too; its name is free at once."""
        check_name(name)
        sweep(self.path)
        with self._turn(name):
            path = self.path_of(name)
            self._forget(name)
            drop_gallery(path)

    def close(self) -> None:
        """Close every gallery; calls that are running still end well."""
        with self._guard:
            self._closed = True
            galleries = [*self._open.values(), *self._retired]
            self._open.clear()
        for gallery in galleries:
            gallery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Open, make or drop a gallery alone; opening a large one seldom holds up another."""
        self._refuse_closed()
        turn = self._turns[hash(name) % _TURNS]
        if not turn.acquire(timeout=_PATIENCE):
            busy = f"the gallery {name} in {self.path} is being opened for a long time; try again"
            raise Overloaded(busy, retry_after=1.0)
        try:
            yield
        finally:
            turn.release()

    def _known(self, name: str) -> Gallery | None:
        """Return the open gallery of a name if it is still the one that has it."""
        gallery = self._open.get(name)
        if gallery is None:
            return None
        try:
            status = os.stat(os.path.join(self.path, name, FILE_NAME))  # quicker than by Path
        except OSError:
            return None
        if gallery.identity != (status.st_dev, status.st_ino):
            return None
        with self._guard:
            if self._open.get(name) is gallery:
                self._open[name] = self._open.pop(name)  # the last to go
        return gallery

    def _keep(self, name: str, gallery: Gallery) -> Gallery:
        with self._guard:
            self._open[name] = gallery
            idle = [self._open.pop(each) for each in list(self._open)[:-MOST_OPEN]]
            self._retired.update(idle)
        for each in idle:
            each.retire()
        if self._closed:  # meanwhile
            self.close()
        self._refuse_closed()
        return gallery

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Unavailable(f"the galleries in {self.path} have been closed; open the folder again")

    def _forget(self, name: str) -> None:
        with self._guard:
            gallery = self._open.pop(name, None)
        if gallery is not None:
            gallery.close()
