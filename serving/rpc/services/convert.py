"""Messages to records and back: what requests hold, checked, and what replies tell."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from numpy.typing import NDArray

from protos import gallery_service_pb2, retrieval_service_pb2
from serving.engine.instances import Prototypes
from serving.errors import BadArtifact, BadImage, CrossbatchError, InvalidArgument, NotFound
from serving.gallery.item import (
    CheckedItem,
    GalleryItem,
    ItemChange,
    Neighbour,
    check_fields,
    check_key,
    check_keys,
    check_metadata,
    unit_vector,
)
from serving.gallery.search.filter import Filter
from serving.gallery.status import GalleryStatus
from serving.model.preprocess import MAX_BYTES
from serving.observability.call import STAGES, Call
from serving.rpc.filters import filter_of
from serving.rpc.limits import DEFAULT_K, DEFAULT_PAGE, MAX_EXCLUDED, MAX_HITS, MAX_INPUTS, MAX_K, MAX_PAGE
from serving.rpc.status import Refusal, Violation, refusal, to_status
from serving.rpc.wire import bytes_of, plain_of, vector_of

__all__ = [
    "FRAME_BYTES", "Upsert", "check_count", "checked", "embed_result", "explain_result", "filter_in",
    "good_or_refused", "page_size", "page_version", "read_changes", "read_items", "refuse_if_all_failed",
    "search_options", "timings_of", "write_hits", "write_info", "write_item",
]  # fmt: skip

S = TypeVar("S")
T = TypeVar("T")

MAX_METADATA_MESSAGE = 1_048_576
"""Most bytes of an item's metadata as it travels: 64 KiB of JSON never take as many."""

FRAME_BYTES = 12  # at most, around each item or result of a reply
_NONE = np.empty(0, np.float32)  # the vector of an item that comes as an image
_NOT_SENT = (ValueError, TypeError, OverflowError, RecursionError, DecodeError)


def check_count(field: str, count: int, most: int) -> None:
    """Refuse a request with no inputs or with more than `most`."""
    if not 1 <= count <= most:
        raise refusal(field, f"{count} were sent; a call takes 1 to {most:,}. Split it.")


def page_size(wanted: int, *, field: str = "page_size") -> int:
    """Return how many entries a reply has at most, where 0 leaves it to the server."""
    if wanted > MAX_PAGE:
        raise refusal(field, f"{wanted} were asked for; a reply holds at most {MAX_PAGE:,}.")
    return wanted or DEFAULT_PAGE


def page_version(token: str) -> int:
    """Return the version of the last item of the page before, which is its token; 0 of the first page."""
    if not re.fullmatch("([1-9][0-9]{0,17})?", token, re.ASCII):
        told = f"{token!r:.80} is no token of such a page; send `next_page_token` of the one before."
        raise refusal("page_token", told)
    return int(token or 0)


def filter_in(message: Any) -> Filter | None:
    """Return the filter that a request has, or None."""
    return checked("filter", filter_of, message.filter) if message.HasField("filter") else None


def checked(field: str, check: Callable[[S], T], value: S) -> T:
    """Return what a check makes of a field of a request, or refuse the request for it."""
    try:
        return check(value)
    except InvalidArgument as error:
        raise Refusal([Violation(field, error)]) from error


def search_options(request: retrieval_service_pb2.SearchRequest) -> dict[str, Any]:
    """Return what a search finds for each of its queries, as `Gallery.search` takes it."""
    check_count("queries", len(request.queries), MAX_INPUTS)
    k = request.k if request.HasField("k") else DEFAULT_K
    if not 1 <= k <= MAX_K:
        raise refusal("k", f"{k} neighbours were asked for; 1 to {MAX_K:,} can be had.")
    if k * len(request.queries) > MAX_HITS:
        raise refusal("k", f"{k} neighbours of {len(request.queries)} queries are more than {MAX_HITS:,}.")
    options: dict[str, Any] = {"k": k, "group_by_label": request.group_by_label}
    if request.HasField("minimum_score"):
        options["minimum_score"] = request.minimum_score
        if not -1 <= request.minimum_score <= 1:  # NaN too
            raise refusal("minimum_score", f"{request.minimum_score} is no score; they lie between -1 and 1.")
    if request.exclude_same:
        options["exclude_same"] = request.exclude_same
    if request.HasField("exclude_same_above"):
        options["exclude_same_above"] = above = request.exclude_same_above
        if not request.exclude_same:
            raise refusal("exclude_same_above", "It was sent without exclude_same; send both, or neither.")
        if not -1 <= above <= 1:
            raise refusal("exclude_same_above", f"{above} is no score; they lie between -1 and 1.")
    for name in ("with_vectors", "with_thumbnails"):
        if getattr(request, name):
            options[name] = True
    if request.exclude_keys:
        if (count := len(request.exclude_keys)) > MAX_EXCLUDED:
            raise refusal("exclude_keys", f"{count} were sent; a call takes at most {MAX_EXCLUDED:,}.")
        options["exclude"] = checked("exclude_keys", check_keys, list(request.exclude_keys))
    if (wanted := filter_in(request)) is not None:
        options["filter"] = wanted
    return options


