"""A data set on disk as rows (key, image, label, split); images are found here and decoded elsewhere.

Each format has a reader beside this file; `auto` finds out which it is. Published lists and tables are known
by their names and first lines; without any it is `cifar10`, where folders say so, or `folder`.

An image of no class can be indexed, and neither trains nor tests. `docs/catalogues.md` tells it all.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final, Literal, get_args

from serving.catalog import folder, parquet, published, webdataset
from serving.catalog.cars import find_cars, parse_cars
from serving.catalog.published import Listed
from serving.catalog.rows import Catalog, Row
from serving.catalog.split import Split, SplitRule, select, select_missing
from serving.catalog.table import find_table, read_table
from serving.catalog.walk import SUFFIXES, is_visible, walk
from serving.errors import BadData, BadSetting, cause_of

__all__ = [
    "FORMATS", "SUFFIXES", "Catalog", "Format", "Layout", "Row", "Split", "SplitRule", "read", "read_listed",
    "select", "select_missing",
]  # fmt: skip

Layout = Literal["folder", "csv", "cifar10", "cub", "cars", "sop", "inshop", "webdataset", "parquet"]
Format = Literal["auto", Layout]
FORMATS: Final[tuple[str, ...]] = get_args(Format)

_Find = Callable[[Path], Path | None]
_Parse = Callable[[Path], list[Listed]]
# What finds the folder of the lists, what reads them, and where the images may lie from there.
_PUBLISHED: Final[Mapping[str, tuple[_Find, _Parse, Sequence[str]]]] = {
    "cub": (published.find_cub, published.parse_cub, ("images",)),
    "cars": (find_cars, parse_cars, ("",)),
    "sop": (published.find_sop, published.parse_sop, ("",)),
    "inshop": (published.find_inshop, published.parse_inshop, ("", "Img")),
}
_PACKED: Final[Mapping[str, Callable[[Path, Path | None], Catalog]]] = {
    "webdataset": webdataset.read,
    "parquet": parquet.read,
}
_ENDINGS: Final = {"csv": (".csv",), "webdataset": webdataset.ENDINGS, "parquet": parquet.ENDINGS}


def read(root: Path, format: str = "auto", *, table: Path | None = None) -> Catalog:
    """Read the data set at `root`.

    Args:
        root: The folder; or one `.csv`, `.tar` or `.parquet` file, whose folder then is the root.
        format: One of `FORMATS`.
        table: The one such file to read, where it is not the one `.csv` file in `root` or all packed files.

    Raises:
        BadData: No such folder, not readable, no image in it, a table or list that does not hold, or several
            formats that fit.
        BadSetting: `format` is not one of `FORMATS`, or not that of the file, or needs a library that is not
            installed.
    """
    if format not in FORMATS:
        raise BadSetting(f"the format {format!r} is not known; give one of {', '.join(FORMATS)}")
    root = Path(os.path.abspath(root))
    if _format_of(root) and root.is_file():
        root, table = root.parent, root if table is None else table
    try:
        os.stat(root)
    except (OSError, ValueError) as error:
        raise BadData(f"the data folder {root} cannot be read: {cause_of(error)}") from error
    if not root.is_dir():
        raise BadData(
            f"{root} is a file; give the folder that holds the images, or a .csv, .tar or .parquet file"
        )
    if table is not None:
        table = Path(os.path.abspath(table))
        ours = _format_of(table) or "csv"
        if format not in ("auto", ours):
            raise BadSetting(f"{table} is of the format {ours} and not {format!r}; give that format, or auto")
        format = ours
    elif format == "auto":
        format, table = _find_format(root)
    elif format == "csv":
        table = find_table(root, required=True)
    if format == "csv" and table is not None:
        return read_table(root, table)
    if format in _PACKED:
        return _PACKED[format](root, table)
    if format in _PUBLISHED:
        find, parse, folders = _PUBLISHED[format]
        home = find(root) or root
        return published.locate(home, format, parse(home), folders)
    return folder.read(root, format)


def read_listed(root: Path, format: str) -> list[Listed]:
    """Return what the published lists at `root` name, whether the images are there or not.

    Raises:
        BadData: The lists are not there or do not hold.
        BadSetting: The format has no such lists.
    """
    if format not in _PUBLISHED:
        raise BadSetting(f"the format {format!r} has no published lists; give one of {', '.join(_PUBLISHED)}")
    find, parse, _ = _PUBLISHED[format]
    return parse(find(root) or root)


def _find_format(root: Path) -> tuple[str, Path | None]:
    """Return the one format that the lists or packed files in a folder are of, else `auto`; and its table."""
    table = find_table(root, required=False)
    homes = {name: home for name, (find, *_) in _PUBLISHED.items() if (home := find(root)) is not None}
    fitting = [*homes, *(["csv"] if table else [])]
    # Lists in a folder within speak for all of `root` only where no other folder is beside it.
    within = any(home != root for home in homes.values())
    if within and sum(is_visible(name) and (root / name).is_dir() for name in os.listdir(root)) > 1:
        fitting.append("folder")
    fitting = fitting or _packed_formats(root)
    if len(fitting) > 1:
        raise BadData(
            f"{root} fits the formats {' and '.join(fitting)}; say which by the format, or give the folder"
            " within that is meant"
        )
    return (fitting[0], table) if fitting else ("auto", None)


def _packed_formats(root: Path) -> list[str]:
    """Return the formats of the packed files in a folder; none where it holds an image that is not packed."""
    files = [path for path, kind in walk(root) if kind == "file"]
    if any(path.suffix.lower() in SUFFIXES for path in files):
        return []
    return sorted({_format_of(path) for path in files} & _PACKED.keys())


def _format_of(path: PurePath) -> str:
    """Return the format of a file that holds or names many images, by its name; empty for another file."""
    name = path.name.lower()
    return next((format for format, endings in _ENDINGS.items() if name.endswith(endings)), "")
