"""What a gallery holds and what a search returns, and the bounds on both."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import InvalidArgument

__all__ = [
    "MAX_K",
    "MAX_KEY_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_METADATA_LEVELS",
    "MAX_URI_BYTES",
    "Hit",
    "Item",
    "Source",
    "check_item",
    "check_items",
    "check_key",
    "check_keys",
    "check_metadata",
    "metadata_json",
    "unit_rows",
]

MAX_K = 2048  # what FAISS can return from a GPU
MAX_KEY_BYTES = 1024  # a label has the same bound
MAX_URI_BYTES = 8192
MAX_METADATA_BYTES = 65_536
MAX_METADATA_LEVELS = 30  # Protocol Buffers read 100 levels of messages; one of metadata takes up to three
_NORM_TOLERANCE = 1e-3  # a half-precision model is off by less
_EXACT_TOLERANCE = 1e-6  # within it the bits are kept, so storing what was read changes nothing


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
    """A small JPEG picture; empty where there is none. It is written, and read by `Gallery.thumbnail`."""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """One answer of a search; `score` is the cosine of query and item, in [-1, 1] up to rounding."""

    key: str
    label: str
    uri: str
    metadata: Mapping[str, Any]
    score: float


def check_items(items: Iterable[Item], *, dimension: int) -> list[Item]:
    """Check the items of one call and bring their vectors to unit norm.

    Returns:
        The items, in order, with float32 (d,) unit vectors.

    Raises:
        InvalidArgument: An item is out of bounds (its position and key are named), or a key comes twice.
    """
    checked = []
    first: dict[str, int] = {}
    for position, item in enumerate(items):
        try:
            checked.append(check_item(item, dimension=dimension))
        except InvalidArgument as error:
            raise InvalidArgument(f"items[{position}]: {error}") from error
        earlier = first.setdefault(item.key, position)
        if earlier != position:
            raise InvalidArgument(
                f"items[{position}]: items[{earlier}] has the same key {item.key!r}; send each key once"
            )
    return checked


def check_item(item: Item, *, dimension: int) -> Item:
    """Check one item and bring its vector to unit norm.

    Returns:
        The item with a float32 (d,) unit vector.

    Raises:
        InvalidArgument: The key, label, URI, metadata or vector is out of bounds.
    """
    check_key(item.key)
    _check_text(item.label, "label", least=0, most=MAX_KEY_BYTES)
    _check_text(item.uri, "URI", least=0, most=MAX_URI_BYTES)
    metadata_json(item.metadata)
    vector = _floats(item.vector, f"the vector of {item.key!r}")
    if vector.shape != (dimension,):
        raise InvalidArgument(
            f"the vector of {item.key!r} has shape {vector.shape}; expected ({dimension},) in this gallery"
        )
    return replace(item, vector=_unit(vector[None], f"the vector of {item.key!r}")[0])


def check_key(key: str) -> str:
    """Return `key` if it can name an item: 1 to 1024 bytes of UTF-8 without NUL.

    Raises:
        InvalidArgument: It cannot.
    """
    return _check_text(key, "key", least=1, most=MAX_KEY_BYTES)


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys without repetition, in order.

    Raises:
        InvalidArgument: One of them cannot be a key, or `keys` is a string.
    """
    if isinstance(keys, str):
        raise InvalidArgument(f"expected a list of keys, found the single string {keys!r}; put it in a list")
    return list(dict.fromkeys(check_key(key) for key in keys))


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check that metadata can travel: a mapping of few levels, whose numbers are within those of a double.

    Raises:
        InvalidArgument: It cannot.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a JSON object, found {type(metadata).__name__}")
    _check_value(metadata, MAX_METADATA_LEVELS)


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Write metadata as the JSON object that is stored.

    Raises:
        InvalidArgument: It is not a JSON object, holds a number larger than a double, is nested more than 30
            levels deep, or is larger than 64 KiB.
    """
    check_metadata(metadata)
    if not all(isinstance(name, str) for name in metadata):
        raise InvalidArgument("metadata must be a JSON object: every name in it must be a string")
    try:
        text = json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(f"metadata is {size} bytes of JSON; the limit is {MAX_METADATA_BYTES}")
    return text


def unit_rows(vectors: ArrayLike, *, dimension: int) -> NDArray[np.float32]:
    """Check query vectors (Q, d) and bring them to unit norm.

    A norm that differs from 1 by more than 1e-3 is refused rather than mended: it shows that the vector is
    not an embedding of the model. Smaller differences (half precision, other sums) are divided out.

    Returns:
        float32 (Q, d), rows of unit norm.

    Raises:
        InvalidArgument: The shape is another, or a row is not finite or not of unit norm.
    """
    rows = _floats(vectors, "the query vectors")
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise InvalidArgument(f"the query vectors have shape {rows.shape}; expected (queries, {dimension})")
    return _unit(rows, "query vector")


def _check_value(value: Any, left: int) -> None:
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise InvalidArgument("metadata holds a whole number larger than a double; write it as a string")
        return
    if not left:
        raise InvalidArgument(f"metadata is nested more than {MAX_METADATA_LEVELS} levels deep")
    for each in inner:
        _check_value(each, left - 1)


def _floats(values: ArrayLike, what: str) -> NDArray[np.floating[Any]]:
    try:
        array = np.asarray(values)
        # float16 cannot hold the norm to the tolerance, float64 may arrive from Python lists.
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"expected numbers in {what}, found {type(values).__name__}") from error


def _unit(rows: NDArray[np.floating[Any]], what: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))  # (Q,)
        off = np.abs(norms - 1.0)
    for row in np.flatnonzero(~(off <= _NORM_TOLERANCE))[:1]:  # the negation also finds NaN
        name = what if len(rows) == 1 else f"{what} {row}"
        if not np.isfinite(rows[row]).all():
            raise InvalidArgument(f"{name} holds a value that is not finite; send finite numbers")
        raise InvalidArgument(
            f"{name} has norm {norms[row]:.6g}; expected unit norm to within {_NORM_TOLERANCE}: "
            "divide the vector by its norm"
        )
    scale = np.where(off <= _EXACT_TOLERANCE, 1.0, norms)[:, None]
    return np.ascontiguousarray(rows / scale, dtype=np.float32)


def _check_text(text: str, what: str, *, least: int, most: int) -> str:
    if not isinstance(text, str):
        raise InvalidArgument(f"the {what} must be a string, found {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the {what} {text[:80]!r} is not valid Unicode: {error.reason}") from error
    if "\0" in text:
        raise InvalidArgument(f"the {what} {text[:80]!r} holds a NUL character; take it out")
    if not least <= size <= most:
        shown = f"{text[:40]!r}... " if size > most else ""
        raise InvalidArgument(f"the {what} {shown}is {size} bytes of UTF-8; expected {least} to {most}")
    return text
