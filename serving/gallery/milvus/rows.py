"""An item as a row of a collection, and back."""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from serving.errors import InvalidArgument
from serving.gallery.item import CheckedItem, GalleryItem, Source
from serving.gallery.milvus.expression import fitting, indexed

__all__ = ["ITEM_FIELDS", "LOTS", "TEXT_FIELDS", "in_parts", "item_of", "row_of"]

TEXT_FIELDS = ("label", "uri", "metadata", "version")
ITEM_FIELDS = ("key", "vector", *TEXT_FIELDS, "origin", "source")
LOTS = 1 << 62
"""Numbers of which each row has one by lot, to draw rows by."""
_LONGEST = 20  # digits of a number of 64 bits, with its sign
_PART_BYTES = 16 << 20  # of rows in one request; Milvus refuses 64 MB
_ROW_BYTES = 16_384  # of key, label, URI, origin and terms


def row_of(checked: CheckedItem, version: int) -> dict[str, Any]:
    """Return the row of an item; InvalidArgument where Milvus cannot take it."""
    item, metadata = checked
    try:
        json.loads(metadata, parse_int=_check_whole)
        terms, bounds = indexed(item.label, metadata)
        source = fitting(_source_json(item.source), "what is known of its file")
    except InvalidArgument as error:
        raise InvalidArgument(f"the item {item.key!r} cannot be stored: {error}") from error
    return {
        "key": item.key, "vector": item.vector, "label": item.label, "uri": item.uri, "metadata": metadata,
        "terms": terms, "bounds": bounds, "origin": item.source.origin if item.source else "",
        "source": source, "version": version, "lot": secrets.randbelow(LOTS),
    }  # fmt: skip


def item_of(row: dict[str, Any]) -> GalleryItem:
    """Return the item of a row's `ITEM_FIELDS`."""
    told, source = row["source"], None
    if row["origin"]:
        digest = bytes.fromhex(told["digest"])
        source = Source(row["origin"], told["size"], told["mtime_ns"], digest, told["given"])
    vector = np.array(row["vector"], np.float32)
    return GalleryItem(
        row["key"], vector, row["label"], row["uri"], row["metadata"], source, version=row["version"]
    )


def in_parts(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in lists that one request can take."""
    part, room = list[dict[str, Any]](), _PART_BYTES
    for row in rows:
        letters = sum(len(row[name]) for name in ("metadata", "bounds", "source"))
        size = row["vector"].nbytes + _ROW_BYTES + 4 * letters
        if part and size > room:
            yield part
            part, room = [], _PART_BYTES
        part.append(row)
        room -= size
    if part:
        yield part


def _check_whole(digits: str) -> None:
    if len(digits) > _LONGEST or not -(1 << 63) <= int(digits) < 1 << 64:
        raise InvalidArgument(f"its metadata has {digits:.30}, which Milvus would round; make it text")


def _source_json(source: Source | None) -> str:
    if source is None:
        return "{}"
    told = asdict(source) | {"digest": source.digest.hex()}
    del told["origin"]  # which has a field of its own
    return json.dumps(told, ensure_ascii=False)
