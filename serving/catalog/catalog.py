"""A data set on disk as rows (key, image, label, split); images are found here and decoded elsewhere.

Each format has a reader beside this file; `auto` finds out which it is. `docs/catalogues.md` tells it all.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from types import ModuleType
from typing import Final, Literal, get_args

from serving.catalog import folder, parquet, published, webdataset
from serving.catalog.rows import Catalog, Row, Split, SplitRule, select, select_missing, tell_unread
from serving.catalog.table import find_tables, read_table
from serving.catalog.walk import SUFFIXES, is_excluded, is_visible, list_files
from serving.errors import BadData, BadSetting, cause_of

__all__ = [
    "FORMATS", "Catalog", "Format", "Layout", "Row", "Split", "SplitRule", "read", "select",
    "select_missing", "tell_unread",
]  # fmt: skip

Layout = Literal["folder", "csv", "cifar10", "cub", "cars", "sop", "inshop", "webdataset", "parquet"]
Format = Literal["auto", Layout]
FORMATS: Final[tuple[str, ...]] = get_args(Format)

_PACKED: Final[Mapping[str, ModuleType]] = {"webdataset": webdataset, "parquet": parquet}
"""The readers of files that hold many images, or of a folder of them."""


def read(
    root: Path,
    format: str = "auto",
    *,
    table: Path | None = None,
    exclude: Sequence[str] = (),
    decimal: Literal[".", ","] = ".",
    text: Collection[str] = (),
) -> Catalog:
    """Read the data set at `root`.

    Args:
        root: The folder; or one `.csv`, `.tar` or `.parquet` file, whose folder then is the root.
        format: One of `FORMATS`.
        table: The one such file to read, where it is not the one `.csv` file in `root` or all packed files.
        exclude: Patterns of the ends of paths, such as `*_back.jpg` and `shoes/old`: files and folders to
            leave out, images that a table or a list names among them.
        decimal: What stands before the decimals of a number in a table of text.
        text: Fields of the metadata that are text whatever they hold.

    Raises:
        BadData: It cannot be read, holds no image, does not hold together, or fits several formats.
        BadSetting: `format` is none, or not that of the file, or needs a library that is not installed.
    """
    if format not in FORMATS:
        raise BadSetting(f"the format {format!r} is not known; give one of {', '.join(FORMATS)}")
    if not all(PurePath(pattern).parts for pattern in exclude):
        raise BadSetting(
            f"of the patterns {', '.join(exclude)} one names nothing; give one such as *_back.jpg"
        )
    root = Path(os.path.abspath(root))
    if _format_of(root) and root.is_file():
        root, table = root.parent, table or root
    try:
        os.listdir(root)
    except (OSError, ValueError) as error:
        raise BadData(
            f"the data folder {root} cannot be read: {cause_of(error)}; give the folder that holds the images"
            " or the lists, or a .csv, .tar or .parquet file"
        ) from error
    if table is not None:
        table = Path(os.path.abspath(table))
        ours = _format_of(table) or "csv"
        if format not in ("auto", ours):
            raise BadSetting(f"{table} is of the format {ours} and not {format!r}; give that format, or auto")
        format = ours
    elif format == "auto":
        format = _find_format(root, exclude)
    if format == "csv":
        found = read_table(root, table, decimal, text)
    elif format in _PACKED:
        found = _PACKED[format].read(root, table, exclude, text)
    elif format in ("auto", "folder", "cifar10"):
        found = folder.read(root, format, exclude)
    else:
        found = published.read(root, format)
    found = _without(found, tuple(exclude))
    first = dict[str, Row]()
    for row in (*found.rows, *found.absent):
        if first.setdefault(row.key, row) is not row:
            raise BadData(
                f"the key {row.key!r} is that of {first[row.key].image} and again of {row.image}; each image"
                " needs its own"
            )
    return replace(
        found, rows=tuple(sorted(found.rows, key=lambda row: row.key)), empty=tuple(sorted(found.empty))
    )


def _without(found: Catalog, exclude: tuple[str, ...]) -> Catalog:
    """Take out the images that a pattern excludes, which a table or a list may name."""
    if not exclude:
        return found
    rows, absent = (
        tuple(row for row in rows if not is_excluded(found.root, PurePath(found.path_of(row)), exclude))
        for rows in (found.rows, found.absent)
    )
    if not rows:
        raise BadData(f"all {len(found.rows)} images of {found.root} are excluded, by {', '.join(exclude)}")
    gone = len(found.rows) - len(rows)
    left_out = Counter(found.left_out) + Counter({"by --exclude": gone})
    notes = found.notes if left_out["by --exclude"] else (*found.notes, f"nothing fits {', '.join(exclude)}")
    return replace(found, rows=rows, absent=absent, left_out=left_out, exclude=exclude, notes=notes)


def _find_format(root: Path, exclude: Sequence[str]) -> str:
    """Return the one format that the lists or packed files in a folder are of, else `auto`."""
    homes = published.find(root)
    fitting = [*homes, *(["csv"] if find_tables(root) else [])]
    # Lists in a folder within speak for all of `root` only where no other folder is beside it.
    within = any(home != root for home in homes.values())
    names = filter(is_visible, os.listdir(root))
    beside = (
        name for name in names if (root / name).is_dir() and not is_excluded(root, PurePath(name), exclude)
    )
    if within and len([*beside]) > 1:
        fitting.append("folder")
    if not fitting:
        files = list_files(root, exclude).files
        if not any(path.suffix.lower() in SUFFIXES for path in files):
            fitting = sorted({_format_of(path) for path in files} & {"webdataset", "parquet"})
    if len(fitting) > 1:
        raise BadData(
            f"{root} fits the formats {' and '.join(fitting)}; say which by the format, or give the folder"
            " within that is meant"
        )
    return fitting[0] if fitting else "auto"


def _format_of(path: PurePath) -> str:
    """Return the format of a file that holds or names many images, by its name; empty for another file."""
    name = path.name.lower()
    endings = {"csv": ".csv"} | {format: reader.ENDINGS for format, reader in _PACKED.items()}
    return next((format for format, ends in endings.items() if name.endswith(ends)), "")
