"""What can be wrong with one item as it lies on the disk."""

import json
import zlib
from typing import Any

import numpy as np

from serving.errors import InvalidArgument
from serving.gallery.item import check_key

__all__ = ["fault", "shown"]

_NORM_TOLERANCE = 1e-3


def fault(row: tuple[Any, ...], dimension: int) -> str:
    """Return what is wrong with an item of `Reader.as_stored`; empty where it is whole."""
    _, key, label, uri, metadata, vector, checksum, sourced = row
    if None in (key, label, uri, metadata, vector):
        return "a part of it is missing"
    if zlib.crc32(vector, zlib.crc32(b"\0".join((key, label, uri, metadata)))) != checksum:
        return "its checksum is not that of its key, texts and vector: one of them was altered"
    try:
        check_key(key.decode())
        label.decode()
        uri.decode()
        if not isinstance(json.loads(metadata), dict):
            return "its metadata is no JSON object"
    except (ValueError, RecursionError, InvalidArgument) as error:
        return f"a text of it cannot be read: {error}"
    if len(vector) != 4 * dimension:
        return f"its vector is {len(vector)} bytes long, expected {4 * dimension}"
    values = np.frombuffer(vector, "<f4").astype(np.float64)
    if not np.isfinite(values).all():
        return "its vector holds a value that is not finite"
    norm = float(np.sqrt(values @ values))
    if abs(norm - 1.0) > _NORM_TOLERANCE:
        return f"its vector has norm {norm:.6g}, expected 1"
    if not sourced:
        return "the file it was made from is not noted in full"
    return ""


def shown(row: tuple[Any, ...]) -> str:
    """Return the key of an item of `Reader.as_stored`, quoted."""
    return repr((row[1] or b"").decode(errors="replace"))
