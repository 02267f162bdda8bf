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
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Final

from serving.catalog.picture import File, Member
from serving.catalog.rows import Catalog, Plain, Row, known_split, path_text
from serving.catalog.walk import is_visible, path_below, sort_out
from serving.errors import BadData, cause_of

__all__ = ["find_tables", "make_one_type", "plain_values", "read_table", "read_text"]

_NEEDED: Final = ({"path", "image"}, {"label"})  # of each one
_KNOWN: Final = frozenset(("path", "image", "label", "split", "key"))
# No leading zeros: 007 is a name. At most 15 digits: on the wire metadata are doubles, which hold no more.
_INTEGER: Final = re.compile(r"-?(0|[1-9]\d{0,14})")
_DECIMAL: Final = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d{1,2})?")
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "false": False}


def find_tables(root: Path) -> list[Path]:
    """Return the `.csv` files in a folder that name images and labels, sorted."""
    names = sorted(name for name in os.listdir(root) if name.lower().endswith(".csv") and is_visible(name))
    return [root / name for name in names if _names_images(root / name)]


def _names_images(table: Path) -> bool:
    try:
        with open(table, "rb") as file:
            header = file.readline(1 << 16).decode("utf-8-sig", "replace")
    except OSError as error:
        raise BadData(f"{table} cannot be read: {cause_of(error)}") from error
    columns = {column.strip(' "\r\n').lower() for column in re.split("[,;\t]", header)}
    return all(columns & each for each in _NEEDED)


def read_table(root: Path, only: Path | None = None) -> Catalog:
    """Return a row for each line whose image is there, of the one table in `root`, or of `only` that one."""
    tables = [only] if only else find_tables(root)
    if len(tables) != 1:
        told = ", ".join(table.name for table in tables[:5]) or "no .csv table"
        raise BadData(f"{root} holds {told} with the columns path and label; give the one .csv file to read")
    table = tables[0]
    lines = _read_lines(table)
    names = [name for name in (lines[0][1] if lines else ()) if name.lower() not in _KNOWN]
    extra = {name: _column_reader([cells[name] for _, cells in lines]) for name in names}
    found, keys = list[Row](), set[str]()
    for number, cells in lines:
        where, named = f"line {number} of {table}", {name.lower(): cell for name, cell in cells.items()}
        image = path_below(root, root, named.get("path", named.get("image", "")), where)
        key = named.get("key", path_text(os.path.relpath(image, root)))
        if not key or key in keys:
            told = f"the key {key!r} again" if key else "an empty key"
            raise BadData(f"{where} has {told}; each row needs its own key")
        keys.add(key)
        split = known_split(named.get("split", ""), where)
        metadata = {name: kind(cells[name]) for name, kind in extra.items() if cells[name]}
        found.append(Row(key, File(image), named["label"], split, metadata))
    rows, absent = sort_out(found)
    if not rows:
        first = [os.path.relpath(row.image.path, root) for row in absent[:3]]
        told = f"none of its {len(absent)} images is there: {first}" if absent else "it has no rows"
        raise BadData(f"the table {table} gives no image below {root}: {told}")
    return Catalog(root, "csv", tuple(rows), table=table, absent=tuple(absent))


def read_text(source: Path | Member) -> str:
    """Read the whole of a file, or of a member of a tar, as UTF-8 text, with or without a byte-order mark."""
    try:
        return source.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadData(f"{source} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{source} is not UTF-8 text at byte {error.start}; save it as UTF-8") from error


def plain_values(values: Mapping[str, object]) -> dict[str, Plain]:
    """Return what there is of metadata that was not read from text, without what is no single value."""
    return {name: plain for name, value in values.items() if (plain := _plain(value)) is not None}


def _plain(value: object) -> Plain | None:
    """Whole numbers of more than 15 digits become text, as they are in a table; dates and times ISO text."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**15:
        return str(value)
    return value if isinstance(value, str | int) else None


def make_one_type(rows: Sequence[Row]) -> None:
    """Bring metadata to one type a field: decimals where all are numbers, and text where anything else is."""
    types = defaultdict[str, set[type]](set)
    for row in rows:
        for name, value in row.metadata.items():
            types[name].add(type(value))
    for name, found in types.items():
        if len(found) > 1:
            for metadata in (row.metadata for row in rows if name in row.metadata):
                value = metadata[name]
                if found == {int, float}:
                    metadata[name] = float(value)
                elif not isinstance(value, str):
                    metadata[name] = json.dumps(value)


def _column_reader(values: Sequence[str]) -> Callable[[str], Plain]:
    """Return what reads a filled cell of a column, all as one type."""
    filled = [value for value in values if value]
    if all(value.lower() in _TRUTHS for value in filled):
        return lambda value: _TRUTHS[value.lower()]
    if all(map(_INTEGER.fullmatch, filled)):
        return int
    return float if all(map(_DECIMAL.fullmatch, filled)) else str


def _read_lines(table: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the number and the stripped cells, by column name, of each line that is not blank."""
    text = read_text(table)
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    lines = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    found = []
    try:
        lines.fieldnames = header = [name.strip() for name in lines.fieldnames or ()]
        columns = [name.lower() for name in header]
        if twice := next((name for name in columns if columns.count(name) > 1), ""):
            raise BadData(f"the table {table} has the column {twice!r} twice")
        lacking = [" or ".join(sorted(names, reverse=True)) for names in _NEEDED if not names & {*columns}]
        if lacking:
            raise BadData(
                f"the table {table} lacks the column {' and the column '.join(lacking)}; "
                f"its first line names {', '.join(header) or 'nothing'}"
            )
        for cells in lines:
            if None in cells or None in cells.values():  # as `csv` fills in what is over or lacking
                raise BadData(f"line {lines.line_num} of {table} has not {len(header)} cells, as line 1 has")
            found.append((lines.line_num, {name: cell.strip() for name, cell in cells.items()}))
    except csv.Error as error:
        raise BadData(f"line {lines.line_num} of {table} is not a line of a table: {error}") from error
    return found
