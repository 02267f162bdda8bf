"""What each call sends, made of a method's arguments, and how its reply is read; both clients use these."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict, TypeVar

from grpc_health.v1 import health_pb2
from numpy.typing import ArrayLike

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.client import records
from serving.client.connection import Request, faults_of
from serving.client.inputs import ImageLike, floats, image_bytes, many
from serving.errors import CrossbatchError, InvalidArgument
from serving.gallery.search.filter import Filter, parse_filter
from serving.rpc import limits
from serving.rpc.filters import filter_message
from serving.rpc.status import from_status
from serving.rpc.wire import bytes_of, checked_struct_of, vector_of

__all__ = [
    "CHUNK_BYTES", "IN_FLIGHT", "BulkRequest", "Chunk", "Chunker", "Page", "SearchOptions", "delete",
    "embed", "explain", "galleries", "get", "health", "items", "request", "search", "upsert",
]  # fmt: skip

T = TypeVar("T")

Page: TypeAlias = tuple[list[T], str]
"""Some of a list, and the token of the next page; empty at the end."""

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Most calls of one long operation that are on their way at once."""
CHUNK_BYTES = limits.MAX_MESSAGE_BYTES // 2 - 65_536
"""Bytes that the inputs of one call do not pass, unless one alone does."""

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
    made = message(_MESSAGES[f"{method}Request"], fields)
    return Request(method, made, read, method not in _ONCE, timeout)


