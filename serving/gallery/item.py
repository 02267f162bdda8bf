"""What a gallery holds, tells of itself and finds, and the bounds on what it is given."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import InvalidArgument
from serving.gallery.index.metadata import Trial
from serving.gallery.validation import as_vector, check_text, metadata_json, normalize

__all__ = [
    "MAX_K", "MAX_KEY_BYTES", "MAX_THUMBNAIL_BYTES", "MAX_URI_BYTES", "CheckedItem", "GalleryItem",
    "GalleryStatus", "Neighbour", "Source", "check_fields", "check_item", "check_items", "check_key",
    "check_keys", "check_origin", "check_source", "check_versions",
]  # fmt: skip

MAX_K = 2048
"""Most neighbours of a query, as many as FAISS returns from a GPU."""
MAX_KEY_BYTES = 1024  # a label has the same bound
MAX_URI_BYTES = 8192
MAX_THUMBNAIL_BYTES = 65_536
_JPEG = b"\xff\xd8\xff"  # how every JPEG file begins
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Source:
    """The file an item was made from: `origin` names its data set, `digest` is its SHA-256 (32 bytes)."""

    origin: str
    size: int
    mtime_ns: int
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GalleryItem:
    """One image of a gallery; `vector` is float32 (d,) of unit norm.

    `version` is that of a stored item, above 0; each write gives a new, larger one, whatever it is here.
    """

    key: str
    vector: NDArray[np.float32] = field(repr=False)
    label: str = ""
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    thumbnail: bytes = field(default=b"", repr=False)
    """A small JPEG picture; empty where there is none, and where an item was read without asking for it."""
    version: int = 0


class CheckedItem(NamedTuple):
    """An item within all bounds, its vector of unit norm, and its metadata as the JSON that is stored."""

    item: GalleryItem
    metadata: str


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One answer of a search; `score` is the cosine of query and item, in [-1, 1]."""

    key: str
    label: str
    uri: str
    metadata: Mapping[str, Any]
    score: float
    version: int = 0


@dataclass(frozen=True, slots=True)
class GalleryStatus:
    """What a gallery is and how it stands."""

    name: str
    path: str
    model_name: str
    fingerprint: str
    dimension: int
    items: int
    fresh: int  # live items newer than the index
    deleted: int  # vectors held though their items were deleted or replaced
    index_type: str  # "exact" or a FAISS factory string
    wanted_index: str  # "auto", "exact" or a FAISS factory string
    recall: float  # at 10, measured with queries beside the gallery's own vectors
    wanted_recall: float
    latency_ms: float  # median of one query on one thread; 0 where it was not measured
    parameters: Mapping[str, float]  # FAISS's, for the search
    trials: tuple[Trial, ...]  # what the types did that were tried
    note: str  # why the index is not of the type wanted; empty where it is
    index_items: int
    index_bytes: int
    store_bytes: int
    generation: int  # how often an index was published
    previous_name: str  # where the gallery lies whose name this one took by a switch; empty where none does
    format_version: int
    created: str


def check_items(items: Iterable[GalleryItem], *, dimension: int) -> list[CheckedItem]:
    """Check the items of one call, whose keys differ, and bring their vectors to unit norm, float32 (d,)."""
    given, rows = [], []
    first: dict[str, int] = {}
    for position, item in enumerate(items):
        try:
            given.append(CheckedItem(item, check_fields(item)))
            rows.append(as_vector(item.vector, f"the vector of {item.key!r}", dimension=dimension))
        except InvalidArgument as error:
            raise InvalidArgument(f"items[{position}]: {error}") from error
        earlier = first.setdefault(item.key, position)
        if earlier != position:
            raise InvalidArgument(
                f"items[{position}]: items[{earlier}] has the same key {item.key!r}; send each key once"
            )
    if not given:
        return []
    units = normalize(np.stack(rows), lambda row: f"items[{row}]: the vector of {given[row].item.key!r}")
    return [
        CheckedItem(replace(item, vector=row), metadata)
        for (item, metadata), row in zip(given, units, strict=True)
    ]


def check_item(item: GalleryItem, *, dimension: int) -> CheckedItem:
    """Check one item and bring its vector to unit norm, as float32 (d,)."""
    metadata = check_fields(item)
    what = f"the vector of {item.key!r}"
    row = as_vector(item.vector, what, dimension=dimension)
    return CheckedItem(replace(item, vector=normalize(row[None], lambda _: what)[0]), metadata)


def check_fields(item: GalleryItem) -> str:
    """Check all of an item but its vector; return its metadata as the JSON that is stored."""
    check_key(item.key)
    check_text(item.label, "label", least=0, most=MAX_KEY_BYTES)
    check_text(item.uri, "URI", least=0, most=MAX_URI_BYTES)
    if len(item.thumbnail) > MAX_THUMBNAIL_BYTES:
        raise InvalidArgument(
            f"the thumbnail is {len(item.thumbnail)} bytes; the limit is {MAX_THUMBNAIL_BYTES}"
        )
    if item.thumbnail and not item.thumbnail.startswith(_JPEG):
        raise InvalidArgument("the thumbnail is no JPEG file; send the bytes of one, or leave it out")
    if item.source is not None:
        check_source(item.source)
    return metadata_json(item.metadata)


def check_key(key: str) -> str:
    """Return `key` if it can name an item: 1 to 1024 bytes of UTF-8 without NUL."""
    return check_text(key, "key", least=1, most=MAX_KEY_BYTES)


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys without repetition, in order."""
    if isinstance(keys, str):
        raise InvalidArgument(f"expected a list of keys, found the single string {keys!r}; put it in a list")
    return list(dict.fromkeys(map(check_key, keys)))


def check_versions(expected: Mapping[str, int] | None) -> Mapping[str, int]:
    """Return the versions that a write expects, by key: 0 (not there) or more."""
    for key, version in (expected or {}).items():
        check_key(key)
        if version < 0:
            raise InvalidArgument(
                f"the expected version of {key!r} is {version!r}; expected a whole number, 0 for not there"
            )
    return expected or {}


def check_origin(origin: str) -> str:
    """Return `origin` if it can name the data set of a source: as a URI, and not empty."""
    return check_text(origin, "origin", least=1, most=MAX_URI_BYTES)


def check_source(source: Source) -> Source:
    """Return `source` if it can be one."""
    check_origin(source.origin)
    if not (0 <= source.size < 1 << 63 and -1 << 63 <= source.mtime_ns < 1 << 63):
        raise InvalidArgument(
            f"the source has size {source.size} and time {source.mtime_ns}; expected 64-bit numbers"
        )
    if len(source.digest) != _DIGEST_BYTES:
        raise InvalidArgument(f"the digest of the source is no SHA-256; expected {_DIGEST_BYTES} bytes")
    return source
