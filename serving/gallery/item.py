"""What a gallery holds and finds, and the bounds on what it is given.

Every check raises InvalidArgument and names what was given.
"""

import json
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import InvalidArgument, ModelMismatch, NotFound

if TYPE_CHECKING:
    from serving.gallery.store.schema import Meta
    from serving.gallery.vectors import Maker
    from serving.model.spec import ModelSpec

__all__ = [
    "JPEG", "MAX_EXACT", "MAX_K", "MAX_KEY_BYTES", "MAX_METADATA_BYTES", "MAX_METADATA_LEVELS",
    "MAX_THUMBNAIL_BYTES", "MAX_URI_BYTES", "NORM_TOLERANCE", "ROUNDED", "BadVector", "CheckedItem",
    "GalleryItem", "ItemChange", "Neighbour", "Source", "change_items", "check_cosine", "check_fields",
    "check_items", "check_key", "check_keys", "check_metadata", "check_model", "check_origin", "check_text",
    "check_unpictured", "check_whole", "given_by_source", "in_order", "normalize_queries", "plain",
    "unit_vector", "with_source_of",
]  # fmt: skip

MAX_K = 2048
"""Most neighbours of a query, as many as FAISS returns from a GPU."""
MAX_KEY_BYTES = 1024  # a label has the same bound
MAX_URI_BYTES = 8192
MAX_THUMBNAIL_BYTES = 65_536
MAX_METADATA_BYTES = 65_536
MAX_METADATA_LEVELS = 30  # Protocol Buffers read 100 levels of messages; one of metadata takes up to three
MAX_EXACT = 2**53 - 1
"""Largest whole number that no other one becomes as a double."""
ROUNDED = "whole numbers from 2^53 on lose digits; send it as a string"
JPEG = b"\xff\xd8\xff"  # how every JPEG file begins
NORM_TOLERANCE = 1e-3  # of what is accepted as a unit vector; a half-precision model is off by less
_EXACT_TOLERANCE = 1e-6  # within it the bits are kept, so storing what was read changes nothing
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class BadVector(InvalidArgument):
    """A vector is no embedding: not finite, or not of unit norm; `row` is its place among those given."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True, slots=True)
class Source:
    """The file an item was made from: `origin` names its data set, `digest` is its SHA-256 (32 bytes)."""

    origin: str
    size: int
    mtime_ns: int
    digest: bytes = field(repr=False)
    given: str = field(default="", repr=False)
    """The label, URI and metadata that it gave, a JSON list; empty where they are the item's own still."""

    def uri_given(self) -> str:
        """Return the URI that it gave; empty where it is the item's own."""
        return str(json.loads(self.given)[1]) if self.given else ""


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


@dataclass(frozen=True, slots=True)
class ItemChange:
    """What is to be another of a stored item; what is None stays.

    A field of `metadata` stands in place of the one of its name, None takes it away, and the others stay; or
    all of it, None too, stands in place of what there was.
    """

    key: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    replace_metadata: bool = False
    label: str | None = None
    uri: str | None = None


class CheckedItem(NamedTuple):
    """An item within all bounds, its vector of unit norm, and its metadata as the JSON that is stored."""

    item: GalleryItem
    metadata: str


@dataclass(slots=True)  # to freeze one takes longer than all else of making it
class Neighbour:
    """One answer of a search; `score` is the cosine of query and item, in [-1, 1]."""

    key: str
    label: str
    uri: str
    metadata: Mapping[str, Any]
    score: float
    version: int = 0
    vector: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    """Unit vector (d,); None where it was not asked for."""
    thumbnail: bytes = field(default=b"", repr=False)


def check_items(items: Iterable[GalleryItem], *, dimension: int) -> list[CheckedItem]:
    """Check the items of one call, whose keys differ, and bring their vectors to unit norm, float32 (d,)."""
    checked, rows = list[CheckedItem](), []
    first: dict[str, int] = {}
    for position, item in enumerate(items):
        try:
            checked.append(CheckedItem(item, check_fields(item)))
            rows.append(_row(item.vector, f"the vector of {item.key!r}", dimension))
            if (earlier := first.setdefault(item.key, position)) != position:
                raise InvalidArgument(f"items[{earlier}] has the same key {item.key!r}; send each key once")
        except InvalidArgument as error:
            raise InvalidArgument(f"items[{position}]: {error}") from error
    if not checked:
        return []
    units = _normalize(np.stack(rows), lambda row: f"items[{row}]: the vector of {checked[row].item.key!r}")
    return [
        CheckedItem(replace(item, vector=unit), metadata)
        for (item, metadata), unit in zip(checked, units, strict=True)
    ]


