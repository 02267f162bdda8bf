"""The galleries of a folder that are open, by name."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from serving.errors import Overloaded, Unavailable
from serving.gallery.gallery import Gallery

__all__ = ["Handles"]

_PATIENCE = 10.0  # seconds to wait for whoever opens, makes or drops the same gallery


class Handles:
    """So many open galleries at most; every method may be called from several threads at once.

    The one not asked for longest is put to rest: it works on for those who still hold it.
    """

    def __init__(self, path: Path, *, most: int) -> None:
        """Hold none yet, of the galleries in `path`."""
        self._path = path
        self._most = most
        self._guard = threading.Lock()  # of the fields below
        self._open: dict[str, Gallery] = {}  # the one not asked for longest first
        self._retired = WeakSet[Gallery]()
        # So that opening a large one holds up no other: a lock, and how many hold or await it, by name.
        self._turns: dict[str, tuple[threading.Lock, int]] = {}
        self._closed = False

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Work on one name alone; a name is forgotten with the last who works on it.

        Raises:
            Unavailable: All have been closed.
            Overloaded: Somebody else works on it for too long.
        """
        with self._guard:
            if self._closed:
                raise self._refusal()
            turn, users = self._turns.get(name, (threading.Lock(), 0))
            self._turns[name] = turn, users + 1
        try:
            if not turn.acquire(timeout=_PATIENCE):
                raise Overloaded(
                    f"the gallery {name} in {self._path} is being opened for a long time; try again",
                    retry_after=1.0,
                )
            try:
                yield
            finally:
                turn.release()
        finally:
            with self._guard:
                users = self._turns.pop(name)[1] - 1
                if users:
                    self._turns[name] = turn, users

    def names(self) -> list[str]:
        """Return the names of those that are open, the one not asked for longest first."""
        with self._guard:
            return list(self._open)

    def known(self, name: str, identity: tuple[int, int]) -> Gallery | None:
        """Return the open gallery of a name if it is still the one whose file has that device and inode."""
        with self._guard:
            gallery = self._open.get(name)
            if gallery is None or gallery.identity != identity:
                return None
            self._open[name] = self._open.pop(name)  # the last to go
            return gallery

    def keep(self, name: str, gallery: Gallery) -> Gallery:
        """Take an open gallery, and return it.

        Raises:
            Unavailable: All have been closed, and so is this one.
        """
        with self._guard:
            closed, idle = self._closed, list[Gallery]()
            if not closed:
                self._open[name] = gallery
                while len(self._open) > self._most:
                    idle.append(self._open.pop(next(iter(self._open))))
                self._retired.update(idle)
        for each in idle:
            each.retire()
        if not closed:
            return gallery
        gallery.close()
        raise self._refusal()

    def forget(self, name: str) -> None:
        """Close the gallery of a name, if it is open."""
        with self._guard:
            gallery = self._open.pop(name, None)
        if gallery is not None:
            gallery.close()

    def close(self) -> None:
        """Close every gallery; calls that are running still end well."""
        with self._guard:
            self._closed = True
            galleries = [*self._open.values(), *self._retired]
            self._open.clear()
        for gallery in galleries:
            gallery.close()

    def _refusal(self) -> Unavailable:
        return Unavailable(f"the galleries in {self._path} have been closed; open the folder again")