def message(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Make a message, or tell by InvalidArgument which field is of the wrong kind or out of range."""
    wrong = (TypeError, ValueError, OverflowError)
    try:
        return kind(**fields)
    except wrong:
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except wrong as error:
                raise InvalidArgument(f"{name} cannot be {value!r:.80}: {error}.") from error
        raise


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one call takes: `inputs`, of which the first is input number `place`; `last` if none follow."""

    place: int
    inputs: list[Any]
    last: bool = False


class Chunker:
    """Cuts a stream of inputs into calls.

    What fits one call is one chunk. Of more, each is as much smaller as there may be calls on their way, so
    that all of them together are no more than one call's worth.
    """

    def __init__(self, most: int) -> None:
        self._most, self._most_bytes, self._one = most, CHUNK_BYTES, True
        self._held, self._bytes, self._place = list[Any](), 0, 0

    def add(self, each: Any) -> Iterator[Chunk]:
        """Take an input; gives the chunks that have no room for it."""
        size = len(each) if isinstance(each, bytes) else each.ByteSize()
        if self._held and (len(self._held) == self._most or self._bytes + size > self._most_bytes):
            if self._one:
                again, self._held, self._bytes, self._one = self._held, [], 0, False
                self._most, self._most_bytes = self._most // IN_FLIGHT, CHUNK_BYTES // IN_FLIGHT
                for one in [*again, each]:
                    yield from self.add(one)
                return
            yield self._cut()
        self._held.append(each)
        self._bytes += size

    def rest(self) -> Iterator[Chunk]:
        """Give what is held at the end of the stream, if anything is."""
        if self._held:
            yield self._cut(last=True)

    def _cut(self, *, last: bool = False) -> Chunk:
        chunk = Chunk(self._place, self._held, last)
        self._place, self._held, self._bytes = self._place + len(chunk.inputs), [], 0
        return chunk


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """Inputs in as many calls as the limits of one demand: each is `whole` with some of them in `field`.

    With `raising` the first bad input raises its error, else it has the error as its answer.
    """

    whole: Request[list[Any]]
    field: str
    inputs: Any
    convert: Callable[[Any], Any]
    at_once: int = limits.MAX_INPUTS
    raising: bool = True

    def chunks(self) -> Iterator[Chunk]:
        """Take the inputs as they are asked for, and cut them into calls."""
        chunker = Chunker(self.at_once)
        for each in many(self.inputs, "images" if self.field == "queries" else self.field):
            yield from chunker.add(self.convert(each))
        yield from chunker.rest()

    def request(self, chunk: Chunk) -> Request[list[Any]]:
        """Make the call for some of the inputs."""
        made = type(self.whole.message)(**{self.field: chunk.inputs})
        made.MergeFrom(self.whole.message)
        # Made again after a lost reply, a conditional write would find itself and report a conflict.
        conditional = self.field == "items" and any(each.HasField("expected_version") for each in made.items)
        return Request(self.whole.method, made, self.whole.read, repeatable=not conditional)

    def placed(self, answers: list[Any], chunk: Chunk, request_id: str) -> list[Any]:
        """Give the errors among the answers their request id; raise the first one if that is wanted."""
        for i, each in enumerate(answers, chunk.place):
            if isinstance(each, CrossbatchError):
                each.request_id = each.request_id or request_id
                if self.raising:
                    raise each.saying(f"input {i}: {each}") from each
        return answers

    def blamed(self, chunk: Chunk, error: CrossbatchError) -> list[Any]:
        """Give each input its own error, when its call failed since all of its inputs are bad.

        Raises:
            CrossbatchError: that of the call, if it failed for another reason, or stores all or nothing.
        """
        faults = faults_of(error)
        found = [re.match(rf"{self.field}\[(\d+)\]", fault.field) for fault in faults]
        if self.field == "items" and found and found[0]:
            place = f"items[{int(found[0][1]) + chunk.place}]{faults[0].field[found[0].end() :]}"
            raise error.saying(f"{place}: {faults[0].error}") from error
        if self.field == "items" or not found or not all(found):
            raise error
        # A status has room for ten; it does not say why the others are bad.
        unnamed = error.saying("This input is bad, like all others of its call; send it alone to hear why.")
        return [*(fault.error for fault in faults), *[unnamed] * (len(chunk.inputs) - len(faults))]


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
    return BulkRequest(whole, "images", images, image_bytes, raising=_raising(on_error))


def explain(images: Any, model: str, on_error: str) -> BulkRequest:
    """Tell which prototypes make up each image."""
    whole = request("Explain", _each(records.explanation_of), model=model)
    return BulkRequest(whole, "images", images, image_bytes, limits.MAX_EXPLAINED, _raising(on_error))


def search(gallery: str, on_error: str, options: SearchOptions) -> BulkRequest:
    """Find the nearest items to each query; each answer is a list of hits."""
    fields: dict[str, Any] = {"gallery": gallery, "k": limits.DEFAULT_K, **options}
    sources = [(name, fields.pop(name, None)) for name in ("images", "vectors", "keys")]
    given = [(name, source) for name, source in sources if source is not None]
    if len(given) != 1:
        raise InvalidArgument("Give exactly one of images, vectors and keys to search for.")
    fields["exclude_keys"] = list(many(fields.pop("exclude", ()), "exclude"))
    wanted = fields.pop("filter", None)
    wanted = parse_filter(wanted) if isinstance(wanted, Mapping) else wanted
    fields["filter"] = None if wanted is None else filter_message(wanted)

    def read(reply: retrieval_service_pb2.SearchResponse) -> list[Any]:
        for field in reply.unknown_fields:
            _warn_once(gallery, field)
        return _each(records.hits_of)(reply)

    whole = request("Search", read, **fields)
    if not 1 <= whole.message.k <= limits.MAX_K:
        raise InvalidArgument(f"k cannot be {whole.message.k}; it must be from 1 to {limits.MAX_K:,}.")
    ((kind, queries),) = given
    if kind != "images":
        queries = floats(queries, "vectors", 2) if kind == "vectors" else many(queries, "keys")

    def query(each: Any) -> retrieval_service_pb2.Query:
        if kind == "images":
            return retrieval_service_pb2.Query(image=image_bytes(each))
        if kind == "vectors":
            return retrieval_service_pb2.Query(vector=bytes_of(each))
        return message(retrieval_service_pb2.Query, {"key": each})  # type: ignore[no-any-return]

    at_once = min(limits.MAX_INPUTS, limits.MAX_HITS // whole.message.k)
    return BulkRequest(whole, "queries", queries, query, at_once, _raising(on_error))


def upsert(gallery: str, items: Any) -> BulkRequest:
    """Store items; each answer is the new version of one."""
    whole = request("UpsertItems", lambda reply: list(reply.versions), gallery=gallery)
    return BulkRequest(whole, "items", items, _item)


def delete(gallery: str, keys: Iterable[str], versions: Iterable[int] | None) -> list[Request[int]]:
    """Remove items, in as many calls as the limits of one demand."""
    wanted = list(many(keys, "keys"))
    expected = [] if versions is None else list(many(versions, "expected_versions"))
    if versions is not None and len(expected) != len(wanted):
        counts = f"There are {len(expected)} expected_versions for {len(wanted)} keys"
        raise InvalidArgument(f"{counts}; give one a key.")
    calls = []
    for start in range(0, len(wanted), limits.MAX_DELETED_KEYS):
        some = slice(start, start + limits.MAX_DELETED_KEYS)
        fields = {"gallery": gallery, "keys": wanted[some], "expected_versions": expected[some]}
        made = message(gallery_service_pb2.DeleteItemsRequest, fields)
        calls.append(Request("DeleteItems", made, lambda reply: int(reply.deleted), versions is None))
    return calls


def get(gallery: str, key: str, thumbnail: bool) -> Request[records.StoredItem]:
    """Read one item."""
    fields: dict[str, Any] = {"gallery": gallery, "key": key, "with_thumbnail": thumbnail}
    return request("GetItem", lambda reply: records.stored_item_of(reply.item, reply.thumbnail), **fields)


def items(gallery: str, prefix: str, vectors: bool) -> Request[Page[records.StoredItem]]:
    """Read items, a page a call."""
    fields: dict[str, Any] = {"key_prefix": prefix, "with_vectors": vectors, "page_size": limits.MAX_PAGE}
    return request("ListItems", _page("items", records.stored_item_of), gallery=gallery, **fields)


def galleries() -> Request[Page[records.GalleryInfo]]:
    """Describe all galleries, a page a call."""
    return request("ListGalleries", _page("galleries", records.gallery_info_of))


def health() -> Request[bool]:
    """Ask whether the server serves."""
    return request("Check", lambda reply: bool(reply.status == health_pb2.HealthCheckResponse.SERVING))


def _page(field: str, read: Callable[[Any], T]) -> Callable[[Any], Page[T]]:
    return lambda reply: ([read(each) for each in getattr(reply, field)], reply.next_page_token)


def _raising(on_error: str) -> bool:
    if on_error not in ("raise", "return"):
        raise InvalidArgument(f"on_error cannot be {on_error!r}; it must be 'raise' or 'return'.")
    return on_error == "raise"


def _each(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Read a reply that has a result or an error for each input."""
    return lambda reply: [
        from_status(each.error) if each.HasField("error") else read(each) for each in reply.results
    ]


@lru_cache(maxsize=1_024)
def _warn_once(gallery: str, field: str) -> None:
    """Say that a field may be misspelt; not with each search, as it may be gone for a good reason."""
    text = "no item of the gallery %s has the field %r of the filter; is it misspelt?"
    logger.warning(text, gallery, field)


def _item(item: records.Item) -> gallery_service_pb2.Item:
    if not isinstance(item, records.Item):
        raise InvalidArgument(f"items must be Items of serving.client; found {type(item).__name__}.")
    try:
        if (item.image is None) == (item.vector is None):
            raise InvalidArgument("it must have an image or a vector, one of the two.")
        fields = {name: getattr(item, name) for name in ("key", "label", "uri", "expected_version")}
        made: gallery_service_pb2.Item = message(gallery_service_pb2.Item, fields)
        if item.image is not None:
            made.image = image_bytes(item.image)
        if item.vector is not None:
            made.vector = bytes_of(floats(item.vector, "vector", 1))
        if item.metadata:
            made.metadata.CopyFrom(checked_struct_of(item.metadata))
    except InvalidArgument as error:
        raise error.saying(f"The item {item.key!r:.80}: {error}") from error
    return made
