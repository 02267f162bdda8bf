"""Vector files: items with their vectors as one parquet file, out of a gallery and into one.

A row is an item: `key`, `label`, `uri`, `metadata` (JSON text), `vector` (float32, d of them) and, where it
was wanted, `thumbnail` (a JPEG). The schema's metadata says under `crossbatch` which model made the vectors.
A file of others has `key` and `vector`; what else stands there in single values becomes metadata.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.catalog.parquet import kind_of, open_parquet, values_of
from serving.catalog.table import plain_values
from serving.errors import (
    BadData,
    BadSetting,
    CrossbatchError,
    InvalidArgument,
    ModelMismatch,
    NotFound,
    cause_of,
)
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.folder import made_aside
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.index.builder import Advance
from serving.gallery.item import MAX_EXACT, MAX_KEY_BYTES, GalleryItem
from serving.gallery.place import AnyGallery, Galleries
from serving.gallery.store.schema import FILE_NAME, MAX_DIMENSION, MAX_THUMBNAIL_SIDE, MadeFor
from serving.gallery.store.store import create_store
from serving.parquet import parquet_written

__all__ = [
    "Maker", "export_items", "import_items", "made_for", "maker_of", "pages", "unfinished", "vectors_written",
]  # fmt: skip

_NOTE = "crossbatch"
_COLUMNS = ("key", "label", "uri", "metadata", "thumbnail", "vector")
_FITTING: Final = {  # what a column may hold, by `_kind`, and what that is called
    "key": {"text": "text", "number": "whole numbers"},
    "label": {"text": "text", "number": "whole numbers"},
    "uri": {"text": "text"},
    "thumbnail": {"bytes": "bytes"},
    "vector": {"floats": "lists of floats"},
}
_MOST_NAME = 53  # letters of a gallery's name that leave room for `.unfinished`
_AT_ONCE = 1024  # items that are read or stored together
_GROUP_BYTES, _GROUP_ROWS = 32 << 20, 65_536  # of vectors, at most: readers hold a row group or two


class Maker(BaseModel):
    """The model that made vectors, and the longer side in pixels of the thumbnails beside them, if any."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1, max_length=MAX_KEY_BYTES)
    fingerprint: str = Field(min_length=1, max_length=MAX_KEY_BYTES)
    fp32_fingerprint: str | None = None
    dimension: int = Field(ge=1, le=MAX_DIMENSION)
    thumbnail_side: int = Field(0, ge=0, le=MAX_THUMBNAIL_SIDE)


