"""The format `csv`, a table of images, and what other formats share with it: texts and metadata.

Its columns are `path` (or `image`) and `label`, `split` and `key` if wanted; any other is metadata.
"""

import codecs
import csv
import io
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from unicodedata import normalize

from serving.catalog.picture import File, Member
from serving.catalog.rows import Catalog, Plain, Row, known_split, path_text
from serving.catalog.walk import is_visible, path_below, sort_out
from serving.errors import BadData, cause_of

__all__ = ["find_tables", "make_one_type", "plain_values", "read_table", "read_text", "why_not_read"]

_NEEDED: Final = ({"path", "image"}, {"label"})  # of each one
_KNOWN: Final = frozenset(("path", "image", "label", "split", "key"))
# No leading zeros: 007 is a name. At most 15 digits: on the wire metadata are doubles, which hold no more.
_INTEGER: Final = re.compile(r"-?(0|[1-9]\d{0,14})")
_DECIMAL: Final = {
    ".": re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d{1,2})?"),
    # Points part thousands where a comma comes behind; 1.234 alone would be either.
    ",": re.compile(r"-?(0|[1-9]\d{0,14}|[1-9]\d{0,2}(\.\d{3}){1,4}(?=,))(,\d+)?([eE][+-]?\d{1,2})?"),
}
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "false": False}


def find_tables(root: Path) -> list[Path]:
    """Return the `.csv` files in a folder that name images and labels, sorted."""
    names = sorted(name for name in os.listdir(root) if name.lower().endswith(".csv") and is_visible(name))
    return [root / name for name in names if _names_images(_first_line(root / name))]


def why_not_read(table: Path) -> str:
    """Say why a `.csv` file among images was not read as their table."""
    names = _first_line(table)
    if _names_images(names):
        return f"{table} was not read; give it as the data set, as it names images"
    told = ", ".join(names)[:200] or "nothing"
    return f"{table} was not read: a table's first line names path (or image) and label, and this one {told}"


def _first_line(table: Path) -> list[str]:
    try:
        with open(table, "rb") as file:
            text = _decoded(file.read(1 << 16), "replace")
    except OSError as error:
        raise BadData(f"{table} cannot be read: {cause_of(error)}") from error
    return [name.strip(' "') for name in _header(_reader(text, strict=False))]


def _names_images(names: Sequence[str]) -> bool:
    return all({name.lower() for name in names} & each for each in _NEEDED)


def read_table(root: Path, only: Path | None, decimal: str, text: Collection[str]) -> Catalog:
    """Return a row for each line whose image is there, of the one table in `root`, or of `only` that one."""
    tables = [only] if only else find_tables(root)
    if len(tables) != 1:
        told = ", ".join(table.name for table in tables[:5]) or "no .csv table"
        raise BadData(f"{root} holds {told} with the columns path and label; give the one .csv file to read")
    table = tables[0]
    lines, notes = _read_lines(table)
    names = [name for name in (lines[0][1] if lines else ()) if name.lower() not in _KNOWN]
    extra, texts = dict[str, Callable[[str], Plain]](), list[str]()
    for name in names:
        filled = {number: cells[name] for number, cells in lines if cells[name]}
        extra[name] = str if name in text else _column_reader(filled.values(), decimal)
        if name not in text and extra[name] is str and (why := _why_text(filled, decimal)):
            texts.append(f"column {name} is text because of {why}")
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
    rows, absent, others = sort_out(found, table)
    if not rows:
        first = [os.path.relpath(row.image.path, root) for row in absent[:3]]
        told = f"none of its {len(absent)} images is there: {first}" if absent else "it has no rows"
        raise BadData(f"the table {table} gives no image below {root}: {told}")
    return Catalog(
        root, "csv", tuple(rows), table=table, absent=tuple(absent), notes=notes, texts=tuple(texts),
        passed_over=others,
    )  # fmt: skip


def read_text(source: Path | Member) -> str:
    """Read the whole of a file, or of a member of a tar: UTF-8, or UTF-16 with its mark; accents composed."""
    try:
        return _decoded(source.read_bytes(), "strict")
    except OSError as error:
        raise BadData(f"{source} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{source} is not UTF-8 text at byte {error.start}; save it as UTF-8") from error


def _decoded(data: bytes, errors: str) -> str:
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return normalize("NFC", data.decode("utf-16" if is_wide else "utf-8-sig", errors))


def plain_values(values: Mapping[str, object]) -> dict[str, Plain]:
    """Return what there is of metadata that was not read from text, without what is no single value."""
    return {name: plain for name, value in values.items() if (plain := _plain(value)) is not None}


