"""How arrays and metadata travel: float32 little-endian bytes, and google.protobuf.Struct."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import struct_pb2
from numpy.typing import NDArray

from serving.errors import InvalidArgument
from serving.gallery.item import MAX_EXACT, ROUNDED, check_metadata, plain

__all__ = ["bytes_of", "number_of", "plain_of", "struct_of", "vector_of"]


def bytes_of(vector: NDArray[np.floating[Any]]) -> bytes:
    """Pack a vector (d,) of any float type as float32, little-endian: 4 d bytes."""
    return np.ascontiguousarray(vector, dtype="<f4").tobytes()


def vector_of(data: bytes) -> NDArray[np.float32]:
    """Unpack a vector: float32 (d,), native byte order, read-only; InvalidArgument where it is none."""
    if len(data) % 4:
        raise InvalidArgument(f"A vector of {len(data)} bytes was sent; float32 values take a multiple of 4.")
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def struct_of(metadata: Mapping[str, Any]) -> struct_pb2.Struct:
    """Pack metadata as a Struct, whose numbers are doubles; InvalidArgument for what a Struct cannot hold.

    Values of NumPy come as plain ones, and dates as their ISO 8601 text.
    """
    check_metadata(metadata)
    struct = struct_pb2.Struct()
    try:
        struct.update(_written(dict(metadata)))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"Metadata holds a value that JSON does not know: {error}.") from error
    return struct


def plain_of(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Unpack metadata to plain Python values; a whole number below 2^53 comes back as an int."""
    fields = struct.fields
    return {name: _plain(fields[name]) for name in fields}  # items() takes twice as long


def number_of(double: float) -> int | float:
    """Return the number that a double stands for: a whole one below 2^53 as an int."""
    return int(double) if double.is_integer() and abs(double) <= MAX_EXACT else double


def _written(given: Any, where: str = "") -> Any:
    """Return plain values; TypeError for the first that JSON does not know, not finite numbers among them."""
    value = plain(given)
    if isinstance(value, dict | struct_pb2.Struct):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{where or 'it'} has the name {name!r:.80}, which is no string")
        return {name: _written(each, f"{where}.{name}" if where else name) for name, each in value.items()}
    if isinstance(value, list | tuple | struct_pb2.ListValue):
        return [_written(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{where} is of {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{where} is {float(value)}")
    if isinstance(value, int | float) and abs(value) > MAX_EXACT:
        raise InvalidArgument(f"Metadata: {where} is {value}, and {ROUNDED}.")
    return value


def _plain(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            return number_of(value.number_value)
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return plain_of(value.struct_value)
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case _:
            return None
