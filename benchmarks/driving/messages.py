"""Requests made beforehand, as the bytes that travel, and files of them for the process that sends them."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from protos import retrieval_service_pb2 as pb

__all__ = [
    "EMBED",
    "INFER",
    "SEARCH",
    "embed",
    "fields",
    "infer",
    "read",
    "search",
    "search_image",
    "varint",
    "write",
]

EMBED = "/crossbatch.v1.RetrievalService/Embed"
SEARCH = "/crossbatch.v1.RetrievalService/Search"
INFER = "/inference.GRPCInferenceService/ModelInfer"


def embed(images: Sequence[bytes]) -> bytes:
    """Return an EmbedRequest."""
    return pb.EmbedRequest(images=images).SerializeToString()


def search(gallery: str, vectors: Sequence[bytes], k: int) -> bytes:
    """Return a SearchRequest of vectors, each float32 little-endian."""
    queries = [pb.Query(vector=vector) for vector in vectors]
    return pb.SearchRequest(gallery=gallery, queries=queries, k=k).SerializeToString()


def search_image(gallery: str, image: bytes, k: int) -> bytes:
    """Return a SearchRequest of one encoded image."""
    return pb.SearchRequest(gallery=gallery, queries=[pb.Query(image=image)], k=k).SerializeToString()


def infer(model: str, name: str, datatype: str, shape: Sequence[int], content: bytes) -> bytes:
    """Return a ModelInferRequest of the Open Inference Protocol with one input, its contents raw.

    Written out by hand: a server and its Python client register the message names each for itself, so that a
    process may hold one of them only.

    Args:
        model: Name of the model.
        name: Name of the input.
        datatype: "BYTES" or "UINT8".
        shape: Of the input.
        content: The tensor row by row; an element of BYTES is written by its length, uint32, and itself.
    """
    sizes = b"".join(varint(size) for size in shape)
    tensor = _field(1, name.encode()) + _field(2, datatype.encode()) + _field(3, sizes)
    return _field(1, model.encode()) + _field(5, tensor) + _field(7, content)


def fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the length-delimited fields of any message, by their numbers.

    Raises:
        google.protobuf.message.DecodeError: if it is none.
    """
    found: dict[int, list[bytes]] = {}
    for field in UnknownFieldSet(Empty.FromString(message)):
        if isinstance(field.data, bytes):
            found.setdefault(field.field_number, []).append(field.data)
    return found


def write(path: Path, messages: Iterable[bytes]) -> Path:
    """Write messages to a file, each by its length and itself."""
    path.write_bytes(b"".join(struct.pack("<I", len(each)) + each for each in messages))
    return path


def read(path: Path) -> list[bytes]:
    """Read them again."""
    data, found, start = path.read_bytes(), [], 0
    while start < len(data):
        (size,) = struct.unpack_from("<I", data, start)
        found.append(data[start + 4 : start + 4 + size])
        start += 4 + size
    return found


def _field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """Return a whole number as protobuf writes it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
