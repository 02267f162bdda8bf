"""Every file below a folder, once, whatever links lead there; and which files of a list are there."""

import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from serving.errors import BadData

__all__ = ["is_visible", "walk", "which_are_files"]

_NOT_OURS: Final = frozenset({"__MACOSX"})
_NO_SUCH_FOLDER: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP))


def walk(
    root: Path, suffixes: Collection[str]
) -> Iterator[tuple[PurePosixPath, Literal["file", "dangling", "empty folder"]]]:
    """Yield what lies below `root`, hidden names left out, as paths relative to it.

    Links to folders are followed after all real folders, and a folder is entered once however many
    ways lead to it, so that a loop of links ends and a real path wins over a linked one.

    Args:
        root: The folder.
        suffixes: In lower case; a folder with neither a file of these nor a folder in it is empty.

    Raises:
        BadData: A folder cannot be read.
    """
    real, linked, seen = [PurePosixPath()], list[PurePosixPath](), set[tuple[int, int]]()
    while real or linked:
        here = real.pop() if real else linked.pop()
        try:
            found = os.stat(root / here)
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(root / here) as entries:
                visible = sorted(
                    (entry for entry in entries if is_visible(entry.name)),
                    key=lambda entry: entry.name,
                    reverse=True,
                )
            images = folders = False
            for entry in visible:
                kind = _kind(entry)
                if kind == stat.S_IFDIR:
                    folders = True
                    (linked if entry.is_symlink() else real).append(here / entry.name)
                elif kind == stat.S_IFREG:
                    images |= os.path.splitext(entry.name)[1].lower() in suffixes
                    yield here / entry.name, "file"
                else:
                    yield here / entry.name, "dangling"
            if not images and not folders and here.parts:
                yield here, "empty folder"
        except OSError as error:
            raise BadData(
                f"the folder {root / here} cannot be read: {(error.strerror or str(error)).lower()}"
            ) from error


def is_visible(name: str) -> bool:
    """Tell whether a file or folder of this name is the user's own: neither hidden nor left by macOS."""
    return name[0] != "." and name not in _NOT_OURS


def which_are_files(root: Path, paths: Sequence[str]) -> list[bool]:
    """Tell which paths below `root` are files, asking the disk once a folder rather than once a file.

    Raises:
        BadData: A folder cannot be read.
    """
    listed: dict[str, frozenset[str] | None] = {}
    found = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in listed:
            listed[folder] = _files(os.path.join(root, folder))
        names = listed[folder]
        # A name that the listing lacks may still open: some file systems fold case or compose accents.
        found.append(names is not None and (name in names or os.path.isfile(os.path.join(root, path))))
    return found


def _kind(entry: os.DirEntry[str]) -> int:
    """Return the file type behind an entry, 0 where a link leads nowhere or round in a circle."""
    try:
        if not entry.is_symlink():  # what the folder's listing says already costs no call a file
            return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG if entry.is_file() else 0
        return stat.S_IFMT(entry.stat().st_mode)
    except OSError:
        return 0


def _files(folder: str) -> frozenset[str] | None:
    """Return the names of a folder's files; None where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if _kind(entry) == stat.S_IFREG)
    except OSError as error:
        if error.errno in _NO_SUCH_FOLDER:
            return None
        raise BadData(
            f"the folder {folder} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from error