@dataclass(slots=True)
class Upsert:
    """The items of one upsert."""

    items: list[CheckedItem] = field(default_factory=list)
    """Those that come as images have no vector yet."""
    images: dict[int, bytes] = field(default_factory=dict)
    """The images, by the position of their items."""
    expected: dict[str, int] = field(default_factory=dict)
    """By key, the version that an item must have now; 0: there must be none."""


def read_items(messages: Iterable[gallery_service_pb2.Item], dimension: int, call: Call) -> Upsert:
    """Check items, each for itself, as far as no model is needed; Refusal names the field of each bad one."""
    read = Upsert()
    violations: list[Violation] = []
    first: dict[str, int] = {}
    for i, message in enumerate(messages):
        call.check()
        place = f"items[{i}]"
        try:
            if (earlier := first.setdefault(message.key, i)) != i:
                same = f"The key {message.key!r} is also that of items[{earlier}]; send each key once."
                violations.append(Violation(f"{place}.key", InvalidArgument(same)))
            item = GalleryItem(message.key, _NONE, message.label, message.uri, _metadata_of(message))
            metadata = check_fields(item)
            match message.WhichOneof("content"):
                case "image":
                    place, read.images[i] = f"{place}.image", message.image
                    if not 0 < (size := len(message.image)) <= MAX_BYTES:
                        raise BadImage(f"The image has {size:,} bytes; send one of 1 to {MAX_BYTES:,}.")
                case "vector":
                    place = f"{place}.vector"
                    what = f"the vector of {message.key!r}"
                    unit = unit_vector(vector_of(message.vector), what, dimension=dimension)
                    item = replace(item, vector=unit)
                case _:
                    raise InvalidArgument("The item is empty; give an image or a vector.")
            read.items.append(CheckedItem(item, metadata))
            if message.HasField("expected_version"):
                read.expected[message.key] = message.expected_version
        except CrossbatchError as error:
            violations.append(Violation(place, error))
    if violations:
        raise Refusal(violations)
    return read


def read_changes(messages: Iterable[gallery_service_pb2.ItemUpdate]) -> list[ItemChange]:
    """Read what is to change of items; Refusal names the first whose metadata are too large."""
    changes = []
    for i, message in enumerate(messages):
        label, uri = (getattr(message, name) if message.HasField(name) else None for name in ("label", "uri"))
        checked(f"items[{i}].key", check_key, message.key)
        metadata = checked(f"items[{i}]", _metadata_of, message)
        changes.append(ItemChange(message.key, metadata, message.replace_metadata, label, uri))
    return changes


def _metadata_of(message: gallery_service_pb2.Item | gallery_service_pb2.ItemUpdate) -> dict[str, Any]:
    if message.metadata.ByteSize() > MAX_METADATA_MESSAGE:
        raise InvalidArgument("The metadata is more than 64 KiB as JSON; store less with the item.")
    metadata = plain_of(message.metadata)
    check_metadata(metadata, exact=True)
    return metadata


def good_or_refused(outcomes: Sequence[T | Exception], field_of: Callable[[int], str]) -> list[T]:
    """Return what came of each input where there is no place for an error; a Refusal names the bad ones."""
    errors = {i: each for i, each in enumerate(outcomes) if isinstance(each, Exception)}
    _refuse(errors, field_of)
    return [each for each in outcomes if not isinstance(each, Exception)]


