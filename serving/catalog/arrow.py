"""Parquet files, by pyarrow, which is imported here alone: what columns there are, and what they hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from serving.catalog.table import plain_value
from serving.errors import BadData, BadSetting

__all__ = ["Kind", "ParquetTable", "open_file", "told"]

Kind = Literal["bytes", "whole number", "text", "value", "other"]
"""What a column holds: image files; what a label can be; another single value; or none of these."""
_BUFFER: Final = 1 << 20  # bytes read at once; without it a whole column of a row group is


def open_file(path: Path) -> Any:
    """Open a file for reading bit by bit; a `pyarrow.parquet.ParquetFile`.

    Raises:
        BadSetting: pyarrow is not installed.
        OSError: The file cannot be read.
        Exception: It is no parquet file; pyarrow may raise anything.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise BadSetting(
            "pyarrow is not installed, which the format parquet needs; install crossbatch[parquet]"
        ) from error
    return parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


def told(error: Exception) -> str:
    """Return what an error of pyarrow says, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().split("\n")[0].rstrip(".")


class ParquetTable:
    """The columns of one file but for its images.

    Raises:
        BadData: The file cannot be read, or is no parquet file.
        BadSetting: pyarrow is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open_file(path)
            schema = self._file.schema_arrow
            self.groups = [
                self._file.metadata.row_group(group).num_rows
                for group in range(self._file.metadata.num_row_groups)
            ]
            self.kinds: Mapping[str, Kind] = {field.name: _kind(field.type) for field in schema}
            self.types: Mapping[str, str] = {field.name: str(field.type)[:80] for field in schema}
            self.structs = frozenset(field.name for field in schema if field.type.num_fields)
            self.class_names = _class_names(schema.metadata or {})
        except BadSetting:
            raise
        except Exception as error:
            raise self._damaged(error) from error
        if len(self.kinds) < len(schema):
            raise BadData(f"the parquet file {path} has two columns of one name; give each its own")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def values(self, name: str) -> list[Any]:
        """Return the values of a column of single values, in order, None where there is none.

        Whole numbers, texts and truths are such; what JSON has no form for is text, or left out.

        Raises:
            BadData: The column is damaged.
        """
        try:
            values = _python(self._file.read(columns=[name], use_threads=False).column(name))
        except Exception as error:
            raise self._damaged(error) from error
        if len(values) != sum(self.groups):
            raise self._damaged(ValueError(f"the column {name} has {len(values)} rows"))
        return values

    def _damaged(self, error: Exception) -> BadData:
        return BadData(f"the parquet file {self._path} cannot be read, or is damaged: {told(error)}")


def _python(column: Any) -> list[Any]:
    """Return a column as Python values: of one type, so that a filter compares like with like."""
    import pyarrow

    of = column.type
    if pyarrow.types.is_timestamp(of):  # Python knows no nanoseconds
        column = column.cast(pyarrow.timestamp("us", of.tz), safe=False)
    elif pyarrow.types.is_time64(of):
        column = column.cast(pyarrow.time64("us"), safe=False)
    values = column.to_pylist()
    if pyarrow.types.is_temporal(of):
        return [None if value is None else value.isoformat() for value in values]
    if pyarrow.types.is_floating(of) or pyarrow.types.is_decimal(of):
        return [None if value is None else plain_value(float(value)) for value in values]
    plain = [plain_value(value) for value in values]
    if pyarrow.types.is_integer(of) and str in map(type, plain):  # one is too long for a double
        return [None if value is None else str(value) for value in values]
    return plain


def _kind(of: Any) -> Kind:
    from pyarrow import types

    if types.is_dictionary(of):
        kind = _kind(of.value_type)
        return "other" if kind == "bytes" else kind
    if types.is_integer(of):
        return "whole number"
    if types.is_string(of) or types.is_large_string(of) or types.is_string_view(of):
        return "text"
    if types.is_date(of) or types.is_time(of) or types.is_timestamp(of) or types.is_decimal(of):
        return "value"
    if types.is_floating(of) or types.is_boolean(of):
        return "value"
    if types.is_struct(of):  # {bytes, path}, as the package datasets writes images
        index = of.get_field_index("bytes")
        return "bytes" if index >= 0 and _kind(of.field(index).type) == "bytes" else "other"
    return (
        "bytes" if types.is_binary(of) or types.is_large_binary(of) or types.is_binary_view(of) else "other"
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the classes' names of the columns for which the package datasets has written them."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and isinstance(feature.get("names"), list)
        }
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):  # written by something else
        return {}
