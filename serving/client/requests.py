"""What each call sends, made of a method's arguments, and how its reply is read; both clients use these."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
from grpc_health.v1 import health_pb2
from numpy.typing import ArrayLike

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.client import records
from serving.client.connection import Request
from serving.client.inputs import BulkRequest, ImageLike, floats, image_bytes, many
from serving.errors import InvalidArgument
from serving.gallery.search.filter import Filter, parse_filter
from serving.rpc import limits
from serving.rpc.filters import filter_message
from serving.rpc.status import from_status
from serving.rpc.wire import bytes_of, plain_of, struct_of, vector_of

__all__ = [
    "Page", "SearchOptions", "delete", "embed", "explain", "galleries", "gallery_of", "health", "model_of",
    "models_of", "page_of", "progress_of", "reloaded_of", "request", "search", "stored_item_of", "upsert",
]  # fmt: skip

T = TypeVar("T")

Page: TypeAlias = tuple[list[T], str]
"""Some of a list, and the token of the next page; empty at the end."""

logger = logging.getLogger(__name__)

# Made again after a lost reply, CreateGallery would find its own gallery, DeleteGallery perhaps a new one of
# that name, and a switch or a rollback could undo itself.
_ONCE = ("CreateGallery", "DeleteGallery", "SwitchGallery", "RollbackGallery")
_MESSAGES: dict[str, Any] = {
    **vars(gallery_service_pb2),
    **vars(model_service_pb2),
    **vars(retrieval_service_pb2),
    "CheckRequest": health_pb2.HealthCheckRequest,
}


def request(
    method: str, read: Callable[[Any], T], *, timeout: float | None = None, **fields: Any
) -> Request[T]:
    """Make a request of the fields of its message; those that are None are left out."""
    return Request(method, _message(f"{method}Request", fields), read, method not in _ONCE, timeout)


class SearchOptions(TypedDict, total=False):
    """What a search can be told; exactly one of `images`, `vectors` and `keys` must be given."""

    images: Iterable[ImageLike] | None
    vectors: ArrayLike | None
    keys: Iterable[str] | None
    k: int
    minimum_score: float | None
    exclude: Iterable[str]
    filter: Filter | Mapping[str, Any] | None
    group_by_label: bool
    model: str


def embed(images: Any, model: str, on_error: str) -> BulkRequest:
    """Embed images; each answer is float32 (d,)."""
    whole = request("Embed", _each(lambda result: vector_of(result.vector)), model=model)
    return BulkRequest(whole, "images", images, image_bytes, on_error=on_error)


def explain(images: Any, model: str, on_error: str) -> BulkRequest:
    """Tell which prototypes make up each image."""

    def read(result: Any) -> records.Explanation:
        assignments = np.frombuffer(result.assignments, np.uint8)
        return records.Explanation(
            vector_of(result.histogram), assignments.reshape(result.height, result.width)
        )

    whole = request("Explain", _each(read), model=model)
    return BulkRequest(whole, "images", images, image_bytes, limits.MAX_EXPLAINED, on_error)


def search(gallery: str, on_error: str, options: SearchOptions) -> BulkRequest:
    """Find the nearest items to each query; each answer is a list of hits, nearest first."""
    fields: dict[str, Any] = {"gallery": gallery, "k": limits.DEFAULT_K, **options}
    sources = [(name, fields.pop(name, None)) for name in ("images", "vectors", "keys")]
    given = [(name, source) for name, source in sources if source is not None]
    if len(given) != 1:
        raise InvalidArgument("Give exactly one of images, vectors and keys to search for.")
    ((kind, queries),) = given
    queries = floats(queries, "vectors", 2) if kind == "vectors" else many(queries, kind)
    fields["exclude_keys"] = list(many(fields.pop("exclude", ()), "exclude"))
    wanted = fields.pop("filter", None)
    wanted = parse_filter(wanted) if isinstance(wanted, Mapping) else wanted
    if not isinstance(wanted, Filter | None):
        raise InvalidArgument(f"filter must be a mapping or a Filter; found {type(wanted).__name__}.")
    fields["filter"] = None if wanted is None else filter_message(wanted)

    def read(reply: Any) -> list[Any]:
        for field in reply.unknown_fields:
            _warn_once(gallery, field)
        return _each(lambda result: [_hit(hit) for hit in result.hits])(reply)

    whole = request("Search", read, **fields)
    converted: dict[str, Callable[[Any], Any]] = {"images": image_bytes, "vectors": bytes_of}

    def query(each: Any) -> Any:
        return _message("Query", {kind[:-1]: converted[kind](each) if kind in converted else each})

    k = min(max(whole.message.k, 1), limits.MAX_K)  # the server refuses what is beyond
    return BulkRequest(
        whole, "queries", queries, query, min(limits.MAX_INPUTS, limits.MAX_HITS // k), on_error
    )


def upsert(gallery: str, items: Any) -> BulkRequest:
    """Store items; each answer is the new version of one."""
    whole = request("UpsertItems", lambda reply: list(reply.versions), gallery=gallery)
    return BulkRequest(whole, "items", items, _item_message)


def delete(
    gallery: str, keys: Iterable[str], versions: Iterable[int] | None, request_id: str
) -> list[Request[int]]:
    """Remove items, in as many calls as the limits of one demand."""
    wanted = list(many(keys, "keys"))
    expected = [] if versions is None else list(many(versions, "expected_versions"))
    if versions is not None and len(expected) != len(wanted):
        counts = f"There are {len(expected)} expected_versions for {len(wanted)} keys"
        raise InvalidArgument(f"{counts}; give one a key.")
    calls = []
    for start in range(0, len(wanted), limits.MAX_DELETED_KEYS):
        some = slice(start, start + limits.MAX_DELETED_KEYS)
        fields: dict[str, Any] = {"keys": wanted[some], "expected_versions": expected[some]}
        call = request("DeleteItems", lambda reply: int(reply.deleted), gallery=gallery, **fields)
        call.repeatable, call.id = versions is None, request_id
        calls.append(call)
    return calls


def galleries() -> Request[Page[records.GalleryInfo]]:
    """Describe all galleries, a page a call."""
    return request("ListGalleries", page_of("galleries", _gallery_info))


def health() -> Request[bool]:
    """Ask whether the server serves."""
    return request("Check", lambda reply: bool(reply.status == health_pb2.HealthCheckResponse.SERVING))


def page_of(field: str, read: Callable[[Any], T]) -> Callable[[Any], Page[T]]:
    """Make what reads a page of a list."""
    return lambda reply: ([read(each) for each in getattr(reply, field)], reply.next_page_token)


def gallery_of(reply: Any) -> records.GalleryInfo:
    """Read the gallery of a reply that has one."""
    return _gallery_info(reply.gallery)


def progress_of(reply: Any) -> records.BuildProgress:
    """Read how far an index is."""
    made = gallery_of(reply) if reply.HasField("gallery") else None
    return records.BuildProgress(reply.stage, reply.done, reply.total, made)


def model_of(reply: Any) -> records.ModelInfo:
    """Read the model of a reply that has one."""
    return _record(records.ModelInfo, reply.model)


def models_of(reply: Any) -> list[records.ModelInfo]:
    """Read the models of a reply that has some."""
    return [_record(records.ModelInfo, each) for each in reply.models]


def reloaded_of(reply: Any) -> records.Reloaded:
    """Read what a reload came to."""
    return records.Reloaded(tuple(models_of(reply)), tuple(reply.loaded), tuple(reply.removed))


def _message(kind: str, fields: Mapping[str, Any]) -> Any:
    """Make a message, or tell which field is of the wrong kind or out of range."""
    wrong = (TypeError, ValueError, OverflowError)
    try:
        return _MESSAGES[kind](**fields)
    except wrong:
        for name, value in fields.items():
            try:
                _MESSAGES[kind](**{name: value})
            except wrong as error:
                raise InvalidArgument(f"{name} cannot be {value!r:.80}: {error}.") from error
        raise


def _item_message(item: records.Item) -> Any:
    if not isinstance(item, records.Item):
        raise InvalidArgument(f"items must be Items of serving.client; found {type(item).__name__}.")
    try:
        if (item.image is None) == (item.vector is None):
            raise InvalidArgument("it must have an image or a vector, one of the two.")
        fields = {name: getattr(item, name) for name in ("key", "label", "uri", "expected_version")}
        if item.image is not None:
            fields["image"] = image_bytes(item.image)
        if item.vector is not None:
            fields["vector"] = bytes_of(floats(item.vector, "vector", 1))
        if not isinstance(item.metadata, Mapping):
            raise InvalidArgument(f"metadata must be a mapping; found {type(item.metadata).__name__}.")
        if item.metadata:
            fields["metadata"] = struct_of(item.metadata)
        return _message("Item", fields)
    except InvalidArgument as error:
        raise error.saying(f"The item {item.key!r:.80}: {error}") from error


def _each(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Read a reply that has a result or an error for each input."""
    return lambda reply: [
        from_status(each.error) if each.HasField("error") else read(each) for each in reply.results
    ]


def stored_item_of(item: Any, thumbnail: bytes = b"") -> records.StoredItem:
    """Read an item as it is stored."""
    vector = vector_of(item.vector) if item.vector else None
    metadata = plain_of(item.metadata)
    return _record(records.StoredItem, item, metadata=metadata, vector=vector, thumbnail=thumbnail)


def _hit(hit: Any) -> records.Hit:
    return records.Hit(hit.key, hit.score, hit.label, hit.uri, plain_of(hit.metadata), hit.version)


def _gallery_info(info: Any) -> records.GalleryInfo:
    problem = from_status(info.problem) if info.HasField("problem") else None
    return _record(
        records.GalleryInfo, info, problem=problem, fresh=info.fresh_items, deleted=info.deleted_items
    )


def _record(kind: type[T], message: Any, **others: Any) -> T:
    """Make a record of the fields of a message that have the same names, and of the others."""
    same = [name for name in kind.__slots__ if name not in others]  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in same}, **others)


@lru_cache(maxsize=1_024)
def _warn_once(gallery: str, field: str) -> None:
    """Say that a field may be misspelt; not with each search, as it may be gone for a good reason."""
    text = "no item of the gallery %s has the field %r of the filter; is it misspelt?"
    logger.warning(text, gallery, field)
