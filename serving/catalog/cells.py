"""Images that are cells of a parquet file: read a run of rows at a time, of which the last few are kept.

A parquet file has no way to one row: whoever asks for rows in order reads each run once; whoever jumps
about in more than what is kept, each time anew from the beginning of its row group.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving.catalog.arrow import open_file, told
from serving.catalog.picture import check_length
from serving.errors import BadImage, CrossbatchError

__all__ = ["Cell", "Column"]

_RUN_BYTES: Final = 32 << 20
"""How many bytes of images are read in one go: about, as a row group says only what all of it has."""
_KEPT_BYTES: Final = 64 << 20
_OPEN: Final = 8
"""Most row groups that are being read."""


@dataclass(frozen=True, slots=True)
class Column:
    """The images of one file."""

    file: Path
    """Absolute path."""
    name: str
    """With the field's name behind a point, where it is one of a struct."""
    size: int
    """Of the file, in bytes, when its rows were listed."""
    mtime_ns: int
    """Time of the file's last change then."""


@dataclass(frozen=True, slots=True)
class Cell:
    """An image that is a cell of a parquet file."""

    column: Column
    row: int
    """Number of the row in the file, from 0."""
    group: int
    """Number of its row group."""
    index: int
    """Number of the row in its group."""

    def __str__(self) -> str:
        return f"row {self.row} of {self.column.file}"

    @property
    def path(self) -> Path:
        """The file's path and, as if it were a folder, the number of the row."""
        return self.column.file / f"{self.row:08}"

    def read_bytes(self) -> bytes:
        """Return the bytes of the cell, if the file is the one that was listed.

        Raises:
            BadImage: It is null, empty, or longer than `MAX_BYTES`.
            OSError: The file cannot be read, is damaged, or is another.
        """
        try:
            data = _runs.read(self)
        except CrossbatchError:
            raise
        except Exception as error:  # pyarrow may raise anything on bytes that it did not expect
            if isinstance(error, OSError) and error.strerror:  # the disk's own
                raise
            raise OSError(f"{self} cannot be read: {told(error)}") from error
        if not data:
            raise BadImage(f"{self} holds no image: its cell is {'empty' if data == b'' else 'null'}")
        return data

    def stamp(self) -> tuple[int, int]:
        """Return the size in bytes and the time of change in nanoseconds of the file."""
        return self.column.size, self.column.mtime_ns


class _Stream:
    """The runs of one row group, in order; `at` is the row of the group that comes next."""

    def __init__(self, column: Column, group: int) -> None:
        found = os.stat(column.file)
        if (found.st_size, found.st_mtime_ns) != (column.size, column.mtime_ns):
            raise OSError(f"{column.file} has changed since its rows were listed")
        file = open_file(column.file)
        about = file.metadata.row_group(group)
        size = sum(
            chunk.total_uncompressed_size
            for chunk in map(about.column, range(about.num_columns))
            if chunk.path_in_schema == column.name
        )
        rows = max(1, min(about.num_rows, _RUN_BYTES * about.num_rows // max(size, 1)))
        self._runs: Iterator[Any] = file.iter_batches(rows, row_groups=[group], columns=[column.name])
        self._group, self._rows = group, about.num_rows
        self.at = 0

    @property
    def is_over(self) -> bool:
        """Whether no run is left."""
        return bool(self.at >= self._rows)

    def next(self) -> Any:
        """Return the images of the next run, an array of binaries.

        Raises:
            OSError: There is none.
        """
        run = next(self._runs, None)
        if run is None:
            raise OSError(f"its row group {self._group} ends at row {self.at}")
        self.at += run.num_rows
        images = run.column(0)
        return images.flatten()[0] if images.type.num_fields else images


class _Runs:
    """The runs of rows that were read last, for all threads of a process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; the lock, too, which a thread of a parent process may have held."""
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Column, int, int], Any] = OrderedDict()
        self._streams: OrderedDict[tuple[Column, int], _Stream] = OrderedDict()

    def read(self, cell: Cell) -> bytes | None:
        """Return the bytes of a cell, None where it is null."""
        with self._lock:
            run, start = self._kept_run(cell) or self._read_run(cell)
        data = run[cell.index - start].as_buffer()
        if data is None:
            return None
        check_length(data.size)
        return bytes(data)

    def _kept_run(self, cell: Cell) -> tuple[Any, int] | None:
        for place in reversed(self._kept):  # rows come mostly in order: it is one of the last
            column, group, start = place
            run = self._kept[place]
            if group == cell.group and 0 <= cell.index - start < len(run) and column == cell.column:
                self._kept.move_to_end(place)
                return run, start
        return None

    def _read_run(self, cell: Cell) -> tuple[Any, int]:
        place = cell.column, cell.group
        # Taken out while it is used: one that fails is opened anew by whoever comes next.
        stream = self._streams.pop(place, None)
        if stream is None or stream.at > cell.index:
            stream = _Stream(*place)
        start, run = 0, ()
        while stream.at <= cell.index:
            start, run = stream.at, stream.next()
            self._kept[*place, start] = run  # those on the way, too: another thread is after them
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        if not stream.is_over:
            self._streams[place] = stream
        while len(self._streams) > _OPEN:
            self._streams.popitem(last=False)
        return run, start


_runs = _Runs()
os.register_at_fork(after_in_child=_runs.forget)
