"""What can be wrong with items as they lie on the disk."""

import json
import zlib
from typing import Any

import numpy as np

from serving.errors import InvalidArgument
from serving.gallery.item import check_key

__all__ = ["faults", "shown"]

_NORM_TOLERANCE = 1e-3  # of what is accepted as a unit vector


def faults(block: list[tuple[Any, ...]], dimension: int) -> list[str]:
    """Return what is wrong with each item of a block of `Reader.as_stored`; empty where it is whole."""
    found = [_fault(row, dimension) for row in block]
    places = [place for place, words in enumerate(found) if not words]
    vectors = np.frombuffer(b"".join(block[place][5] for place in places), "<f4").reshape(-1, dimension)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("bd,bd->b", vectors, vectors, dtype=np.float64))  # (b,)
    finite = np.isfinite(vectors).all(axis=1)
    for which in np.flatnonzero(~(np.abs(norms - 1.0) <= _NORM_TOLERANCE)):  # the negation also finds NaN
        found[places[which]] = (
            f"its vector has norm {norms[which]:.6g}, expected 1"
            if finite[which]
            else "its vector holds a value that is not finite"
        )
    return found


def shown(row: tuple[Any, ...]) -> str:
    """Return the key of an item of `Reader.as_stored`, quoted."""
    return repr((row[1] or b"").decode(errors="replace"))


def _fault(row: tuple[Any, ...], dimension: int) -> str:
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
    return "" if sourced else "the file it was made from is not noted in full"
