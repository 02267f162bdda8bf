"""What the Python client hands in and out: plain frozen records, no wire types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.errors import BadImage, CrossbatchError, InvalidArgument
from serving.rpc.limits import MAX_IMAGE_BYTES
from serving.rpc.status import from_status
from serving.rpc.wire import bytes_of, metadata_of, struct_of

__all__ = [
    "GalleryInfo",
    "Hit",
    "Item",
    "ModelInfo",
    "gallery_info_of",
    "hits_of",
    "image_bytes",
    "item_message",
    "model_info_of",
]


@dataclass(frozen=True, slots=True)
class Hit:
    """One neighbour; `score` is the cosine of query and item, -1 to 1."""

    key: str
    score: float
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Item:
    """One item to store: either `image` (bytes or a path) or `vector` float32 (d,) of unit norm."""

    key: str
    image: bytes | Path | None = field(default=None, repr=False)
    vector: NDArray[np.float32] | None = field(default=None, repr=False)
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GalleryInfo:
    """A gallery; `problem` tells why it cannot be used with the model that is served."""

    name: str
    model_name: str
    model_fingerprint: str
    dimension: int
    items: int
    problem: CrossbatchError | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served; `spec_json` is its whole record."""

    name: str
    fingerprint: str
    dimension: int
    image_size: int
    precision: str
    spec_json: str = field(repr=False)


def image_bytes(image: bytes | Path) -> bytes:
    """Read an image that may be on disk, if it is small enough to be sent.

    Returns:
        Its encoded bytes.

    Raises:
        BadImage: if the file cannot be read or is too large.
    """
    try:
        data = image if isinstance(image, bytes) else image.read_bytes()
    except OSError as error:
        raise BadImage(
            f"The image {error.filename} cannot be read ({error.strerror}); check its path."
        ) from error
    if len(data) > MAX_IMAGE_BYTES:
        name = "The image" if isinstance(image, bytes) else f"The image {image}"
        raise BadImage(f"{name} has {len(data):,} bytes and at most {MAX_IMAGE_BYTES:,} are read; shrink it.")
    return data


def item_message(item: Item) -> gallery_service_pb2.Item:
    """Write an item as it travels.

    Returns:
        The message, with the bytes of the image in it.

    Raises:
        BadImage: if the image's file cannot be read.
        InvalidArgument: if it has both an image and a vector or neither, or metadata that JSON does not know.
    """
    if (item.image is None) == (item.vector is None):
        raise InvalidArgument(f"The item {item.key!r} must have an image or a vector, one of the two.")
    return gallery_service_pb2.Item(
        key=item.key,
        image=None if item.image is None else image_bytes(item.image),
        vector=None if item.vector is None else bytes_of(item.vector),
        label=item.label,
        uri=item.uri,
        metadata=struct_of(item.metadata) if item.metadata else None,
    )


def hits_of(result: retrieval_service_pb2.SearchResult) -> list[Hit]:
    """Read the neighbours of one query.

    Returns:
        Nearest first.
    """
    return [Hit(hit.key, hit.score, hit.label, hit.uri, metadata_of(hit.metadata)) for hit in result.hits]


def gallery_info_of(gallery: gallery_service_pb2.Gallery) -> GalleryInfo:
    """Read the description of a gallery.

    Returns:
        The same as a record.
    """
    problem = from_status(gallery.problem) if gallery.HasField("problem") else None
    return GalleryInfo(
        gallery.name, gallery.model_name, gallery.model_fingerprint, gallery.dimension, gallery.items, problem
    )


def model_info_of(model: model_service_pb2.Model) -> ModelInfo:
    """Read the description of the model.

    Returns:
        The same as a record.
    """
    return ModelInfo(
        model.name, model.fingerprint, model.dimension, model.image_size, model.precision, model.spec_json
    )
