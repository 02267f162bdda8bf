"""A data set on disk as rows (key, image, label, split); images are found here and decoded elsewhere.

Each format has its file in `serving.layouts`; `auto` finds out which it is. Published lists and tables are
known by their names and first lines; without any it is `cifar10`, where folders say so, or `folder`.

An image of no class can be indexed, and neither trains nor tests. `docs/catalogues.md` tells it all.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Protocol, get_args

from serving.errors import BadData, BadSetting
from serving.layouts import cars, cifar10, csv_table, cub, folder, inshop, sop
from serving.layouts.listing import Listed
from serving.layouts.tree import SUFFIXES, grow
from serving.rows import Catalog, Row
from serving.split import Split, SplitRule, select, select_missing
from serving.table import find_table
from serving.walk import is_visible

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "Catalog",
    "Format",
    "Layout",
    "Row",
    "Split",
    "SplitRule",
    "read",
    "read_listed",
    "select",
    "select_missing",
]

Layout = Literal["folder", "csv", "cifar10", "cub", "cars", "sop", "inshop"]
Format = Literal["auto", Layout]
FORMATS: Final[tuple[str, ...]] = get_args(Format)


class _Lists(Protocol):
    """What a layout with published lists offers."""

    def find(self, root: Path) -> Path | None: ...

    def parse(self, folder: Path) -> list[Listed]: ...

    def read(self, folder: Path) -> Catalog: ...


_PUBLISHED: Final[Mapping[str, _Lists]] = {"cub": cub, "cars": cars, "sop": sop, "inshop": inshop}


def read(root: Path, format: str = "auto", *, table: Path | None = None) -> Catalog:
    """Read the data set at `root`.

    Args:
        root: The folder; or a `.csv` file, whose paths then start from its own folder.
        format: One of `FORMATS`.
        table: The table of a csv data set, where it is not the one `.csv` file in `root`.

    Raises:
        BadData: No such folder, not readable, no image in it, a table or list that does not hold, or several
            formats that fit.
        BadSetting: `format` is not one of `FORMATS`.
    """
    if format not in FORMATS:
        raise BadSetting(f"the format {format!r} is not known; give one of {', '.join(FORMATS)}")
    root = Path(os.path.abspath(os.fspath(root)))
    if root.suffix.lower() == ".csv" and root.is_file():
        root, table = root.parent, root if table is None else table
    _check_folder(root)
    if table is not None and format not in ("auto", "csv"):
        raise BadSetting(f"a table was given with the format {format!r}; give the format csv, or no table")
    if table is None and format == "auto":
        format, table = _find_format(root)
    elif table is None and format == "csv":
        table = find_table(root, required=True)
    if table is not None:
        return csv_table.read(root, Path(os.path.abspath(os.fspath(table))))
    if format in _PUBLISHED:
        return _PUBLISHED[format].read(_PUBLISHED[format].find(root) or root)
    tree = grow(root)
    if format == "cifar10" or (format == "auto" and cifar10.fits(tree)):
        return cifar10.read(tree)
    return folder.read(tree)


def read_listed(root: Path, format: str) -> list[Listed]:
    """Return what the published lists at `root` name, whether the images are there or not.

    Args:
        root: The folder.
        format: One of the formats that have published lists.

    Raises:
        BadData: The lists are not there or do not hold.
        BadSetting: The format has no such lists.
    """
    if format not in _PUBLISHED:
        raise BadSetting(f"the format {format!r} has no published lists; give one of {', '.join(_PUBLISHED)}")
    return _PUBLISHED[format].parse(_PUBLISHED[format].find(root) or root)


def _find_format(root: Path) -> tuple[str, Path | None]:
    """Return the one format that the lists in a folder are of, `auto` where it holds none; and its table.

    Raises:
        BadData: Several formats fit.
    """
    table = find_table(root, required=False)
    homes = {name: home for name, lists in _PUBLISHED.items() if (home := lists.find(root)) is not None}
    fitting = [*homes, *(["csv"] if table else [])]
    # Lists in a folder within speak for all of `root` only where no other folder is beside it.
    if any(home != root for home in homes.values()) and _folders(root) > 1:
        fitting.append("folder")
    if len(fitting) > 1:
        raise BadData(
            f"{root} fits the formats {' and '.join(fitting)}; say which by the format, or give the folder"
            " within that is meant"
        )
    return (fitting[0], table) if fitting else ("auto", None)


def _folders(root: Path) -> int:
    return sum(is_visible(name) and os.path.isdir(os.path.join(root, name)) for name in os.listdir(root))


def _check_folder(root: Path) -> None:
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        raise BadData(f"the data folder {root} cannot be read: {_reason(error)}") from error
    if not stat.S_ISDIR(mode):
        raise BadData(f"{root} is a file; give the folder that holds the images, or a .csv table")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
