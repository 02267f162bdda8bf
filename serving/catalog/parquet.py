"""The format `parquet`: tables whose rows hold an image's bytes, or its path, and what belongs to it.

Labels, keys and metadata are read with the catalogue; an image when it is asked for.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from serving.catalog.arrow import ParquetTable
from serving.catalog.cells import Cell, Column
from serving.catalog.picture import File, Picture
from serving.catalog.rows import SPLITS, Catalog, Row, make_catalog
from serving.catalog.shards import Shard, find_shards
from serving.catalog.walk import which_are_files
from serving.errors import BadData

__all__ = ["ENDINGS", "read"]

ENDINGS: Final[tuple[str, ...]] = (".parquet",)
_IMAGES: Final = ("image", "img", "path")
_LABELS: Final = ("label", "class")


def read(root: Path, only: Path | None = None) -> Catalog:
    """Return a row for each row of the tables.

    Args:
        root: The folder.
        only: The one file to read, where not all below the folder are wanted.

    Raises:
        BadData: There is no such file, one is damaged or has no column of images, a cell does not hold what
            its column says, a key comes twice, or no image is there.
        BadSetting: pyarrow is not installed.
    """
    rows, absent, places = list[Row](), list[Row](), dict[str, str]()
    for shard in find_shards(root, only, ENDINGS):
        found = list(_rows(shard))
        for number, row in enumerate(found):
            place = f"row {number} of {shard.path}"
            if places.setdefault(row.key, place) != place:
                raise BadData(f"{place} has the key {row.key!r} again, as {places[row.key]}")
        paths = [row.image.path for row in found if isinstance(row.image, File)]
        there = which_are_files(root, [_below(root, path, shard) for path in paths]) if paths else ()
        for row, is_there in zip(found, there or [True] * len(found), strict=True):
            (rows if is_there else absent).append(row)
    if not rows:
        told = (
            f"none of their {len(absent)} images is there ({absent[0].image})"
            if absent
            else "they have no rows"
        )
        raise BadData(f"the parquet files of {only or root} give no image: {told}")
    return make_catalog(root, "parquet", rows, absent=absent, table=only)


def _rows(shard: Shard) -> Iterator[Row]:
    """Yield the rows of one file, in order."""
    changed = _stamp(shard.path)
    table = ParquetTable(shard.path)
    try:
        image = _image_column(table, shard.path)
        named = {name.lower(): name for name in table.kinds}
        label, key, split = (_first(named, names) for names in (_LABELS, ("key",), ("split",)))
        labels = _labels(table, label, shard)
        keys = _keys(table, key, shard)
        splits = _splits(table, split, shard)
        metadata = {
            name: table.values(name)
            for name, kind in table.kinds.items()
            if kind not in ("bytes", "other") and name not in (image, label, key, split)
        }
        pictures = _pictures(table, image, shard, changed)
    finally:
        table.close()
    for number, picture in enumerate(pictures):
        own = {name: values[number] for name, values in metadata.items() if values[number] is not None}
        yield Row(keys[number], picture, labels[number], splits[number], own)


def _image_column(table: ParquetTable, path: Path) -> str:
    """Return the name of the column with the images' bytes, or else of that with their paths."""
    for kind in ("bytes", "text"):
        fitting = {name.lower(): name for name in table.kinds if table.kinds[name] == kind}
        if name := _first(fitting, _IMAGES):
            return name
        if kind == "bytes" and len(fitting) == 1:
            return next(iter(fitting.values()))
        if kind == "bytes" and fitting:
            raise BadData(
                f"the parquet file {path} has several columns of bytes, {', '.join(fitting.values())}; call"
                " that of the images image"
            )
    told = ", ".join(f"{name} ({of})" for name, of in table.types.items())
    raise BadData(
        f"the parquet file {path} has no column of images: bytes, {{bytes, path}}, or paths in a column image"
        f" or path; it has {told or 'no columns'}"
    )


def _pictures(table: ParquetTable, name: str, shard: Shard, changed: tuple[int, int]) -> list[Picture]:
    """Return where the image of each row is."""
    if table.kinds[name] == "bytes":
        column = Column(shard.path, f"{name}.bytes" if name in table.structs else name, *changed)
        places = ((group, index) for group, count in enumerate(table.groups) for index in range(count))
        return [Cell(column, row, group, index) for row, (group, index) in enumerate(places)]
    found = list[Picture]()
    for number, value in enumerate(table.values(name)):
        if not value or "\0" in value:
            raise BadData(f"row {number} of {shard.path} has the path {value!r}; give that of an image")
        found.append(File(Path(os.path.normpath(shard.path.parent / value))))
    return found


def _labels(table: ParquetTable, name: str, shard: Shard) -> list[str]:
    """Return the class of each row, empty where it has none: null or, among whole numbers, below 0."""
    if not name:
        return [""] * sum(table.groups)
    if table.kinds[name] not in ("text", "whole number"):
        raise BadData(
            f"the column {name} of {shard.path} is of the type {table.types[name]}; give labels as text or as"
            " whole numbers"
        )
    values, names = table.values(name), table.class_names.get(name, [])
    if table.kinds[name] == "text":
        return ["" if value is None else str(value).strip() for value in values]
    numbers = [-1 if value is None else int(value) for value in values]
    for row, number in enumerate(numbers):
        if names and number >= len(names):
            raise BadData(
                f"row {row} of {shard.path} has the {name} {number}, but the file names {len(names)} classes"
            )
    return ["" if number < 0 else names[number] if names else str(number) for number in numbers]


def _keys(table: ParquetTable, name: str, shard: Shard) -> list[str]:
    """Return the key of each row: its own, or else the file's path and its number."""
    if not name:
        return [f"{shard.name}/{row:08}" for row in range(sum(table.groups))]
    if table.kinds[name] not in ("text", "whole number"):
        raise BadData(
            f"the column {name} of {shard.path} is of the type {table.types[name]}; give keys as text"
        )
    keys = ["" if value is None else str(value).strip() for value in table.values(name)]
    if "" in keys:
        raise BadData(f"row {keys.index('')} of {shard.path} has an empty key; each row needs its own key")
    return keys


def _splits(table: ParquetTable, name: str, shard: Shard) -> list[str]:
    """Return the side of each row: what its column says, or else the file's name."""
    if not name:
        return [shard.split] * sum(table.groups)
    found = list[str]()
    for row, value in enumerate(table.values(name)):
        given = "" if value is None else str(value).strip().lower()
        if given and given not in SPLITS:
            raise BadData(
                f"row {row} of {shard.path} has the split {value!r}; give train, test, query, gallery or none"
            )
        found.append(SPLITS.get(given, ""))
    return found


def _first(named: dict[str, str], names: Sequence[str]) -> str:
    return next((named[name] for name in names if name in named), "")


def _below(root: Path, path: Path, shard: Shard) -> str:
    if not path.is_relative_to(root):
        raise BadData(f"{shard.path} names the image {str(path)!r}, which is not below {root}")
    return os.path.relpath(path, root)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        return File(path).stamp()
    except OSError as error:
        raise BadData(f"the parquet file {path} cannot be read: {error.strerror or error}") from error
