"""Writes parquet files, a row group at a time; they appear whole or not at all, never over another file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from serving.catalog.parquet import arrow_parquet
from serving.gallery.disk import written_once

__all__ = ["Rows", "parquet_written"]

Rows: TypeAlias = Sequence[Mapping[str, Any]]


@contextmanager
def parquet_written(
    path: Path, columns: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> Iterator[Callable[[Rows], None]]:
    """Yield what writes rows as a row group of a new file, which is there when the block ends.

    A column is of the type that Arrow calls so ("string", "float32", ...), or "vector": lists of float32, as
    Milvus takes no lists of a fixed size. `notes` are metadata of the schema.
    """
    parquet = arrow_parquet()
    import pyarrow

    vector = pyarrow.list_(pyarrow.float32())
    types = [
        (name, vector if kind == "vector" else pyarrow.type_for_alias(kind)) for name, kind in columns.items()
    ]
    schema = pyarrow.schema(types, metadata=notes)
    # Distinct values, as keys and vectors are, gain nothing from a dictionary.
    with (
        written_once(path) as aside,
        parquet.ParquetWriter(aside, schema, use_dictionary=["query", "label"]) as writer,
    ):
        yield lambda rows: writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
