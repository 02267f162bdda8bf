"""A table of text on disk (csv) as lines of named cells, with every fault named by its line."""

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from serving.errors import BadData

__all__ = ["column_reader", "find_table", "plain_value", "read_lines", "read_text"]

# No leading zeros: 007 is a name. At most 15 digits: on the wire metadata are doubles, which hold no more.
_INTEGER: Final = re.compile(r"-?(0|[1-9]\d{0,14})")
_DECIMAL: Final = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d{1,2})?")
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "false": False}
_MOST_BYTES: Final = 1 << 30  # the table is read whole


def find_table(root: Path, *, required: bool) -> Path | None:
    """Return the `.csv` file in the folder `root` that names images and labels, if there is one.

    Raises:
        BadData: More than one does; or none does and one is `required`.
    """
    fitting = []
    try:
        names = sorted(name for name in os.listdir(root) if name.lower().endswith(".csv") and name[0] != ".")
        if required and len(names) == 1:
            return root / names[0]
        for name in names:
            with open(root / name, "rb") as file:
                header = file.readline(1 << 16).decode("utf-8-sig", "replace")
            columns = {column.strip(' "\r\n').lower() for column in re.split("[,;\t]", header)}
            if "label" in columns and columns & {"path", "image"}:
                fitting.append(name)
    except OSError as error:
        raise BadData(f"the data folder {root} cannot be read: {error.strerror or error}") from error
    if len(fitting) > 1 or (required and not fitting):
        raise BadData(
            f"{root} holds {len(fitting)} .csv tables with the columns path and label"
            f"{' (' + ', '.join(fitting[:5]) + ')' if fitting else ''}; give the one .csv file to read"
        )
    return root / fitting[0] if fitting else None


def read_lines(table: Path, *, needed: Sequence[tuple[str, ...]] = ()) -> list[tuple[int, dict[str, str]]]:
    """Read a comma-, semicolon- or tab-separated UTF-8 table whose first line names the columns.

    Args:
        table: The file.
        needed: Column names that must be there, in any case; of each tuple one.

    Returns:
        Line number and stripped cells by column name, for each line that is not blank.

    Raises:
        BadData: Not readable, not UTF-8, a column missing or twice, or a line of another length.
    """
    text = read_text(table, "table")
    first = text.partition("\n")[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    try:
        header = [name.strip() for name in next(lines, [])]
        _check_header(table, header, needed)
        found = []
        for line in lines:
            if not line:
                continue
            if len(line) != len(header):
                raise BadData(
                    f"line {lines.line_num} of {table} has {len(line)} cells; line 1 has {len(header)}"
                )
            cells = (cell.strip() for cell in line)
            found.append((lines.line_num, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise BadData(f"line {lines.line_num} of {table} is not a line of a table: {error}") from error
    return found


def read_text(path: Path, what: str) -> str:
    """Read a whole file as UTF-8 text, with or without a byte-order mark.

    Args:
        path: The file.
        what: What to call it in messages.

    Raises:
        BadData: Not there, not readable, too large, or not UTF-8.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadData(f"the {what} {path} is larger than {_MOST_BYTES >> 20} MiB; cut it into several")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadData(
            f"the {what} {path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from error
    except UnicodeDecodeError as error:
        raise BadData(
            f"the {what} {path} is not UTF-8 text at byte {error.start}; save it as UTF-8"
        ) from error


def column_reader(values: Sequence[str]) -> Callable[[str], str | int | float | bool]:
    """Return what reads a filled cell of a column, all as one type: so a filter compares like with like."""
    filled = [value for value in values if value]
    if all(value.lower() in _TRUTHS for value in filled):
        return lambda value: _TRUTHS[value.lower()]
    if all(_INTEGER.fullmatch(value) for value in filled):
        return int
    return float if all(_DECIMAL.fullmatch(value) for value in filled) else str


def plain_value(value: object) -> str | int | float | bool | None:
    """Return one value of metadata that was not read from text; None where it is none, or no single value.

    Whole numbers of more than 15 digits become text, as they are in a table.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**15:
        return str(value)
    return value if isinstance(value, str | int) else None


def _check_header(table: Path, header: Sequence[str], needed: Sequence[tuple[str, ...]]) -> None:
    columns = [name.lower() for name in header]
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise BadData(f"the table {table} has the column {twice[0]!r} twice")
    lacking = [" or ".join(names) for names in needed if not set(names) & set(columns)]
    if lacking:
        raise BadData(
            f"the table {table} lacks the column {' and the column '.join(lacking)}; "
            f"its first line names {', '.join(header) or 'nothing'}"
        )