def change_items(changes: Iterable[ItemChange], stored: Mapping[str, GalleryItem]) -> list[CheckedItem]:
    """Return stored items with their changes; NotFound where one is not among those `stored`, by key."""
    items = []
    first: dict[str, int] = {}
    for position, change in enumerate(changes):
        if (earlier := first.setdefault(change.key, position)) != position:
            raise InvalidArgument(
                f"items[{position}]: the key {change.key!r} is also that of items[{earlier}]"
            )
        item = stored.get(change.key)
        if item is None:
            raise NotFound(f"items[{position}]: there is no item {change.key!r} in the gallery")
        metadata = change.metadata
        if not change.replace_metadata:
            gone = {name for name, value in metadata.items() if value is None}
            both = {**item.metadata, **metadata}
            metadata = {name: value for name, value in both.items() if name not in gone}
        label = item.label if change.label is None else change.label
        uri = item.uri if change.uri is None else change.uri
        changed = replace(item, label=label, uri=uri, metadata=metadata, source=None)
        try:
            items.append(CheckedItem(changed, check_fields(changed)))
        except InvalidArgument as error:
            raise InvalidArgument(f"items[{position}]: {error}") from error
    return items


def in_order(keys: Sequence[str], found: Mapping[str, GalleryItem], gallery: str) -> list[GalleryItem]:
    """Return the items of `keys`, in that order; NotFound names the first that is not among those found."""
    missing = [key for key in dict.fromkeys(keys) if key not in found]
    if missing:
        more = f" (nor are {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise NotFound(f"there is no item {missing[0]!r} in the gallery {gallery}{more}")
    return [found[key] for key in keys]


def check_unpictured(items: Iterable[CheckedItem], gallery: str) -> None:
    """Raise InvalidArgument for a thumbnail, in a gallery that keeps none."""
    pictured = next((item.key for item, _ in items if item.thumbnail), None)
    if pictured is not None:
        told = f"the item {pictured!r} has a thumbnail, and the gallery {gallery} keeps none"
        raise InvalidArgument(f"{told}: leave it out, or make the gallery with thumbnails")


def with_source_of(stored: GalleryItem | None, checked: CheckedItem) -> CheckedItem:
    """Give an item the source of the stored one, which remembers what of it is another now."""
    item, metadata = checked
    if stored is None or stored.source is None or item.source is not None:
        return checked
    given = given_by_source(stored)
    source = replace(stored.source, given="" if given == given_by_source(item) else given)
    return CheckedItem(replace(item, source=source), metadata)


def given_by_source(item: GalleryItem) -> str:
    """Return the label, URI and metadata that an item's source gave, as `Source.given` has them."""
    own = _JSON.encode([item.label, item.uri, dict(item.metadata)])
    return item.source.given or own if item.source else own


def check_fields(item: GalleryItem) -> str:
    """Check all of an item but its vector; return its metadata as the JSON object that is stored."""
    check_key(item.key)
    check_text(item.label, "label", most=MAX_KEY_BYTES)
    check_text(item.uri, "URI", most=MAX_URI_BYTES)
    if len(item.thumbnail) > MAX_THUMBNAIL_BYTES:
        raise InvalidArgument(f"the thumbnail is {len(item.thumbnail)} bytes; limit is {MAX_THUMBNAIL_BYTES}")
    if item.thumbnail and not item.thumbnail.startswith(JPEG):
        raise InvalidArgument("the thumbnail is no JPEG file; send the bytes of one, or leave it out")
    if item.source is not None:
        check_origin(item.source.origin)
    return _json_of(item.metadata)


def check_model(meta: "Meta", model: "ModelSpec | Maker", gallery: str) -> None:
    """Accept the model of a gallery, and a file of lower precision made from it; else ModelMismatch."""
    theirs = (model.fingerprint, model.fp32_fingerprint)
    if meta.fingerprint in theirs and meta.dimension == model.dimension:
        return
    ours = f"{meta.model_name} (fingerprint {meta.fingerprint[:12]}, dimension {meta.dimension})"
    given = f"{model.name} (fingerprint {model.fingerprint[:12]}, dimension {model.dimension})"
    raise ModelMismatch(
        f"the gallery {gallery} holds embeddings of the model {ours}, and the model given is {given}; "
        "give the gallery's own model, or index the images into a new gallery"
    )


