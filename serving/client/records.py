"""The records that the clients take and return, and how they are read from replies."""

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.status import from_status
from serving.rpc.wire import number_of, plain_of, vector_of

__all__ = [
    "BuildProgress", "Explanation", "FieldInfo", "FieldValues", "GalleryInfo", "Hit", "ImageFile",
    "ImageLike", "Images", "Item", "Items", "ModelInfo", "Pair", "Reloaded", "StoredItem", "ValueCount",
    "explanations_of", "fields_of", "galleries_of", "gallery_of", "hits_of", "item_of", "items_of",
    "model_of", "models_of", "pairs_of", "progress_of", "reloaded_of", "values_of", "vectors_of",
]  # fmt: skip

T = TypeVar("T")


class ImageFile(Protocol):
    """A file opened in binary mode, or what reads like one: an upload, a response, a member of an archive."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes at most, none at the end."""


ImageLike: TypeAlias = bytes | bytearray | memoryview | str | PathLike[str] | ImageFile
"""The bytes of an image file, where it lies, or the open file, which is read from where it stands."""

Images: TypeAlias = Iterable[ImageLike] | AsyncIterable[ImageLike]
"""Any number of images; only `AsyncClient` takes asynchronous ones."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One neighbour; `score` is the cosine of query and item, -1 to 1.

    `vector` float32 (d,) and `thumbnail` (a JPEG) only where asked for.
    """

    key: str
    score: float
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    vector: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    thumbnail: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Item:
    """One item to store: `image` (bytes, a path or an open file) or `vector` float32 (d,) of unit norm.

    With `expected_version` it is stored only if the item of that key has this version now, or, with 0, if
    there is none. A label or URI that is None is stored as empty, and left as it is by an update.
    """

    key: str
    image: ImageLike | None = field(default=None, repr=False)
    vector: ArrayLike | None = field(default=None, repr=False)
    label: str | None = None
    uri: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expected_version: int | None = None