@contextmanager
def vectors_written(path: Path, maker: Maker) -> Iterator[Callable[[Iterable[GalleryItem]], None]]:
    """Yield what puts items into a new file, which is there, whole and on disk, when the block ends."""
    columns = dict.fromkeys(_COLUMNS[:4], "string") | {"vector": "vector"}
    columns |= {"thumbnail": "binary"} if maker.thumbnail_side else {}
    most = max(1, min(_GROUP_ROWS, _GROUP_BYTES // (4 * maker.dimension)))
    rows = list[dict[str, Any]]()
    with parquet_written(path, columns, {_NOTE: maker.model_dump_json()}) as write:

        def put(items: Iterable[GalleryItem]) -> None:
            for item in items:
                row = {name: getattr(item, name) for name in columns}
                rows.append(row | {"metadata": json.dumps(dict(item.metadata), ensure_ascii=False)})
                if len(rows) == most:
                    write(rows)
                    rows.clear()

        yield put
        if rows:
            write(rows)


def export_items(
    gallery: AnyGallery, path: Path, *, thumbnails: bool = False, advance: Advance = lambda *_: None
) -> int:
    """Write all items to a new vector file, in the order of their keys; returns how many.

    An item that is written meanwhile is in it once, old or new.
    """
    maker, count, total = maker_of(gallery, thumbnails=thumbnails), 0, gallery.info().items
    with vectors_written(path, maker) as put:
        for items in pages(gallery, thumbnails=maker.thumbnail_side > 0):
            put(items)
            count += len(items)
            advance("export", count, max(count, total))
    return count


def maker_of(gallery: AnyGallery, *, thumbnails: bool) -> Maker:
    """Return the model that a gallery is made for, with the side of its thumbnails where they are wanted."""
    meta = gallery.meta
    side = meta.thumbnail_side if thumbnails else 0
    return Maker(
        name=meta.model_name, fingerprint=meta.fingerprint, dimension=meta.dimension, thumbnail_side=side
    )


def made_for(maker: Maker) -> MadeFor:
    """Return what a gallery is made for that is to hold vectors of a model."""
    return {
        "model_name": maker.name,
        "fingerprint": maker.fingerprint,
        "dimension": maker.dimension,
        "thumbnail_side": maker.thumbnail_side,
    }


def unfinished(name: str) -> str:
    """Return the name that a new gallery has while it is filled, where it cannot be filled out of sight."""
    if len(check_name(name)) > _MOST_NAME:
        name = f"{name[: _MOST_NAME - 9].rstrip('.')}-{blake2b(name.encode(), digest_size=4).hexdigest()}"
    return f"{name}.unfinished"


def pages(gallery: AnyGallery, *, thumbnails: bool = False) -> Iterator[list[GalleryItem]]:
    """Yield all items by key, some at a time, each of the state that is there then."""
    after = ""
    while items := [*islice(gallery.by_key(after=after, thumbnails=thumbnails), _AT_ONCE)]:
        after = items[-1].key
        yield items


def import_items(
    directory: Galleries,
    name: str,
    path: Path,
    *,
    model: Maker | None = None,
    advance: Advance = lambda *_: None,
) -> int:
    """Put the items of a vector file into a gallery, in place of those with their keys; returns its rows.

    A gallery that is not there appears complete, with its index, or not at all; one that is there takes 1,024
    items at a time. The model is needed where the file does not say which made its vectors. ModelMismatch
    tells that it is another than the gallery's, BadData that the file is damaged, lacks a column, has one of
    another type or a key twice: of such a file nothing is stored.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}; give a parquet file with the columns key and vector")
    with _told(path):
        opened = open_parquet(path)
    with closing(opened) as file:
        maker = _maker_of(file.schema_arrow, path, model)
        if name in directory.names():
            return _fill(directory.get(name), file, path, maker, advance)
        if isinstance(directory, GalleryDirectory):
            with made_aside(directory.path / check_name(name)) as aside:
                create_store(aside / FILE_NAME, **made_for(maker))
                with closing(Gallery.open(aside, policy=RebuildPolicy(automatic=False))) as gallery:
                    return _fill(gallery, file, path, maker, advance)
        growing = directory.create(
            unfinished(name), **made_for(maker.model_copy(update={"thumbnail_side": 0}))
        )
        try:
            rows = _fill(growing, file, path, maker, advance)
        except BaseException:
            with suppress(CrossbatchError):  # the Milvus may be what has failed
                directory.drop(unfinished(name))
            raise
        directory.switch(name, unfinished(name))
        return rows


def _fill(gallery: AnyGallery, file: Any, path: Path, maker: Maker, advance: Advance) -> int:
    gallery.check_model(maker)
    count = 0
    for items in _items(file, path, thumbnails=gallery.meta.thumbnail_side > 0):
        try:
            gallery.upsert(items)
        except InvalidArgument as error:
            raise error.saying(f"{path}: {_by_row(str(error), count)}") from error
        count += len(items)
        advance("import", count, file.metadata.num_rows)
    gallery.rebuild(whole=False, progress=advance)
    return count


def _by_row(message: str, first: int) -> str:
    return re.sub(r"items\[(\d+)\]", lambda found: f"row {first + int(found[1])}", message)


def _items(file: Any, path: Path, *, thumbnails: bool) -> Iterator[list[GalleryItem]]:
    """Yield the items of a file, some rows at a time, whatever its row groups are."""
    schema = file.schema_arrow
    named = {name.lower(): name for name in schema.names}
    if len(named) < len(schema.names):
        raise BadData(f"{path} has a column twice, Key being key; it has {', '.join(schema.names)}")
    if lacking := [name for name in ("key", "vector") if name not in named]:
        raise BadData(
            f"{path} lacks the column {' and the column '.join(lacking)}; it has {', '.join(schema.names)}: "
            "rename what they are called there"
        )
    kinds = {field.name: kind_of(field.type) for field in schema if field.name.lower() not in _COLUMNS}
    more = [name for name, kind in kinds.items() if kind in ("number", "text", "value")]
    wanted = [named[name] for name in _COLUMNS if name in named and (thumbnails or name != "thumbnail")]
    for name in wanted:
        of, fitting = schema.field(name).type, _FITTING.get(name.lower())
        if fitting and str(of) != "null" and _kind(of) not in fitting:
            told = f"the column {name} of {path} is of the type {str(of)[:80]}"
            raise BadData(f"{told}; expected {' or '.join(fitting.values())}: write it as such")
    _check_keys(file, path, named["key"])
    first = 0
    for cells in _batches(file, path, wanted + more):
        vectors = cells[named["vector"]]
        nothing = [None] * len(vectors)
        keys, labels, uris, metadata, pictures = (
            cells.get(named.get(name, ""), nothing) for name in _COLUMNS if name != "vector"
        )
        yield [
            GalleryItem(
                _text(keys[row]),
                vector,
                label=_text(labels[row]),
                uri=_text(uris[row]),
                metadata=plain_values({name: cells[name][row] for name in more})
                | _metadata(metadata[row], f"{path}: row {first + row}"),
                thumbnail=pictures[row] or b"",
            )
            for row, vector in enumerate(vectors)
        ]
        first += len(vectors)


def _kind(of: Any) -> str:
    """Say what a column holds: `floats` for lists of them, else as `kind_of`, to which images are bytes."""
    of = getattr(of, "storage_type", of)  # tensors of a fixed shape are lists
    if not of.num_fields:
        return kind_of(of)
    return "floats" if str(getattr(of, "value_type", "")) in ("halffloat", "float", "double") else "other"


def _check_keys(file: Any, path: Path, column: str) -> None:
    """Read the keys alone, before anything is stored: none may be empty or come twice."""
    keys = set[str]()
    for cells in _batches(file, path, [column]):
        for key in map(_text, cells[column]):
            if not key or key in keys:
                told = f"the key {key!r:.80} again" if key else "an empty key"
                raise BadData(f"{path}: row {len(keys)} has {told}; each row needs its own key")
            keys.add(key)


def _batches(file: Any, path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the cells of some rows at a time, by column."""
    with _told(path):
        for batch in file.iter_batches(_AT_ONCE, columns=columns):
            yield {name: _cells(batch.column(name)) for name in columns}


def _cells(column: Any) -> Any:
    """Return a column as values of Python, of lists of floats as arrays, and of a struct as dicts."""
    kind = _kind(column.type)
    if kind == "floats":
        return column.to_numpy(zero_copy_only=False)
    if not str(column.type).startswith("struct<"):
        return values_of(column)
    names = [field.name for field in column.type]  # each a column, as `values_of` wants dates
    return [dict(zip(names, row, strict=True)) for row in zip(*map(values_of, column.flatten()), strict=True)]


def _maker_of(schema: Any, path: Path, given: Maker | None) -> Maker:
    """Return the model that made the vectors of a file, by its own word or that of who gave it."""
    note = (schema.metadata or {}).get(_NOTE.encode())
    if note is None:
        if given is None:
            raise BadSetting(f"{path} does not say which model made its vectors; give its file by --model")
        return given
    try:
        told = Maker.model_validate_json(note)
    except ValidationError as error:
        raise BadData(f"what {path} tells of its model is damaged; write it again") from error
    if given is not None and told.fingerprint != given.fingerprint:
        raise ModelMismatch(
            f"{path} holds vectors of the model {told.name} (fingerprint {told.fingerprint[:12]}), and the"
            f" model given is {given.name} (fingerprint {given.fingerprint[:12]}); leave --model out"
        )
    return told


def _metadata(cell: Any, where: str) -> dict[str, Any]:
    """Read the metadata of an item: JSON text, a struct, or a map."""
    try:
        if isinstance(cell, str):
            value = json.loads(cell or "{}", parse_int=_whole)
        else:  # where null stands for what an item lacks
            value = {name: each for name, each in _plain(dict(cell or {})).items() if each is not None}
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadData(
            f"{where}: the metadata {cell!r:.80} is no JSON object; make it one, or leave the cell empty"
        )
    return value


def _whole(digits: str) -> int | str:
    """Read a whole number of JSON; one of which a client's double would lose digits stays text."""
    return int(digits) if len(digits) <= 17 and abs(int(digits)) <= MAX_EXACT else digits


def _plain(value: Any) -> Any:
    """Return a value of a struct or a map with all that it holds as `plain_values` has them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return plain_values({"": value}).get("", None if isinstance(value, float) else value)


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what a library raises on a file's contents into an error of ours."""
    try:
        yield
    except CrossbatchError:
        raise
    except Exception as error:  # pyarrow may raise anything on bytes that it did not expect
        raise BadData(f"the parquet file {path} cannot be read, or is damaged: {cause_of(error)}") from error