def check_key(key: str) -> str:
    """Return `key` if it can name an item: 1 to 1024 bytes of UTF-8 without NUL."""
    return check_text(key, "key", least=1, most=MAX_KEY_BYTES)


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys without repetition, in order."""
    if isinstance(keys, str):
        raise InvalidArgument(f"expected a list of keys, found the single string {keys!r}; put it in a list")
    return list(dict.fromkeys(map(check_key, keys)))


def check_origin(origin: str) -> str:
    """Return `origin` if it can name the data set of a source: as a URI, and not empty."""
    return check_text(origin, "origin", least=1, most=MAX_URI_BYTES)


def check_text(text: str, what: str, *, least: int = 0, most: int) -> str:
    """Return a text of so many bytes of UTF-8 and without NUL."""
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


def check_whole(number: SupportsIndex, what: str, *, least: int, most: int) -> int:
    """Return a whole number, of Python or NumPy, within bounds."""
    whole = operator.index(number)
    if not least <= whole <= most:
        raise InvalidArgument(f"{what} is {whole}; expected {least} to {most}")
    return whole


def check_cosine(what: str, score: float) -> float:
    """Return the least score wanted if it can be one."""
    if not -1.0 <= score <= 1.0:  # NaN too
        raise InvalidArgument(f"{what} is {score}; expected a cosine in [-1, 1]")
    return score


def plain(value: Any) -> Any:
    """Return what JSON has for a value or an array of NumPy, or a date (ISO 8601); others as they are."""
    if isinstance(value, np.ndarray | np.generic):
        nanoseconds = value.dtype == np.dtype("datetime64[ns]")  # of which Python has no time
        value = (value.astype("datetime64[us]") if nanoseconds else value).tolist()
    # What equals not even itself is pandas' NaT, a date without a text.
    return value.isoformat() if isinstance(value, date) and value == value else value


def check_metadata(metadata: Any, left: int = MAX_METADATA_LEVELS, *, exact: bool = False) -> None:
    """Check that metadata can travel: of few levels, its numbers doubles, `exact` ones below 2^53."""
    if isinstance(metadata, str):
        return
    if isinstance(metadata, Mapping):
        inner: Iterable[Any] = metadata.values()
    elif isinstance(metadata, list | tuple):
        inner = metadata
    else:
        if exact and isinstance(metadata, int | float) and MAX_EXACT < abs(metadata) < math.inf:
            raise InvalidArgument(f"metadata holds {metadata!r:.40}, and {ROUNDED}")
        if isinstance(metadata, int) and abs(metadata) > sys.float_info.max:
            raise InvalidArgument("metadata holds a whole number larger than a double; write it as a string")
        return
    if not left:
        raise InvalidArgument(f"metadata is nested more than {MAX_METADATA_LEVELS} levels deep")
    for each in inner:
        check_metadata(each, left - 1, exact=exact)


def _json_of(metadata: Mapping[str, Any]) -> str:
    """Return metadata as the JSON object that is stored, if it can be."""
    check_metadata(metadata)
    if not all(isinstance(name, str) for name in metadata):
        raise InvalidArgument("metadata must be a JSON object: every name in it must be a string")
    try:
        text = _JSON.encode(dict(metadata))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(f"metadata is {size} bytes of JSON; the limit is {MAX_METADATA_BYTES}")
    return text


def normalize_queries(vectors: ArrayLike, *, dimension: int) -> NDArray[np.float32]:
    """Bring query vectors (Q, d) to unit norm; BadVector where one is too far from it, or not finite."""
    rows = _floats(vectors, "the query vectors")
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise InvalidArgument(f"the query vectors have shape {rows.shape}; expected (queries, {dimension})")
    return _normalize(rows, lambda _: "query vector")


def unit_vector(vector: ArrayLike, what: str, *, dimension: int) -> NDArray[np.float32]:
    """Bring one vector (d,) to unit norm, likewise."""
    unit: NDArray[np.float32] = _normalize(_row(vector, what, dimension)[None], lambda _: what)[0]
    return unit


def _row(vector: ArrayLike, what: str, dimension: int) -> NDArray[np.floating[Any]]:
    row = _floats(vector, what)
    if row.shape != (dimension,):
        raise InvalidArgument(f"{what} has shape {row.shape}; expected ({dimension},) in this gallery")
    return row


def _normalize(rows: NDArray[np.floating[Any]], name: Callable[[int], str]) -> NDArray[np.float32]:
    """Bring rows (n, d) to unit norm; each comes out the same in whichever company it is."""
    # A norm that is farther from 1 shows that the vector is no embedding of the model: it is refused, not
    # mended. Smaller differences (half precision, other sums) are divided out.
    with np.errstate(over="ignore", invalid="ignore"):
        wide = rows.astype(np.float64)
        norms = np.sqrt((wide * wide).sum(axis=1))  # (n,)
        off = np.abs(norms - 1.0)
    if off.max(initial=0.0) <= _EXACT_TOLERANCE:
        return rows.astype(np.float32, order="C")
    for row in np.flatnonzero(~(off <= NORM_TOLERANCE))[:1]:  # the negation also finds NaN
        if not np.isfinite(rows[row]).all():
            raise BadVector(f"{name(row)} holds a value that is not finite; send finite numbers", int(row))
        raise BadVector(
            f"{name(row)} has norm {norms[row]:.6g}; expected unit norm to within {NORM_TOLERANCE}: "
            "divide the vector by its norm",
            int(row),
        )
    norms[off <= _EXACT_TOLERANCE] = 1.0
    return np.ascontiguousarray(rows / norms[:, None], dtype=np.float32)


def _floats(values: ArrayLike, what: str) -> NDArray[np.floating[Any]]:
    try:
        array = np.asarray(values)
        if array.dtype in (np.float32, np.float64):  # the latter from Python lists
            return array
        return array.astype(np.float32, casting="same_kind")  # float16 cannot hold the norm to the tolerance
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"expected real numbers in {what}, found {type(values).__name__}") from error