Items: TypeAlias = Iterable[Item] | AsyncIterable[Item]
"""Any number of items; only `AsyncClient` takes asynchronous ones."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item as it is stored; `vector` float32 (d,) and `thumbnail` (a JPEG) only where asked for."""

    key: str
    version: int
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    vector: NDArray[np.float32] | None = field(default=None, repr=False)
    thumbnail: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class GalleryInfo:
    """A gallery; `problem` tells why it cannot be used with the models that are served.

    `recall` is the measured share of the true ten nearest neighbours that its index finds; `fresh` items are
    newer than the index, `deleted` ones still in it; `generation` counts the indexes made.
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
class FieldInfo:
    """A field of the metadata, or "$label", and the number of `items` that have it.

    `kinds` are those of what it holds, sorted: "boolean", "number", "string"; none where only objects.
    `least` and `most` are of its numbers, None where it holds none.
    """

    name: str
    kinds: tuple[str, ...]
    items: int
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class ValueCount:
    """A value of a field, and the number of `items` that have it."""

    value: str | bool | int | float
    items: int


@dataclass(frozen=True, slots=True)
class FieldValues:
    """The most frequent `values` of a field, in order; `distinct` is how many there are in all."""

    values: tuple[ValueCount, ...]
    distinct: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two items that are nearly alike, the one that was compared first; `score` is their cosine."""

    key: str
    other: str
    score: float


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """`done` of `total` (0: not known) of a `stage`; the last one has no stage but the finished `gallery`."""

    stage: str
    done: int
    total: int
    gallery: GalleryInfo | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What a model sees in an image: shares of its m prototypes, and the prevailing one at each location.

    `histogram` is float32 (m,), 0 to 1, summing to 1; `assignments` is uint8 (h, w), the top row first.
    """

    histogram: NDArray[np.float32]
    assignments: NDArray[np.uint8]

    def overlap(self, other: "Explanation") -> float:
        """Sum Σᵢ min(zᵢ, z'ᵢ) over the prototypes: 0 (none in common) to 1 (the same shares)."""
        if self.histogram.shape != other.histogram.shape:
            raise InvalidArgument(
                f"Explanations of {len(self.histogram)} and {len(other.histogram)} prototypes differ; "
                "both must come from the same model."
            )
        return float(np.minimum(self.histogram, other.histogram).sum())


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served; `spec_json` is its whole record, `prototypes` how many explain an image.

    `provider` is what runs it: cpu, openvino, cuda or tensorrt.
    """

    name: str
    fingerprint: str
    dimension: int
    image_size: int
    precision: str
    spec_json: str = field(repr=False)
    prototypes: int = 0
    provider: str = ""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload came to: every model served now, names of those loaded and of those removed."""

    models: tuple[ModelInfo, ...]
    loaded: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def item_of(reply: Any) -> StoredItem:
    """Read the item of a reply, with its thumbnail, which comes beside it."""
    return replace(_record(StoredItem, reply.item), thumbnail=reply.thumbnail)


def _hit(hit: Any) -> Hit:
    """Of these there may be many, and this is the quickest."""
    vector = vector_of(hit.vector) if hit.vector else None
    metadata = plain_of(hit.metadata)
    return Hit(hit.key, hit.score, hit.label, hit.uri, metadata, hit.version, vector, hit.thumbnail)


def _value(message: Any) -> Any:
    value = getattr(message, message.WhichOneof("kind"))
    return number_of(value) if isinstance(value, float) else value


def _record(kind: type[T], message: Any) -> T:
    """Make a record of a message whose fields have the same names, but for those that `_READ` knows."""
    names: list[str] = kind.__slots__  # type: ignore[attr-defined]
    return kind(*(_READ[name](message) if name in _READ else getattr(message, name) for name in names))


def _one(kind: type[T], field: str) -> Callable[[Any], T]:
    return lambda reply: _record(kind, getattr(reply, field))


def _all(kind: type[T], field: str) -> Callable[[Any], list[T]]:
    return lambda reply: [_record(kind, each) for each in getattr(reply, field)]


def _each(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Make what reads a reply that has a result or an error for each input."""
    return lambda reply: [
        from_status(each.error) if each.HasField("error") else read(each) for each in reply.results
    ]


explanations_of = _each(partial(_record, Explanation))
fields_of, pairs_of, values_of = _all(FieldInfo, "fields"), _all(Pair, "pairs"), partial(_record, FieldValues)
galleries_of, gallery_of = _all(GalleryInfo, "galleries"), _one(GalleryInfo, "gallery")
hits_of = _each(lambda result: [_hit(each) for each in result.hits])
items_of = _all(StoredItem, "items")
models_of, model_of = _all(ModelInfo, "models"), _one(ModelInfo, "model")
progress_of, reloaded_of = partial(_record, BuildProgress), partial(_record, Reloaded)
vectors_of = _each(lambda result: vector_of(result.vector))

_READ: dict[str, Callable[[Any], Any]] = {
    "assignments": lambda it: np.frombuffer(it.assignments, np.uint8).reshape(it.height, it.width),
    "deleted": lambda it: it.deleted_items,
    "fresh": lambda it: it.fresh_items,
    "gallery": lambda it: gallery_of(it) if it.HasField("gallery") else None,
    "histogram": lambda it: vector_of(it.histogram),
    "kinds": lambda it: tuple(it.kinds),
    "least": lambda it: it.least if it.HasField("least") else None,
    "loaded": lambda it: tuple(it.loaded),
    "metadata": lambda it: plain_of(it.metadata),
    "models": lambda it: tuple(models_of(it)),
    "most": lambda it: it.most if it.HasField("most") else None,
    "problem": lambda it: from_status(it.problem) if it.HasField("problem") else None,
    "removed": lambda it: tuple(it.removed),
    "value": lambda it: _value(it.value),
    "values": lambda it: tuple(_record(ValueCount, each) for each in it.values),
    "vector": lambda it: vector_of(it.vector) if it.vector else None,
}
