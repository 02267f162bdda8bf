"""The format `csv`, a table of images, and what other formats share with it: texts and metadata.

Its columns are `path` (or `image`) and `label`, `split` and `key` if wanted; any other is metadata.
"""

import csv
import io
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from serving.catalog.picture import File
from serving.catalog.rows import Catalog, Row, known_split, make_catalog, path_text
from serving.catalog.walk import sort_out
from serving.errors import BadData, cause_of

__all__ = ["find_table", "plain_value", "read_table", "read_text", "with_one_type"]

_NEEDED: Final = ({"path", "image"}, {"label"})  # of each one
_KNOWN: Final = frozenset(("path", "image", "label", "split", "key"))
# No leading zeros: 007 is a name. At most 15 digits: on the wire metadata are doubles, which hold no more.
_INTEGER: Final = re.compile(r"-?(0|[1-9]\d{0,14})")
_DECIMAL: Final = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d{1,2})?")
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "false": False}


def find_table(root: Path, *, required: bool) -> Path | None:
    """Return the one `.csv` file in the folder `root` that names images and labels, if there is one."""
    fitting = []
    try:
        names = sorted(name for name in os.listdir(root) if name.lower().endswith(".csv") and name[0] != ".")
        if required and len(names) == 1:
            return root / names[0]
        for name in names:
            with open(root / name, "rb") as file:
                header = file.readline(1 << 16).decode("utf-8-sig", "replace")
            columns = {column.strip(' "\r\n').lower() for column in re.split("[,;\t]", header)}
            if all(columns & each for each in _NEEDED):
                fitting.append(name)
    except OSError as error:
        raise BadData(f"the data folder {root} cannot be read: {cause_of(error)}") from error
    if len(fitting) > 1 or (required and not fitting):
        raise BadData(
            f"{root} holds {len(fitting)} .csv tables with the columns path and label"
            f"{' (' + ', '.join(fitting[:5]) + ')' if fitting else ''}; give the one .csv file to read"
        )
    return root / fitting[0] if fitting else None


def read_table(root: Path, table: Path) -> Catalog:
    """Return a row for each line of the table whose image is there; paths start at `root`."""
    lines = _read_lines(table)
    names = [name for name in (lines[0][1] if lines else ()) if name.lower() not in _KNOWN]
    extra = {name: _column_reader([cells[name] for _, cells in lines]) for name in names}
    found, numbers = list[Row](), dict[str, int]()
    for number, cells in lines:
        where, named = f"line {number} of {table}", {name.lower(): cell for name, cell in cells.items()}
        path = named.get("path", named.get("image", ""))
        image = os.path.normpath(os.path.join(root, path))
        if not path or "\0" in path or not image.startswith(os.path.join(root, "")):
            raise BadData(f"{where} names the image {path!r}, which is not below {root}")
        key = named.get("key", path_text(os.path.relpath(image, root)))
        if not key or numbers.setdefault(key, number) != number:
            told = f"the key {key!r} again, as on line {numbers[key]}" if key else "an empty key"
            raise BadData(f"{where} has {told}; each row needs its own key")
        split = known_split(named.get("split", ""), where)
        metadata = {name: kind(cells[name]) for name, kind in extra.items() if cells[name]}
        found.append(Row(key, File(Path(image)), named["label"], split, metadata))
    rows, absent = sort_out(root, found, table)
    if not rows:
        first = [os.path.relpath(row.image.path, root) for row in absent[:3]]
        told = f"none of its {len(absent)} images is there: {first}" if absent else "it has no rows"
        raise BadData(f"the table {table} gives no image below {root}: {told}")
    return make_catalog(root, "csv", rows, absent=absent, table=table)


def read_text(path: Path) -> str:
    """Read a whole file as UTF-8 text, with or without a byte-order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadData(f"{path} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is not UTF-8 text at byte {error.start}; save it as UTF-8") from error


def plain_value(value: object) -> str | int | float | bool | None:
    """Return one value of metadata that was not read from text; None where it is none, or no single value.

    Whole numbers of more than 15 digits become text, as they are in a table.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**15:
        return str(value)
    return value if isinstance(value, str | int) else None


def with_one_type(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with metadata of one type a field, so that a filter compares like with like.

    Numbers are decimals where one is; a field that has anything else beside them, or truths, is text.
    """
    types = defaultdict[str, set[type]](set)
    for row in rows:
        for name, value in row.metadata.items():
            types[name].add(type(value))
    mixed: dict[str, Callable[[Any], str | float]] = {
        name: float if found == {int, float} else _as_text for name, found in types.items() if len(found) > 1
    }
    if not mixed:
        return list(rows)
    return [
        replace(
            row,
            metadata={name: mixed[name](it) if name in mixed else it for name, it in row.metadata.items()},
        )
        for row in rows
    ]


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _column_reader(values: Sequence[str]) -> Callable[[str], str | int | float | bool]:
    """Return what reads a filled cell of a column, all as one type."""
    filled = [value for value in values if value]
    if all(value.lower() in _TRUTHS for value in filled):
        return lambda value: _TRUTHS[value.lower()]
    if all(map(_INTEGER.fullmatch, filled)):
        return int
    return float if all(map(_DECIMAL.fullmatch, filled)) else str


def _read_lines(table: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the number and the stripped cells, by column name, of each line that is not blank.

    The first line names the columns; cells are parted by comma, semicolon or tab, whichever it has most of.
    """
    text = read_text(table)
    first = text.partition("\n")[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    found = []
    try:
        header = [name.strip() for name in next(lines, [])]
        columns = [name.lower() for name in header]
        if twice := next((name for name in columns if columns.count(name) > 1), ""):
            raise BadData(f"the table {table} has the column {twice!r} twice")
        lacking = [" or ".join(sorted(names, reverse=True)) for names in _NEEDED if not names & {*columns}]
        if lacking:
            raise BadData(
                f"the table {table} lacks the column {' and the column '.join(lacking)}; "
                f"its first line names {', '.join(header) or 'nothing'}"
            )
        for line in lines:
            if line and len(line) != len(header):
                raise BadData(
                    f"line {lines.line_num} of {table} has {len(line)} cells; line 1 has {len(header)}"
                )
            if line:
                cells = dict(zip(header, map(str.strip, line), strict=True))
                found.append((lines.line_num, cells))
    except csv.Error as error:
        raise BadData(f"line {lines.line_num} of {table} is not a line of a table: {error}") from error
    return found