def _plain(value: object) -> Plain | None:
    """Whole numbers of more than 15 digits become text, as they are in a table; dates and times ISO text."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite() and abs(value) >= 10**15:
        return format(value, "f")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**15:
        return str(value)
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, str | int) else None


def make_one_type(rows: Sequence[Row], text: Collection[str] = ()) -> tuple[str, ...]:
    """Bring metadata to one type a field: decimals where all are numbers, and text where anything else is.

    The fields in `text` are that in any case.

    Returns a sentence on each field that is text because of one value: the first that is of another type.
    """
    types, told = defaultdict[str, dict[type, Row]](dict), list[str]()  # the first row of each
    for row in rows:
        for name, value in row.metadata.items():
            types[name].setdefault(type(value), row)
    for name, found in types.items():
        is_text = name in text or not found.keys() <= {int, float}
        if len(found) > 1 or name in text:
            if is_text and name not in text:
                odd = found.get(str) or [*found.values()][1]
                told.append(f"field {name} is text because of {odd.metadata[name]!r:.80} in {odd.image}")
            for metadata in (row.metadata for row in rows if name in row.metadata):
                value = metadata[name]
                if not is_text:
                    metadata[name] = float(value)
                elif not isinstance(value, str):  # 7.0 was 7 before a null made its column one of decimals
                    is_whole = isinstance(value, float) and value.is_integer()
                    metadata[name] = json.dumps(int(value) if is_whole else value)
    return tuple(told)


def _column_reader(filled: Collection[str], decimal: str) -> Callable[[str], Plain]:
    """Return what reads a filled cell of a column, all as one type."""
    if all(value.lower() in _TRUTHS for value in filled):
        return lambda value: _TRUTHS[value.lower()]
    if all(map(_INTEGER.fullmatch, filled)):
        return int
    if not all(map(_DECIMAL[decimal].fullmatch, filled)):
        return str
    return float if decimal == "." else lambda value: float(value.replace(".", "").replace(",", "."))


def _why_text(filled: Mapping[int, str], decimal: str) -> str:
    """Say which cell keeps a column text of which at least half are numbers, written in either way."""
    odd = {number: cell for number, cell in filled.items() if not _DECIMAL[decimal].fullmatch(cell)}
    commas = {number for number, cell in odd.items() if _DECIMAL[","].fullmatch(cell)}
    if 2 * (len(odd) - len(commas)) > len(filled):
        return ""
    number = min(odd)
    points = any("." in cell for line, cell in filled.items() if line not in odd)
    hint = "; give --decimal ," if number in commas and not points else ""
    return f"{odd[number][:80]!r} in line {number}{hint}"


def _reader(text: str, *, strict: bool) -> Any:
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=strict)


def _header(lines: Any) -> list[str]:
    """Take the names of a table's columns from its reader; Excel may have put `sep=;` above them."""
    header: list[str] = next((cells for cells in lines if any(cells) and cells != ["sep=", ""]), [])
    return [name.strip() for name in header]


def _read_lines(table: Path) -> tuple[list[tuple[int, dict[str, str]]], tuple[str, ...]]:
    """Return the number and the stripped cells, by column name, of each line with a filled one; and notes."""
    lines = _reader(read_text(table), strict=True)
    found, nameless = list[tuple[int, dict[str, str]]](), 0
    try:
        header = _header(lines)
        columns, start = [name.lower() for name in header if name], lines.line_num
        if twice := next((name for name in columns if columns.count(name) > 1), ""):
            raise BadData(f"the table {table} has the column {twice!r} twice")
        lacking = [" or ".join(sorted(names, reverse=True)) for names in _NEEDED if not names & {*columns}]
        if lacking:
            raise BadData(
                f"the table {table} lacks the column {' and the column '.join(lacking)}; "
                f"its first line names {', '.join(header) or 'nothing'}"
            )
        for cells in lines:
            if not any(map(str.strip, cells)):
                continue
            if len(cells) != len(header):
                raise BadData(
                    f"line {lines.line_num} of {table} has not {len(header)} cells, as line {start} has"
                )
            pairs = [(name, cell.strip()) for name, cell in zip(header, cells, strict=True)]
            found.append((lines.line_num, {name: cell for name, cell in pairs if name}))
            nameless += any(cell and not name for name, cell in pairs)
    except csv.Error as error:
        raise BadData(f"line {lines.line_num} of {table} is not a line of a table: {error}") from error
    note = f"columns of {table} without a name were left out; {nameless} lines have something there"
    return found, (note,) if nameless else ()
