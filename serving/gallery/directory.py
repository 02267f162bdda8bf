"""A folder of galleries, one sub-folder each, opened when first asked for."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from serving.errors import InvalidArgument, NotFound, Unavailable
from serving.gallery.at_hand import NotAtHand
from serving.gallery.folder import check_path, drop_gallery, sweep
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.generation import give_back_name, take_free_name, take_name
from serving.gallery.handles import Handles
from serving.gallery.index.index import require_faiss
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Replaced

__all__ = ["MOST_OPEN", "GalleryDirectory", "check_name", "split_path"]

MOST_OPEN = 64  # each holds three files or more, and in memory what is newer than its index
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_SHOWN = 10
# Seconds before a call whose gallery was switched meanwhile is tried anew.
_PAUSES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)

T = TypeVar("T")


def check_name(name: str) -> str:
    """Return `name` if a gallery can have it; what passes is a single, visible folder name.

    Raises:
        InvalidArgument: It cannot.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"the name of a gallery must be a string, found {type(name).__name__}")
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidArgument(
            f"{name[:80]!r} cannot name a gallery; use 1 to 64 of a-z, 0-9, '_', '-' and '.', "
            "a letter or digit first, and no '..'"
        )
    return name


def split_path(path: Path) -> tuple[Path, str]:
    """Return the folder of galleries and the name that the path of one gallery stands for.

    Raises:
        InvalidArgument: The last part cannot name a gallery.
    """
    return path.parent, check_name(path.name)


