"""The format `parquet`: tables whose rows hold an image's bytes, or its path, and what belongs to it.

Labels, keys and metadata are read with the catalogue; images when they are asked for, a run of rows at a
time, of which the last few are kept. A parquet file has no way to one row: rows that are asked for out of
order are read anew from the beginning of a row group.
"""

import json
import os
import threading
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving.catalog.picture import File, Picture, check_length
from serving.catalog.rows import Catalog, Row, known_split
from serving.catalog.table import make_one_type, plain_values
from serving.catalog.walk import Shard, find_shards, path_below, sort_out
from serving.errors import BadData, BadImage, BadSetting, CrossbatchError, cause_of

__all__ = [
    "ENDINGS", "KEPT_BYTES", "RUN_BYTES", "Cell", "Group", "arrow_parquet", "kind_of", "open_parquet", "read",
    "values_of",
]  # fmt: skip

ENDINGS: Final[tuple[str, ...]] = (".parquet",)
RUN_BYTES: Final = 32 << 20
"""How many bytes of images are read in one go: about, as a row group says only what all of it has."""
KEPT_BYTES: Final = 64 << 20
_MOST_LEFT: Final = 8  # row groups that are being read
_BUFFER: Final = 1 << 20  # bytes read at once; without it a whole column of a row group is
_IMAGES: Final = ("image", "img", "path")
_KINDS: Final = {  # by pyarrow's names of types
    "number": ("integer",),
    "text": ("string", "large_string", "string_view"),
    "bytes": ("binary", "large_binary", "binary_view"),
    "value": ("floating", "boolean", "decimal", "date", "time", "timestamp"),
}


def read(root: Path, only: Path | None, exclude: Sequence[str], text: Collection[str]) -> Catalog:
    """Return a row for each row of the tables below `root`, or of `only` that one."""
    rows, absent = list[Row](), list[Row]()
    shards, listing = find_shards(root, only, ENDINGS, exclude)
    for shard in shards:
        try:
            found = _rows(shard, root)
        except CrossbatchError:
            raise
        except Exception as error:  # pyarrow may raise anything on bytes that it did not expect
            raise BadData(
                f"the parquet file {shard.path} cannot be read, or is damaged: {cause_of(error)}"
            ) from error
        if found and isinstance(found[0].image, File):
            found, gone, _ = sort_out(found)
            absent += gone
        rows += found
    if not rows:
        told = f"none of their {len(absent)} images is there ({absent[0].image})" if absent else ""
        raise BadData(f"the parquet files of {only or root} give no image: {told or 'they have no rows'}")
    return Catalog(
        root, "parquet", tuple(rows), table=only, absent=tuple(absent), left_out=listing.left_out,
        passed_over=listing.passed_over(ENDINGS), texts=make_one_type(rows, text),
    )  # fmt: skip


def _rows(shard: Shard, root: Path) -> list[Row]:
    path, stat = shard.path, os.stat(shard.path)
    with open_parquet(path) as file:
        schema, footer = file.schema_arrow, file.metadata
        types = {field.name: field.type for field in schema}
        kinds = {name: kind_of(of) for name, of in types.items()}
        image = _image_column(types, kinds, path)
        singles = [name for name, kind in kinds.items() if kind in ("number", "text", "value")]
        table = file.read(columns=singles, use_threads=False)
        values = {name: values_of(table.column(name)) for name in singles}
    named = {name.lower(): name for name in types}
    label, key, split = (named.get(name, "") for name in ("label", "key", "split"))
    label = label or named.get("class", "")
    for name in (label, key, split):
        if name and kinds[name] not in ("number", "text"):
            raise BadData(f"the column {name} of {path} is of the type {types[name]}; give text or integers")
    classes = _class_names(schema, label)
    column = f"{image}.bytes" if types[image].num_fields else image
    cells, first = list[Cell](), 0
    for group in range(footer.num_row_groups):
        of = Group(path, column, group, first, stat.st_size, stat.st_mtime_ns)
        first += footer.row_group(group).num_rows
        cells += (Cell(of, row) for row in range(of.first, first))
    rows = []
    for number, cell in enumerate(cells):
        where, own = f"row {number} of {path}", {name: cells[number] for name, cells in values.items()}
        own_key = _text(own.pop(key)) if key else f"{shard.name}/{number:08}"
        if not own_key:
            raise BadData(f"{where} has an empty key; each row needs its own key")
        picture: Picture = cell
        if image in own:
            picture = File(path_below(root, path.parent, own.pop(image) or "", where))
        side = known_split(_text(own.pop(split)), where) if split else shard.split
        of_class = _label(own.pop(label), classes, where) if label else ""
        rows.append(Row(own_key, picture, of_class, side, plain_values(own)))
    return rows


def _image_column(types: Mapping[str, Any], kinds: Mapping[str, str], path: Path) -> str:
    """Return the name of the column with the images' bytes, or else of that with their paths."""
    of_bytes = [name for name in types if kinds[name] == "bytes"]
    possible = of_bytes or [name for name in types if kinds[name] == "text"]
    named = [name for wanted in _IMAGES for name in possible if name.lower() == wanted]
    if named or len(of_bytes) == 1:
        return (named or of_bytes)[0]
    told = ", ".join(f"{name} ({str(of)[:80]})" for name, of in types.items())
    raise BadData(
        f"the parquet file {path} has {'several' if of_bytes else 'no'} columns of images: bytes, {{bytes,"
        f" path}}, or paths in a column image or path; call one image; it has {told or 'no columns'}"
    )


