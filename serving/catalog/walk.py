"""What lies on disk: every file below a folder once, which files of a list are there, packed files."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Final, NamedTuple
from unicodedata import normalize

from serving.catalog.picture import File
from serving.catalog.rows import SPLITS, Row, path_text
from serving.errors import BadData, cause_of
from serving.model.preprocess import FORMATS

__all__ = [
    "SUFFIXES", "Listing", "Shard", "find_shards", "is_excluded", "is_visible", "list_files", "path_below",
    "sort_out",
]  # fmt: skip

SUFFIXES: Final = frozenset(  # of images, in any case
    (".avif", ".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
    + ((".heic", ".heif") if "HEIF" in FORMATS else ())
)
_SYSTEM: Final = re.compile(  # folders of NAS, Windows, macOS and Linux: thumbnails, copies, what was deleted
    r"@eadir|@recycle|@recently-snapshot|#recycle|#snapshot|\$recycle\.bin|recycler|lost\+found"
    r"|system volume information|__macosx|\.trash(es|-.*)?",
    re.IGNORECASE,
)
_WORD: Final = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a folder, as paths relative to it."""

    files: list[PurePosixPath] = field(default_factory=list)
    dangling: list[PurePosixPath] = field(default_factory=list)
    empty: list[PurePosixPath] = field(default_factory=list)
    """Folders with neither an image nor a folder."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Folders of a system by their names, and how many things were excluded."""

    def passed_over(self, endings: Collection[str]) -> dict[str, int]:
        """Count the files that end otherwise, by their endings."""
        return _by_ending(path.name for path in self.files if not path.name.lower().endswith(tuple(endings)))


def list_files(root: Path, exclude: Sequence[str] = ()) -> Listing:
    """Return what lies below `root`, hidden names left out; BadData where a folder cannot be read.

    Links to folders are followed after all real folders, and a folder is entered once, so that a loop of
    links ends.
    """
    found, seen = Listing(), set[tuple[int, int]]()
    real, linked = [PurePosixPath()], list[PurePosixPath]()
    while real or linked:
        here = real.pop() if real else linked.pop()
        try:
            stats = os.stat(root / here)
            if (stats.st_dev, stats.st_ino) in seen:
                continue
            seen.add((stats.st_dev, stats.st_ino))
            with os.scandir(root / here) as listing:
                entries = {it.name: it for it in listing if is_visible(it.name) or _SYSTEM.fullmatch(it.name)}
        except OSError as error:
            raise _unreadable(root / here, error) from error
        is_empty = bool(here.parts)
        for name in sorted(entries, reverse=True):
            path, kind = here / name, _kind(entries[name])
            if is_excluded(root, path, exclude):
                is_empty &= kind != stat.S_IFDIR
                found.left_out["by --exclude"] += 1
            elif not is_visible(name):
                found.left_out[name] += 1
            elif kind == stat.S_IFDIR:
                is_empty = False
                (linked if entries[name].is_symlink() else real).append(path)
            elif kind == stat.S_IFREG:
                is_empty &= os.path.splitext(name)[1].lower() not in SUFFIXES
                found.files.append(path)
            else:
                found.dangling.append(path)
        if is_empty:
            found.empty.append(here)
    return found


def is_visible(name: str) -> bool:
    """Tell whether a file or folder of this name is the user's own: neither hidden nor left by a system."""
    return name[0] != "." and not _SYSTEM.fullmatch(name)


def is_excluded(root: Path, path: PurePath, exclude: Sequence[str]) -> bool:
    """Tell whether a path from the root, or a folder on it, ends as a pattern says."""
    return any((root / it).match(pattern) for pattern in exclude for it in (path, *path.parents[:-1]))


def sort_out(rows: Sequence[Row], *lists: Path) -> tuple[list[Row], list[Row], Counter[str]]:
    """Return the rows whose images are files, and the others; the disk is asked once a folder, not a file.

    Beside them is how many other files those folders have, by their endings, without the `lists`. A name is
    found whether its accents are composed there or not, and the row's image is then that file.
    """
    found, absent, listed = list[Row](), list[Row](), dict[str, frozenset[str]]()
    composed = dict[str, dict[str, str]]()
    for row in rows:
        folder, name = os.path.split(row.image.path)
        if folder not in listed:
            listed[folder] = _files(folder)
        # A name that the listing lacks may still open: some file systems fold case or compose accents.
        is_there = name in listed[folder] or os.path.isfile(row.image.path)
        if not is_there and not str(row.image.path).isascii():
            path = _as_written(str(row.image.path), composed)
            if is_there := os.path.isfile(path):
                row = replace(row, image=File(Path(path)))
        (found if is_there else absent).append(row)
    known = {*map(os.fspath, lists), *(os.fspath(row.image.path) for row in found)}
    others = ((folder, name) for folder, names in listed.items() for name in names if is_visible(name))
    return (
        found,
        absent,
        _by_ending(name for folder, name in others if os.path.join(folder, name) not in known),
    )


def _by_ending(names: Iterable[str]) -> Counter[str]:
    return Counter(os.path.splitext(name)[1].lower() or "without an ending" for name in names)


def _as_written(path: str, composed: dict[str, dict[str, str]]) -> str:
    """Return a path as the disk has it, by the names of each folder in their composed form."""
    folder, name = os.path.split(path)
    if os.path.lexists(path) or not name:
        return path
    folder = _as_written(folder, composed)
    if folder not in composed:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        composed[folder] = {normalize("NFC", each): each for each in names}
    return os.path.join(folder, composed[folder].get(normalize("NFC", name), name))


def path_below(root: Path, folder: Path, given: str, where: str) -> Path:
    """Return where an image is that a table names from a folder; its path may not lead out of `root`.

    A path that Windows has written is taken as it is meant, unless there is a file of just that name.
    """
    if "\\" in given and not os.path.lexists(os.path.join(folder, given)):
        given = given.replace("\\", "/")
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


def find_shards(
    root: Path, only: Path | None, endings: tuple[str, ...], exclude: Sequence[str]
) -> tuple[list[Shard], Listing]:
    """Return the packed files below `root` whose names end so (in lower case), sorted; or `only` that one."""
    listing = Listing([PurePosixPath(os.path.relpath(only, root))]) if only else list_files(root, exclude)
    files = [path for path in listing.files if only or path.name.lower().endswith(endings)]
    if not files:
        raise BadData(f"{root} holds no file that ends in {endings[0]}; give the folder that does")
    return [Shard(root / path, path_text(path), _split_of(path)) for path in sorted(files)], listing


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
