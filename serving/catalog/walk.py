"""What lies on disk: every file below a folder once, which files of a list are there, packed files."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Literal, NamedTuple

from serving.catalog.rows import SPLITS, Row, path_text
from serving.errors import BadData, cause_of
from serving.model.preprocess import FORMATS

__all__ = ["SUFFIXES", "Shard", "find_shards", "is_visible", "path_below", "sort_out", "walk"]

SUFFIXES: Final = frozenset(  # of images, in any case
    (".avif", ".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
    + ((".heic", ".heif") if "HEIF" in FORMATS else ())
)
_WORD: Final = re.compile(r"[^\W\d_]+")


def walk(root: Path) -> Iterator[tuple[PurePosixPath, Literal["file", "dangling", "empty folder"]]]:
    """Yield what lies below `root`, hidden names left out, as paths relative to it.

    Links to folders are followed after all real folders, and a folder is entered once, so that a loop of
    links ends. A folder with neither an image nor a folder is empty. BadData where one cannot be read.
    """
    real, linked, seen = [PurePosixPath()], list[PurePosixPath](), set[tuple[int, int]]()
    while real or linked:
        here = real.pop() if real else linked.pop()
        try:
            found = os.stat(root / here)
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(root / here) as listing:
                entries = {entry.name: entry for entry in listing if is_visible(entry.name)}
        except OSError as error:
            raise _unreadable(root / here, error) from error
        is_empty = bool(here.parts)
        for name in sorted(entries, reverse=True):
            kind = _kind(entries[name])
            if kind == stat.S_IFDIR:
                is_empty = False
                (linked if entries[name].is_symlink() else real).append(here / name)
            elif kind == stat.S_IFREG:
                is_empty &= os.path.splitext(name)[1].lower() not in SUFFIXES
                yield here / name, "file"
            else:
                yield here / name, "dangling"
        if is_empty:
            yield here, "empty folder"


def is_visible(name: str) -> bool:
    """Tell whether a file or folder of this name is the user's own: neither hidden nor left by macOS."""
    return name[0] != "." and name != "__MACOSX"


def sort_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows whose images are files, and the others; the disk is asked once a folder, not a file."""
    found, absent, listed = list[Row](), list[Row](), dict[str, frozenset[str]]()
    for row in rows:
        folder, name = os.path.split(row.image.path)
        if folder not in listed:
            listed[folder] = _files(folder)
        # A name that the listing lacks may still open: some file systems fold case or compose accents.
        is_there = name in listed[folder] or os.path.isfile(row.image.path)
        (found if is_there else absent).append(row)
    return found, absent


def path_below(root: Path, folder: Path, given: str, where: str) -> Path:
    """Return where an image is that a table names from a folder; its path may not lead out of `root`."""
    path = os.path.normpath(os.path.join(folder, given))
    if not given or "\0" in given or not path.startswith(os.path.join(root, "")):
        raise BadData(f"{where} names the image {given!r}, which is not below {root}")
    return Path(path)


class Shard(NamedTuple):
    """One file of a packed data set, which holds many images."""

    path: Path
    name: str
    """POSIX path from the root."""
    split: str
    """What its folder's name or the beginning of its own says; empty where neither names a side."""


def find_shards(root: Path, only: Path | None, endings: tuple[str, ...]) -> list[Shard]:
    """Return the packed files below `root` whose names end so (in lower case), sorted; or `only` that one."""
    if only is not None:
        files = [PurePosixPath(os.path.relpath(only, root))]
    else:
        files = [path for path, kind in walk(root) if kind == "file" and path.name.lower().endswith(endings)]
    if not files:
        raise BadData(f"{root} holds no file that ends in {endings[0]}; give the folder that does")
    return [Shard(root / path, path_text(path), _split_of(path)) for path in sorted(files)]


def _split_of(path: PurePosixPath) -> str:
    first = _WORD.match(path.name.lower())
    words = [first[0] if first else "", *(part.lower() for part in reversed(path.parts[:-1]))]
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def _kind(entry: os.DirEntry[str]) -> int:
    """Return the file type behind an entry, 0 where a link leads nowhere or round in a circle."""
    try:
        if not entry.is_symlink():  # what the folder's listing says already costs no call a file
            return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG if entry.is_file() else 0
        return stat.S_IFMT(entry.stat().st_mode)
    except OSError:
        return 0


def _files(folder: str) -> frozenset[str]:
    """Return the names of a folder's files; none where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if _kind(entry) == stat.S_IFREG)
    except OSError as error:
        if os.path.isdir(folder):
            raise _unreadable(folder, error) from error
        return frozenset()


def _unreadable(folder: str | Path, error: OSError) -> BadData:
    return BadData(f"the folder {folder} cannot be read: {cause_of(error)}")
