"""The records that the clients take and return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.client.inputs import ImageLike
from serving.errors import CrossbatchError, InvalidArgument

__all__ = [
    "BuildProgress", "Explanation", "GalleryInfo", "Hit", "Item", "ModelInfo", "Reloaded", "StoredItem",
]  # fmt: skip


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
    """A model that is served; `spec_json` is its whole record, `prototypes` how many explain an image."""

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