def _label(value: object, classes: Sequence[str], where: str) -> str:
    """Return a class's name, empty where there is none: null or, among whole numbers, below 0."""
    if not isinstance(value, int):
        return _text(value)
    if classes and value >= len(classes):
        raise BadData(f"{where} has the label {value}, and there are {len(classes)} classes, from 0 on")
    return "" if value < 0 else classes[value] if classes else str(value)


def _class_names(schema: Any, column: str) -> list[str]:
    """Return the classes' names of a column of numbers where the package datasets has written them."""
    try:
        return [*map(str, json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]["names"])]
    except (KeyError, TypeError, ValueError, RecursionError):  # written by something else
        return []


def _text(value: object) -> str:
    return "" if value is None else unicodedata.normalize("NFC", str(value).strip())


def arrow_parquet() -> Any:
    """Return the module `pyarrow.parquet`; BadSetting tells that it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise BadSetting(
            "pyarrow is not installed, which parquet files need; install crossbatch[parquet]"
        ) from error
    return parquet


def open_parquet(path: Path) -> Any:
    """Open a file for reading bit by bit; a `pyarrow.parquet.ParquetFile`."""
    return arrow_parquet().ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


def kind_of(of: Any) -> str:
    """Say what a type is: `bytes` of images, whole `number`, `text`, another single `value`, or `other`."""
    from pyarrow import types

    if types.is_dictionary(of):
        kind = kind_of(of.value_type)
        return "other" if kind == "bytes" else kind
    if types.is_struct(of):  # {bytes, path}, as the package datasets writes images
        index = of.get_field_index("bytes")
        return "bytes" if index >= 0 and kind_of(of.field(index).type) == "bytes" else "other"
    fitting = (kind for kind, names in _KINDS.items() if any(getattr(types, f"is_{it}")(of) for it in names))
    return next(fitting, "other")


def values_of(column: Any) -> Any:
    """Return a column as values of Python, None where there is none."""
    import pyarrow
    from pyarrow import types

    of = column.type
    if types.is_timestamp(of):  # Python knows no nanoseconds
        column = column.cast(pyarrow.timestamp("us", of.tz), safe=False)
    elif types.is_time64(of):
        column = column.cast(pyarrow.time64("us"), safe=False)
    return column.to_pylist()


@dataclass(frozen=True, slots=True)
class Group:
    """The images of a row group, in a file of that size and time of change when its rows were listed."""

    file: Path
    column: str
    """With the field's name behind a point, where it is one of a struct."""
    number: int
    first: int
    """Its first row, as the rows of the file are counted."""
    size: int
    mtime_ns: int

    def runs(self) -> Iterator[Any]:
        """Yield the images as arrays of binaries, each of a run of rows."""
        stat = os.stat(self.file)
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise OSError(f"{self.file} has changed since its rows were listed")
        file = open_parquet(self.file)
        about = file.metadata.row_group(self.number)
        chunks = map(about.column, range(about.num_columns))
        size = sum(each.total_uncompressed_size for each in chunks if each.path_in_schema == self.column)
        rows = max(1, min(about.num_rows, RUN_BYTES * about.num_rows // max(size, 1)))
        for run in file.iter_batches(rows, row_groups=[self.number], columns=[self.column]):
            images = run.column(0)
            yield images.flatten()[0] if images.type.num_fields else images


@dataclass(frozen=True, slots=True)
class Cell:
    """An image that is a cell of a parquet file."""

    group: Group
    row: int

    def __str__(self) -> str:
        return f"row {self.row} of {self.group.file}"

    @property
    def path(self) -> Path:
        """The file's path and, as if it were a folder, the number of the row."""
        return self.group.file / f"{self.row:08}"

    def read_bytes(self) -> bytes:
        """Return the bytes of the cell, if the file is the one that was listed."""
        try:
            data = _runs.read(self)
        except CrossbatchError:
            raise
        except Exception as error:  # pyarrow may raise anything
            if isinstance(error, OSError) and error.strerror:  # the disk's own
                raise
            raise OSError(f"{self} cannot be read: {cause_of(error)}") from error
        if not data:
            raise BadImage(f"{self} holds no image: its cell is {'empty' if data == b'' else 'null'}")
        return data

    def stamp(self) -> tuple[int, int]:
        """Return size and time of change of the file."""
        return self.group.size, self.group.mtime_ns


class _Runs:
    """The runs of rows that were read last, for all threads of a process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child must, with a lock and files of its own."""
        self._lock = threading.Lock()
        self._kept: dict[tuple[Group, int], Any] = {}  # by their first row
        self._left: dict[Group, tuple[int, Iterator[Any]]] = {}  # what comes next, and at which row

    def read(self, cell: Cell) -> bytes | None:
        """Return the bytes of a cell, None where it is null."""
        with self._lock:
            for (group, start), run in reversed(self._kept.items()):  # rows come mostly in order
                if 0 <= cell.row - start < len(run) and group == cell.group:
                    break
            else:
                start, run = self._read_on(cell)
        data = run[cell.row - start].as_buffer()
        if data is None:
            return None
        check_length(data.size)
        return bytes(data)

    def _read_on(self, cell: Cell) -> tuple[int, Any]:
        group = cell.group
        # Left out while it is used: one that fails is begun anew by whoever comes next.
        end, runs = self._left.pop(group, (0, iter(())))
        if not group.first < end <= cell.row:
            end, runs = group.first, group.runs()
        start, run = end, None
        while end <= cell.row:
            start, run = end, next(runs, None)
            if run is None:
                raise OSError(f"its row group ends at row {end}")
            end += len(run)
            self._kept[group, start] = run  # those on the way, too: another thread is after them
        self._left[group] = end, runs
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        if len(self._left) > _MOST_LEFT:
            del self._left[next(iter(self._left))]
        return start, run


_runs = _Runs()
os.register_at_fork(after_in_child=_runs.forget)