class GalleryDirectory:
    """The galleries of a folder; every method may be called from several threads at once.

    Each gallery is opened on its own: one that is damaged raises its error when it is asked for, and the
    others are served. One that another process dropped or replaced is noticed the next time. So many are
    kept open at most; the one not asked for longest goes, and works on for those who still hold it.
    """

    def __init__(
        self,
        path: Path,
        *,
        policy: RebuildPolicy | None = None,
        device: str = "cpu",
        most_open: int = MOST_OPEN,
    ) -> None:
        """Keep the path, which need not exist until a gallery is created, and remove what crashes left in it.

        Raises:
            NotFound: `path` is a file.
            InvalidArgument: It is not UTF-8.
            BadSetting: FAISS is not installed, or there is no such device to search on.
        """
        require_faiss(device)
        check_path(path)
        if path.exists() and not path.is_dir():
            raise NotFound(f"{path} is a file; expected the folder that holds the galleries")
        self.path = path
        self._policy = policy
        self._device = device
        self._handles = Handles(path, most=most_open)
        sweep(path)

    def names(self) -> list[str]:
        """Return the names of the galleries there, sorted, damaged ones included.

        Raises:
            Unavailable: The folder cannot be read.
        """
        try:
            found = [entry.name for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"the folder {self.path} cannot be read: {error.strerror}") from error
        return sorted(
            name
            for name in found
            if _NAME.fullmatch(name) and ".." not in name and (self.path / name / FILE_NAME).is_file()
        )

    def open_names(self) -> list[str]:
        """Return the names of the galleries that are open, the one not asked for longest first."""
        return self._handles.names()

    def path_of(self, name: str) -> Path:
        """Return the folder of a gallery, a damaged one too.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none; the message lists those there are.
        """
        path = self.path / check_name(name)
        if not (path / FILE_NAME).is_file():
            raise self._missing(name)
        return path

    def get(self, name: str) -> Gallery:
        """Return the gallery of that name, open; do not close it.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none; the message lists those there are.
            BadArtifact: It is damaged, or of a newer format.
            ReadOnly: This process may not write to it, and nobody has it open who may.
            Unavailable: This directory has been closed.
        """
        check_name(name)
        with self._handles.turn(name):
            try:
                status = (self.path / name / FILE_NAME).stat()
            except OSError as error:
                self._handles.forget(name)
                raise self._missing(name) from error
            known = self._handles.known(name, (status.st_dev, status.st_ino))
            if known is not None:
                return known
            self._handles.forget(name)
            return self._handles.keep(
                name, Gallery.open(self.path / name, policy=self._policy, device=self._device)
            )

    def at_once(self, name: str, work: Callable[[Gallery], T]) -> T:
        """Return what `work` does with the gallery of that name, which is open already; waits for nobody.

        Raises:
            NotAtHand: It is not open, or another took its name; `using` does what is needed.
            CrossbatchError: What `work` raises.
        """
        try:
            status = os.stat(os.path.join(self.path, check_name(name), FILE_NAME))  # quicker than by Path
        except OSError as error:
            raise NotAtHand from error
        known = self._handles.known(name, (status.st_dev, status.st_ino))
        if known is None:
            raise NotAtHand
        try:
            return work(known)
        except Replaced as error:
            raise NotAtHand from error

    def create(
        self,
        name: str,
        *,
        model_name: str,
        fingerprint: str,
        dimension: int,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float = 0.99,
    ) -> Gallery:
        """Make a new, empty gallery, as `Gallery.create` does, and return it open; do not close it.

        Raises:
            InvalidArgument: Nothing can have that name, or a number is out of range.
            AlreadyExists: The name is taken.
            ReadOnly: The folder cannot be written.
            Overloaded: The disk is full.
        """
        check_name(name)
        sweep(self.path)
        with self._handles.turn(name):
            gallery = Gallery.create(
                self.path / name,
                model_name=model_name,
                fingerprint=fingerprint,
                dimension=dimension,
                thumbnail_side=thumbnail_side,
                index=index,
                recall=recall,
                policy=self._policy,
                device=self._device,
            )
            self._handles.forget(name)
            return self._handles.keep(name, gallery)

    def using(self, name: str, work: Callable[[Gallery], T]) -> T:
        """Return what `work` does with the gallery of that name.

        Where another gallery took the name meanwhile, `work` is begun anew with that one: it must not have
        done anything but through its gallery.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none.
            Unavailable: It got another name again and again, or this directory has been closed.
            CrossbatchError: What `get` and `work` raise.
        """
        for pause in _PAUSES:
            try:
                return work(self.get(name))
            except Replaced:
                time.sleep(pause)
        return work(self.get(name))

    def switch(self, name: str, other: str, *, timeout: float = 60.0) -> None:
        """Let the gallery `other` have the name `name`, at once; the one that had it gets the name `other`.

        Args:
            name: What is served; if there is no such gallery, `other` just gets that name.
            other: A gallery of this folder.
            timeout: Seconds to wait for a rebuild or another switch of either.

        Raises:
            InvalidArgument: Nothing can have that name, or the names are alike.
            NotFound: There is no gallery `other`.
            AlreadyExists: It was done already; a second time would undo it.
            BadArtifact: One of them is damaged.
            ReadOnly: The folder or one of the galleries cannot be written.
            Overloaded: One of them was being rebuilt or written to for too long.
            Unavailable: The file system cannot do it.
        """
        path, aside = self.path / check_name(name), self.path_of(other)
        if (path / FILE_NAME).is_file():
            take_name(path, aside, timeout=timeout)
        else:
            take_free_name(path, aside, timeout=timeout)

    def rollback(self, name: str, *, timeout: float = 60.0) -> str:
        """Undo the switch by which the gallery got its name.

        Returns:
            The name that it has now: that of the gallery which has `name` again.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none, it was never switched to, or the one before it was dropped.
            Mismatch: Another gallery lies where that one was.
            BadArtifact: One of them is damaged.
            ReadOnly: The folder or one of the galleries cannot be written.
            Overloaded: One of them was being rebuilt or written to for too long.
            Unavailable: The file system cannot do it.
        """
        return give_back_name(self.path_of(name), timeout=timeout).name

    def drop(self, name: str) -> None:
        """Remove a gallery, a damaged one too; its name is free at once.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none.
            ReadOnly: The folder cannot be written.
            Overloaded: Galleries of the folder were being opened all the time.
            Unavailable: The disk fails.
        """
        check_name(name)
        sweep(self.path)
        with self._handles.turn(name):
            path = self.path_of(name)
            self._handles.forget(name)
            drop_gallery(path)

    def close(self) -> None:
        """Close every gallery; calls that are running still end well."""
        self._handles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _missing(self, name: str) -> NotFound:
        names = self.names()
        shown = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        )
        return NotFound(f"there is no gallery {name!r} in {self.path}; it holds {shown or 'none'}")
