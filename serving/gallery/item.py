"""What a gallery holds and what a search returns, and the bounds on both."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import InvalidArgument
from serving.gallery.validation import as_vector, check_text, metadata_json, normalize

__all__ = [
    "MAX_K", "MAX_KEY_BYTES", "MAX_THUMBNAIL_BYTES", "MAX_URI_BYTES", "Hit", "Item", "Source",
    "check_item", "check_items", "check_key", "check_keys", "check_origin", "check_source",
    "check_versions",
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
class Item:
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


@dataclass(frozen=True, slots=True)
class Hit:
    """One answer of a search; `score` is the cosine of query and item, in [-1, 1]."""

    key: str
    label: str
    uri: str
    metadata: Mapping[str, Any]
    score: float
    version: int = 0


def check_items(items: Iterable[Item], *, dimension: int) -> list[Item]:
    """Check the items of one call and bring their vectors to unit norm, as float32 (d,).

    Raises:
        InvalidArgument: An item is out of bounds (its position and key are named), or a key comes twice.
    """
    if not isinstance(items, Iterable):
        raise InvalidArgument(f"expected a list of items, found {type(items).__name__}")
    given, rows = [], []
    first: dict[str, int] = {}
    for position, item in enumerate(items):
        try:
            rows.append(_check_all_but_norm(item, dimension))
        except InvalidArgument as error:
            raise InvalidArgument(f"items[{position}]: {error}") from error
        earlier = first.setdefault(item.key, position)
        if earlier != position:
            raise InvalidArgument(
                f"items[{position}]: items[{earlier}] has the same key {item.key!r}; send each key once"
            )
        given.append(item)
    if not given:
        return []
    units = normalize(np.stack(rows), lambda row: f"items[{row}]: the vector of {given[row].key!r}")
    return [replace(item, vector=row) for item, row in zip(given, units, strict=True)]


def check_item(item: Item, *, dimension: int) -> Item:
    """Check one item and bring its vector to unit norm, as float32 (d,)."""
    row = _check_all_but_norm(item, dimension)
    return replace(item, vector=normalize(row[None], lambda _: f"the vector of {item.key!r}")[0])


def check_key(key: str) -> str:
    """Return `key` if it can name an item: 1 to 1024 bytes of UTF-8 without NUL."""
    return check_text(key, "key", least=1, most=MAX_KEY_BYTES)


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys without repetition, in order."""
    if isinstance(keys, str):
        raise InvalidArgument(f"expected a list of keys, found the single string {keys!r}; put it in a list")
    if not isinstance(keys, Collection):
        raise InvalidArgument(f"expected a list of keys, found {type(keys).__name__}")
    return list(dict.fromkeys(map(check_key, keys)))


def check_versions(expected: Mapping[str, int] | None) -> Mapping[str, int]:
    """Return the versions that a write expects, by key: 0 (not there) or more."""
    if expected is None:
        return {}
    if not isinstance(expected, Mapping):
        raise InvalidArgument(f"expected a mapping from keys to versions, found {type(expected).__name__}")
    for key, version in expected.items():
        check_key(key)
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise InvalidArgument(
                f"the expected version of {key!r} is {version!r}; expected a whole number, 0 for not there"
            )
    return expected


def check_origin(origin: str) -> str:
    """Return `origin` if it can name the data set of a source: as a URI, and not empty."""
    return check_text(origin, "origin", least=1, most=MAX_URI_BYTES)


def check_source(source: Source) -> Source:
    """Return `source` if it can be one."""
    if not isinstance(source, Source):
        raise InvalidArgument(f"expected a Source, found {type(source).__name__}")
    check_origin(source.origin)
    numbers = isinstance(source.size, int) and isinstance(source.mtime_ns, int)
    if not numbers or not (0 <= source.size < 1 << 63 and -1 << 63 <= source.mtime_ns < 1 << 63):
        raise InvalidArgument(
            f"the source has size {source.size} and time {source.mtime_ns}; expected 64-bit numbers"
        )
    if not isinstance(source.digest, bytes) or len(source.digest) != _DIGEST_BYTES:
        raise InvalidArgument(f"the digest of the source is no SHA-256; expected {_DIGEST_BYTES} bytes")
    return source


def _check_all_but_norm(item: Item, dimension: int) -> NDArray[np.floating[Any]]:
    """Return the vector (d,) of a checked item; the norms of many are checked faster at once."""
    if not isinstance(item, Item):
        raise InvalidArgument(f"expected an Item, found {type(item).__name__}")
    check_key(item.key)
    check_text(item.label, "label", least=0, most=MAX_KEY_BYTES)
    check_text(item.uri, "URI", least=0, most=MAX_URI_BYTES)
    metadata_json(item.metadata)
    if not isinstance(item.thumbnail, bytes):
        found = type(item.thumbnail).__name__
        raise InvalidArgument(f"the thumbnail must be the bytes of a JPEG file, found {found}")
    if len(item.thumbnail) > MAX_THUMBNAIL_BYTES:
        raise InvalidArgument(
            f"the thumbnail is {len(item.thumbnail)} bytes; the limit is {MAX_THUMBNAIL_BYTES}"
        )
    if item.thumbnail and not item.thumbnail.startswith(_JPEG):
        raise InvalidArgument("the thumbnail is no JPEG file; send the bytes of one, or leave it out")
    if item.source is not None:
        check_source(item.source)
    return as_vector(item.vector, f"the vector of {item.key!r}", dimension=dimension)
