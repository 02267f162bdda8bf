"""A folder of galleries, one sub-folder each, opened when first asked for."""

import os
import re
import secrets
import shutil
import threading
from pathlib import Path
from typing import Self

from serving.errors import InvalidArgument, NotFound, Unavailable
from serving.gallery.disk import disk_error
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.store import FILE_NAME

__all__ = ["GalleryDirectory", "check_name", "split_path"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_SHOWN = 10


def check_name(name: str) -> str:
    """Return `name` if a gallery can have it; what passes is a single, visible folder name.

    Raises:
        InvalidArgument: It cannot.
    """
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
    others are served. One that another process dropped or replaced is noticed the next time.
    """

    def __init__(self, path: Path, *, policy: RebuildPolicy | None = None) -> None:
        """Keep the path; it need not exist until a gallery is created.

        Raises:
            NotFound: `path` is a file.
        """
        if path.exists() and not path.is_dir():
            raise NotFound(f"{path} is a file; expected the folder that holds the galleries")
        self.path = path
        self._policy = policy
        self._guard = threading.Lock()  # of the fields below
        self._open: dict[str, tuple[tuple[int, int], Gallery]] = {}
        self._turns: dict[str, threading.Lock] = {}  # so that opening a large one holds up no other
        self._closed = False

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

    def get(self, name: str) -> Gallery:
        """Return the gallery of that name, open; do not close it.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none; the message lists those there are.
            BadArtifact: It is damaged, or of a newer format.
            Unavailable: This directory has been closed.
        """
        check_name(name)
        file = self.path / name / FILE_NAME
        with self._turn(name):
            try:
                status = file.stat()
            except OSError as error:
                self._forget(name)
                raise self._missing(name) from error
            identity = (status.st_dev, status.st_ino)
            with self._guard:
                known = self._open.get(name)
            if known is not None and known[0] == identity:
                return known[1]
            self._forget(name)
            return self._keep(name, identity, Gallery.open(self.path / name, policy=self._policy))

    def create(self, name: str, *, model_name: str, fingerprint: str, dimension: int) -> Gallery:
        """Make a new, empty gallery and return it open; do not close it.

        Raises:
            InvalidArgument: Nothing can have that name, or the dimension is out of range.
            AlreadyExists: The name is taken.
            Unavailable: The folder cannot be written.
            Overloaded: The disk is full.
        """
        check_name(name)
        with self._turn(name):
            gallery = Gallery.create(
                self.path / name,
                model_name=model_name,
                fingerprint=fingerprint,
                dimension=dimension,
                policy=self._policy,
            )
            self._forget(name)
            status = (self.path / name / FILE_NAME).stat()
            return self._keep(name, (status.st_dev, status.st_ino), gallery)

    def drop(self, name: str) -> None:
        """Remove a gallery, a damaged one too; its name is free at once.

        Raises:
            InvalidArgument: Nothing can have that name.
            NotFound: There is none.
            Unavailable: The folder cannot be written.
        """
        check_name(name)
        with self._turn(name):
            if not (self.path / name / FILE_NAME).is_file():
                raise self._missing(name)
            self._forget(name)
            aside = self.path / f".{name}.dropped-{secrets.token_hex(4)}"
            try:
                (self.path / name).rename(aside)  # one step: never half a gallery under the name
            except OSError as error:
                raise disk_error(error, f"the gallery {self.path / name}") from error
            shutil.rmtree(aside, ignore_errors=True)

    def close(self) -> None:
        """Close every gallery; calls that are running still end well."""
        with self._guard:
            self._closed = True
            galleries, self._open = [gallery for _, gallery in self._open.values()], {}
        for gallery in galleries:
            gallery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self, name: str) -> threading.Lock:
        with self._guard:
            if self._closed:
                raise Unavailable(f"the galleries in {self.path} have been closed; open the folder again")
            return self._turns.setdefault(name, threading.Lock())

    def _keep(self, name: str, identity: tuple[int, int], gallery: Gallery) -> Gallery:
        with self._guard:
            if not self._closed:
                self._open[name] = identity, gallery
                return gallery
        gallery.close()
        raise Unavailable(f"the galleries in {self.path} have been closed; open the folder again")

    def _forget(self, name: str) -> None:
        with self._guard:
            known = self._open.pop(name, None)
        if known is not None:
            known[1].close()

    def _missing(self, name: str) -> NotFound:
        names = self.names()
        shown = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        )
        return NotFound(f"there is no gallery {name!r} in {self.path}; it holds {shown or 'none'}")
