"""The files of a data set that is packed: many images a file, one side of the split a file."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from serving.catalog.rows import SPLITS, path_text
from serving.catalog.walk import walk
from serving.errors import BadData

__all__ = ["Shard", "find_shards"]

_WORD: Final = re.compile(r"[^\W\d_]+")


class Shard(NamedTuple):
    """One file of a packed data set."""

    path: Path
    """Absolute."""
    name: str
    """POSIX path from the root."""
    split: str
    """What its folder's name or the beginning of its own says; empty where neither names a side."""


def find_shards(root: Path, only: Path | None, endings: tuple[str, ...]) -> list[Shard]:
    """Return the packed files below `root`, sorted by their paths.

    Args:
        root: The folder.
        only: The one file to take, where not all are wanted.
        endings: What their names end in, in lower case.

    Raises:
        BadData: There is none, or a folder cannot be read.
    """
    if only is not None:
        return [_shard(root, PurePosixPath(os.path.relpath(only, root)))]
    files = (path for path, kind in walk(root, ()) if kind == "file")
    found = sorted(path for path in files if path.name.lower().endswith(endings))
    if not found:
        raise BadData(f"{root} holds no file that ends in {endings[0]}; give the folder that does")
    return [_shard(root, path) for path in found]


def _shard(root: Path, path: PurePosixPath) -> Shard:
    first = _WORD.match(path.name.lower())
    words = [first[0] if first else "", *(part.lower() for part in reversed(path.parts[:-1]))]
    return Shard(root / path, path_text(path), next((SPLITS[word] for word in words if word in SPLITS), ""))
