"""What the Python client hands in and out: plain frozen records, no wire types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.client.given import ImageLike, check_version, floats_of, image_bytes, text
from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.status import from_status
from serving.rpc.wire import bytes_of, checked_struct_of, plain_of, vector_of

__all__ = [
    "BuildProgress",
    "Explanation",
    "GalleryInfo",
    "Hit",
    "Item",
    "ModelInfo",
    "Reloaded",
    "StoredItem",
    "explanation_of",
    "gallery_info_of",
    "hits_of",
    "item_message",
    "model_info_of",
    "progress_of",
    "stored_item_of",
]


@dataclass(frozen=True, slots=True)
class Hit:
    """One neighbour; `score` is the cosine of query and item, -1 to 1."""

    key: str
    score: float
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One item to store: `image` (bytes, a path or an open file) or `vector` float32 (d,) of unit norm.

    With `expected_version` it is stored only if the item of that key has this version now, or, with 0, if
    there is none.
    """

    key: str
    image: ImageLike | None = field(default=None, repr=False)
    vector: ArrayLike | None = field(default=None, repr=False)
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expected_version: int | None = None


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item as it is stored; `vector` is float32 (d,) of unit norm.

    `version` grows with each write. `vector` is None and `thumbnail`, a small JPEG picture, empty where they
    were not asked for; many items have no thumbnail.
    """

    key: str
    version: int
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    vector: NDArray[np.float32] | None = field(default=None, repr=False)
    thumbnail: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class GalleryInfo:
    """A gallery; `problem` tells why it cannot be used with the model that is served.

    `recall` is the measured share of the true ten nearest neighbours that its index finds; `fresh` items are
    newer than the index, and `deleted` ones still in it; `generation` counts the indexes made.
    `thumbnail_side` is in pixels, 0 where it keeps no thumbnails.
    """

    name: str
    model_name: str
    model_fingerprint: str
    dimension: int
    items: int
    problem: CrossbatchError | None = None
    index_type: str = ""
    recall: float = 0.0
    fresh: int = 0
    deleted: int = 0
    generation: int = 0
    thumbnail_side: int = 0


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far an index is: `done` of `total` (0 when not known) of a `stage`, such as "train".

    The last one has an empty `stage`, and the `gallery` with its new index.
    """

    stage: str
    done: int
    total: int
    gallery: GalleryInfo | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What a model sees in an image, in terms of its m prototypes.

    `histogram` is float32 (m,), the share of each prototype, 0 to 1, summing to 1. `assignments` is uint8 (h,
    w), the prototype that prevails at each location of the square that the model sees, the top row first.
    """

    histogram: NDArray[np.float32]
    assignments: NDArray[np.uint8]

    def overlap(self, other: "Explanation") -> float:
        """Tell how much of one image is in another one, by prototypes: Σᵢ min(zᵢ, z'ᵢ).

        Returns:
            0 (no prototype in common) to 1 (the same shares).

        Raises:
            InvalidArgument: if they have not the same number of prototypes; those of two models have nothing
                in common.
        """
        if self.histogram.shape != other.histogram.shape:
            raise InvalidArgument(
                f"Explanations of {len(self.histogram)} and {len(other.histogram)} prototypes differ; "
                "both must come from the same model."
            )
        return float(np.minimum(self.histogram, other.histogram).sum())


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served; `spec_json` is its whole record.

    `prototypes` is how many its explanations have, 0 where it gives none.
    """

    name: str
    fingerprint: str
    dimension: int
    image_size: int
    precision: str
    spec_json: str = field(repr=False)
    prototypes: int = 0


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload came to: every model served now, names of those loaded and of those removed."""

    models: tuple[ModelInfo, ...]
    loaded: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def item_message(item: Item) -> gallery_service_pb2.Item:
    """Write an item as it travels, with the bytes of the image in it.

    Raises:
        BadImage: if the image's file cannot be read.
        InvalidArgument: if a field is of another type, it has both an image and a vector or neither, or
            metadata that JSON does not know.
    """
    if not isinstance(item, Item):
        raise InvalidArgument(f"items must be Items of serving.client.client; found {type(item).__name__}.")
    key = text(item.key, "The key of an item")
    if (item.image is None) == (item.vector is None):
        raise InvalidArgument(f"The item {key!r} must have an image or a vector, one of the two.")
    what = f"The vector of {key!r}"
    expected = item.expected_version
    return gallery_service_pb2.Item(
        key=key,
        image=None if item.image is None else image_bytes(item.image),
        vector=None if item.vector is None else bytes_of(floats_of(item.vector, what, "(components,)")),
        label=text(item.label, f"The label of {key!r}"),
        uri=text(item.uri, f"The URI of {key!r}"),
        metadata=_struct_of(item) if item.metadata else None,
        expected_version=None
        if expected is None
        else check_version(expected, f"The expected version of {key!r}"),
    )


def _struct_of(item: Item) -> Any:
    try:
        return checked_struct_of(item.metadata)
    except InvalidArgument as error:
        raise error.saying(f"The item {item.key!r}: {error}") from error


def hits_of(result: retrieval_service_pb2.SearchResult) -> list[Hit]:
    """Read the neighbours of one query, nearest first."""
    return [
        Hit(hit.key, hit.score, hit.label, hit.uri, plain_of(hit.metadata), hit.version)
        for hit in result.hits
    ]


def stored_item_of(item: gallery_service_pb2.StoredItem, thumbnail: bytes = b"") -> StoredItem:
    """Read an item as it is stored."""
    return StoredItem(
        item.key,
        item.version,
        item.label,
        item.uri,
        plain_of(item.metadata),
        vector_of(item.vector) if item.vector else None,
        thumbnail,
    )


def gallery_info_of(gallery: gallery_service_pb2.Gallery) -> GalleryInfo:
    """Read the description of a gallery."""
    return GalleryInfo(
        name=gallery.name,
        model_name=gallery.model_name,
        model_fingerprint=gallery.model_fingerprint,
        dimension=gallery.dimension,
        items=gallery.items,
        problem=from_status(gallery.problem) if gallery.HasField("problem") else None,
        index_type=gallery.index_type,
        recall=gallery.recall,
        fresh=gallery.fresh_items,
        deleted=gallery.deleted_items,
        generation=gallery.generation,
        thumbnail_side=gallery.thumbnail_side,
    )


def progress_of(reply: gallery_service_pb2.BuildIndexResponse) -> BuildProgress:
    """Read how far an index is."""
    gallery = gallery_info_of(reply.gallery) if reply.HasField("gallery") else None
    return BuildProgress(reply.stage, reply.done, reply.total, gallery)


def explanation_of(result: retrieval_service_pb2.ExplainResult) -> Explanation:
    """Read what a model sees in one image."""
    assignments = np.frombuffer(result.assignments, np.uint8)
    return Explanation(vector_of(result.histogram), assignments.reshape(result.height, result.width))


def model_info_of(model: model_service_pb2.Model) -> ModelInfo:
    """Read the description of a model."""
    return ModelInfo(
        model.name,
        model.fingerprint,
        model.dimension,
        model.image_size,
        model.precision,
        model.spec_json,
        model.prototypes,
    )