def refuse_if_all_failed(outcomes: Sequence[object], field_of: Callable[[int], str]) -> dict[int, Exception]:
    """Fail the call if every input failed, as `good_or_refused` does if one did; return the errors."""
    errors = {i: each for i, each in enumerate(outcomes) if isinstance(each, Exception)}
    if len(errors) == len(outcomes):
        _refuse(errors, field_of)
    return errors


def _refuse(errors: dict[int, Exception], field_of: Callable[[int], str]) -> None:
    violations = []
    for i, error in errors.items():
        if not isinstance(error, InvalidArgument | NotFound):  # overload, lateness or a bug
            raise error
        violations.append(Violation(field_of(i), error))
    if violations:
        raise Refusal(violations)


def embed_result(outcome: NDArray[np.float32] | Exception) -> retrieval_service_pb2.EmbedResult:
    """Write a vector (d,), or why there is none."""
    if isinstance(outcome, Exception):
        return retrieval_service_pb2.EmbedResult(error=to_status(outcome))
    return retrieval_service_pb2.EmbedResult(vector=bytes_of(outcome))


def explain_result(outcome: Prototypes) -> retrieval_service_pb2.ExplainResult:
    """Write an explanation, or why there is none."""
    if isinstance(outcome, Exception):
        return retrieval_service_pb2.ExplainResult(error=to_status(outcome))
    histogram, assignments = outcome
    height, width = assignments.shape
    return retrieval_service_pb2.ExplainResult(
        histogram=bytes_of(histogram),
        assignments=np.ascontiguousarray(assignments, dtype=np.uint8).tobytes(),
        height=height,
        width=width,
    )


def timings_of(call: Call) -> retrieval_service_pb2.Timings:
    """Write where the time of a call went, in whole microseconds."""
    seconds = (*map(call.stages.seconds, STAGES), time.monotonic() - call.began)
    decode, queue, encode, gallery, total = (max(0, round(each * 1e6)) for each in seconds)
    return retrieval_service_pb2.Timings(
        decode_us=decode, queue_us=queue, encode_us=encode, gallery_us=gallery, total_us=total
    )


def write_hits(
    result: retrieval_service_pb2.SearchResult, hits: Iterable[Neighbour], known: dict[int, Struct]
) -> None:
    """Add the neighbours of one query to its result; BadArtifact if an item's metadata cannot be sent.

    `known` keeps metadata as it travels, by version, so that what several queries find is packed once.
    """
    add = result.hits.add
    for hit in hits:  # without a function of ours for each: there may be thousands
        metadata = known.get(hit.version)
        try:
            if metadata is None and hit.metadata:
                metadata = known[hit.version] = Struct()
                metadata.update(hit.metadata)
            add(
                key=hit.key,
                score=hit.score,
                label=hit.label,
                uri=hit.uri,
                metadata=metadata,
                version=hit.version,
                vector=b"" if hit.vector is None else bytes_of(hit.vector),
                thumbnail=hit.thumbnail,
            )
        except _NOT_SENT as error:
            raise _unsendable(hit.key, error) from error


def write_item(message: gallery_service_pb2.StoredItem, item: GalleryItem, *, with_vector: bool) -> None:
    """Fill in a stored item; BadArtifact if its metadata cannot be sent."""
    message.key, message.version, message.label, message.uri = item.key, item.version, item.label, item.uri
    try:
        if item.metadata:
            message.metadata.update(item.metadata)
            message.metadata.FromString(message.metadata.SerializeToString())  # refuses what is too deep
    except _NOT_SENT as error:
        raise _unsendable(item.key, error) from error
    if with_vector:
        message.vector = bytes_of(item.vector)


def write_info(message: gallery_service_pb2.Gallery, info: GalleryStatus, thumbnail_side: int) -> None:
    """Fill in what a gallery tells of itself."""
    message.model_name = info.model_name
    message.model_fingerprint = info.fingerprint
    message.dimension = info.dimension
    message.items = info.items
    message.index_type = info.index_type
    message.recall = info.recall
    message.fresh_items = info.fresh
    message.deleted_items = info.deleted
    message.generation = info.generation
    message.thumbnail_side = thumbnail_side


def _unsendable(key: str, error: Exception) -> BadArtifact:
    """Name the item with metadata that was stored past our own checks, too deep or too large to be sent."""
    return BadArtifact(f"The item {key!r} of the gallery cannot be sent: {error}")
