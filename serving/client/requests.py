"""What each call sends, made of a method's arguments: read, checked and cut into calls of a bounded size."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from typing import Any, TypedDict

import numpy as np
from grpc_health.v1 import health_pb2
from numpy.typing import ArrayLike, NDArray

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.client.connection import status_of
from serving.client.records import ImageFile, ImageLike, Item, hits_of
from serving.errors import BadImage, CrossbatchError, InvalidArgument, cause_of
from serving.gallery.search.filter import Filter, parse_filter
from serving.rpc import limits
from serving.rpc.filters import filter_message
from serving.rpc.status import violations_of
from serving.rpc.wire import bytes_of, struct_of

__all__ = [
    "IN_FLIGHT", "Bulk", "Request", "SearchOptions", "delete", "filter_sent", "image_bytes", "item_message",
    "request", "search", "warn_of_unknown",
]  # fmt: skip

MAX_IMAGE_BYTES = limits.MAX_MESSAGE_BYTES - 2**20  # a message has room for a key and metadata beside it
CHUNK_BYTES = limits.MAX_MESSAGE_BYTES // 2 - 65_536
"""Bytes that the inputs of one call do not pass, unless one alone does."""
IN_FLIGHT = 4
"""Most calls of one long operation that are on their way at once."""

_NO_IMAGE = "An image must be the bytes of an image file, its path, or the file opened in binary mode; found"

logger = logging.getLogger(__name__)

# Made again after a lost reply, CreateGallery would find its own gallery, DeleteGallery perhaps a new one of
# that name, and a switch or a rollback could undo itself.
_ONCE = ("CreateGallery", "DeleteGallery", "SwitchGallery", "RollbackGallery")
_MESSAGES: dict[str, Any] = vars(gallery_service_pb2) | vars(model_service_pb2) | vars(retrieval_service_pb2)
_MESSAGES["CheckRequest"] = health_pb2.HealthCheckRequest


@dataclass(slots=True)
class Request:
    """One call, made again after a lost reply if it is `repeatable`; the client has what is None or empty."""

    method: str
    message: Any
    repeatable: bool = True
    timeout: float | None = None
    id: str = ""


class Bulk:
    """Inputs of any number, in calls within the limits of one: each is `whole` with some of them in `field`.

    What fits one call is one, and `alone`. Of more, each is as much smaller as there may be calls on their
    way, so that all of them together are no more than one call's worth.
    """

    def __init__(
        self, whole: Request, field: str, inputs: Any, convert: Callable[[Any], Any],
        read: Callable[[Any], list[Any]], on_error: str = "raise", most: int = limits.MAX_INPUTS,
    ) -> None:  # fmt: skip
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f"on_error cannot be {on_error!r}; it must be 'raise' or 'return'.")
        self.whole, self.field, self.inputs, self.read, self._convert = whole, field, inputs, read, convert
        self.unread, self._taken = dict[int, CrossbatchError](), 0
        self.raising, self.alone = on_error == "raise", True
        self._most, self._held, self._bytes = most, list[Any](), 0

    def calls(self) -> Iterator[Request]:
        """Take the inputs as they are asked for, and cut them into calls."""
        for each in many(self.inputs, self.field):
            yield from self.add(self.convert(each))
        yield from self.rest()

    def convert(self, given: Any) -> Any:
        """Write an input; one that cannot be read is sent empty where its error is to stand in its place."""
        self._taken += 1
        try:
            return self._convert(given)
        except CrossbatchError as error:
            if self.raising:
                raise error.saying(f"input {self._taken - 1}: {error}") from error
            self.unread[self._taken - 1] = error
            return b"" if self.field == "images" else retrieval_service_pb2.Query()

    def add(self, made: Any) -> Iterator[Request]:
        """Take one input that was converted; gives the calls that have no room for it."""
        size = len(made) if isinstance(made, bytes) else made.ByteSize()
        if self.alone and self._is_full(size):
            held, self._held, self._bytes, self.alone = self._held, [], 0, False
            for each in held:
                yield from self.add(each)
        if self._is_full(size):
            yield from self.rest()
        self._held.append(made)
        self._bytes += size

    def rest(self) -> Iterator[Request]:
        """Give the call of what is held, if anything is."""
        if self._held:
            held, self._held, self._bytes = self._held, [], 0
            message = type(self.whole.message)(**{self.field: held})
            message.MergeFrom(self.whole.message)
            # Made again after a lost reply, a conditional write would find itself and report a conflict.
            conditional = self.field == "items" and any(item.HasField("expected_version") for item in held)
            yield replace(self.whole, message=message, repeatable=not conditional)

    def blamed(self, call: Request, place: int, error: CrossbatchError) -> list[Any]:
        """Give each input of a call its error, if it failed as all are bad; the first is number `place`."""
        if self.field == "items":  # which are stored all or none
            told = re.sub(r"(?<=^items\[)\d+", lambda found: str(int(found[0]) + place), str(error))
            raise error.saying(told) from error.__cause__
        faults = violations_of(status_of(error.__cause__))
        if not faults or not all(fault.field.startswith(f"{self.field}[") for fault in faults):
            raise error
        # A status has room for ten; it does not say why the others are bad.
        unnamed = error.saying("This input is bad, like all others of its call; send it alone to hear why.")
        count = len(getattr(call.message, self.field))
        return [*(fault.error for fault in faults), *[unnamed] * (count - len(faults))]

    def _is_full(self, size: int) -> bool:
        share = 1 if self.alone else IN_FLIGHT
        full = len(self._held) == self._most // share or self._bytes + size > CHUNK_BYTES // share
        return bool(self._held) and full


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
    exclude_same: str
    exclude_same_above: float | None
    with_thumbnails: bool
    with_vectors: bool


def request(method: str, *, timeout: float | None = None, **fields: Any) -> Request:
    """Make a request of the fields of its message; those that are None are left out."""
    return Request(method, _message(f"{method}Request", fields), method not in _ONCE, timeout)


def search(gallery: str, on_error: str, options: SearchOptions) -> Bulk:
    """Make the calls that search for each query; an answer is a list of hits, nearest first."""
    fields: dict[str, Any] = {"gallery": gallery, "k": limits.DEFAULT_K, **options}
    sources = {name: fields.pop(name, None) for name in ("images", "vectors", "keys")}
    given = [(name, source) for name, source in sources.items() if source is not None]
    if len(given) != 1:
        raise InvalidArgument("Give exactly one of images, vectors and keys to search for.")
    ((kind, queries),) = given
    queries = floats(queries, "vectors", 2) if kind == "vectors" else many(queries, kind)
    fields["exclude_keys"] = list(many(fields.pop("exclude", ()), "exclude"))
    fields["filter"] = filter_sent(fields.get("filter"))

    def read(reply: Any) -> list[Any]:
        warn_of_unknown(gallery, reply)
        return hits_of(reply)

    def query(each: Any) -> Any:
        made = image_bytes(each) if kind == "images" else bytes_of(each) if kind == "vectors" else each
        return _message("Query", {kind[:-1]: made})

    whole = request("Search", **fields)
    k = min(max(whole.message.k, 1), limits.MAX_K)  # the server refuses what is beyond
    most = min(limits.MAX_INPUTS, limits.MAX_HITS // k)
    return Bulk(whole, "queries", queries, query, read, on_error, most)


def filter_sent(wanted: Filter | Mapping[str, Any] | None) -> Any:
    """Write a filter of either form as it travels; None if there is none."""
    if wanted is None:
        return None
    return filter_message(wanted if isinstance(wanted, Filter) else parse_filter(wanted))


def warn_of_unknown(gallery: str, reply: Any) -> None:
    """Log the fields that a reply tells to be those of no item, each once."""
    for name in reply.unknown_fields:
        _warn_once(gallery, name)


def delete(
    gallery: str, keys: Iterable[str], versions: Iterable[int] | None, request_id: str
) -> list[Request]:
    """Make the calls that remove items, as many as the limits of one demand."""
    wanted = list(many(keys, "keys"))
    expected = [] if versions is None else list(many(versions, "expected_versions"))
    if versions is not None and len(expected) != len(wanted):
        raise InvalidArgument(f"{len(expected)} expected_versions for {len(wanted)} keys; give one a key.")
    calls = []
    for start in range(0, len(wanted), limits.MAX_DELETED_KEYS):
        some = slice(start, start + limits.MAX_DELETED_KEYS)
        call = request("DeleteItems", gallery=gallery, keys=wanted[some], expected_versions=expected[some])
        calls.append(replace(call, repeatable=versions is None, id=request_id))
    return calls


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


def item_message(item: Item, **update: bool) -> Any:
    """Make the message of an item, or of an `update` of one; or tell what is wrong with which."""
    if not isinstance(item, Item):
        raise InvalidArgument(f"items must be Items of serving.client; found {type(item).__name__}.")
    try:
        contents = (item.image is not None) + (item.vector is not None)
        if update and contents:
            raise InvalidArgument("it must have no image and no vector: an update leaves them as they are.")
        if not update and contents != 1:
            raise InvalidArgument("it must have an image or a vector, one of the two.")
        if not isinstance(item.metadata, Mapping):
            raise InvalidArgument(f"metadata must be a mapping; found {type(item.metadata).__name__}.")
        names = ("key", "label", "uri", "expected_version")
        fields: dict[str, Any] = {name: getattr(item, name) for name in names} | update
        if item.image is not None:
            fields["image"] = image_bytes(item.image)
        if item.vector is not None:
            fields["vector"] = bytes_of(floats(item.vector, "vector", 1))
        if item.metadata:
            fields["metadata"] = struct_of(item.metadata)
        return _message("ItemUpdate" if update else "Item", fields)
    except InvalidArgument as error:
        raise error.saying(f"The item {item.key!r:.80}: {error}") from error


@lru_cache(maxsize=1_024)
def _warn_once(gallery: str, name: str) -> None:
    """Say that a field may be misspelt; not with each search, as it may be gone for a good reason."""
    text = "no item of the gallery %s has the field %r that was asked for; is it misspelt?"
    logger.warning(text, gallery, name)


def many(values: Iterable[Any], what: str) -> Iterable[Any]:
    """Refuse a single value where several are wanted: a string, bytes, a path, an open file, a mapping."""
    single = isinstance(values, str | bytes | bytearray | memoryview | PathLike | Mapping)
    if single or hasattr(values, "read") or not isinstance(values, Iterable):
        found = f"found {type(values).__name__}. Put a single one in brackets: {what}=[...]"
        raise InvalidArgument(f"{what} must be a list; {found}.")
    return values


def floats(values: ArrayLike, what: str, axes: int) -> NDArray[np.float32]:
    """Read an array of real numbers with so many axes."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fiub" and array.ndim == axes:
            with np.errstate(over="ignore"):
                return array.astype(np.float32)
        found = f"{array.dtype} of shape {array.shape}"
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        found = f"{type(values).__name__} ({error})"
    raise InvalidArgument(f"{what} must be an array of numbers with {axes} axes; found {found}.")


def image_bytes(image: ImageLike) -> bytes:
    """Read an image that is small enough to be sent; what cannot be read or is too large is a BadImage."""
    name = "The image"
    try:
        if isinstance(image, bytes | bytearray | memoryview):
            data = bytes(image)
        elif isinstance(image, str | PathLike):
            name = f"The image {str(image)!r}"
            with open(image, "rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        elif hasattr(image, "read"):
            name = f"The image in {type(image).__name__}"
            data = _contents(image)
        else:
            raise InvalidArgument(f"{_NO_IMAGE} {type(image).__name__}. Encode pixels first, as PNG.")
    except (OSError, ValueError) as error:  # a ValueError tells of a closed file, or a path with NUL in it
        told = f"{name} cannot be read ({cause_of(error)}); check its path, or open it again."
        raise BadImage(told) from error
    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"{name} is larger than the {MAX_IMAGE_BYTES:,} bytes that can be sent; shrink it.")
    return data


def _contents(file: ImageFile) -> bytes:
    """Read a file to its end, or a little more of it than can be sent; some give less at a time."""
    data, part = bytearray(), b"..."
    while part and len(data) <= MAX_IMAGE_BYTES:
        part = file.read(MAX_IMAGE_BYTES + 1 - len(data))
        if not isinstance(part, bytes):
            getattr(part, "close", bool)()  # a coroutine would warn that nobody awaited it
            found = f"{type(file).__name__}, which reads as {type(part).__name__}"
            raise InvalidArgument(f"{_NO_IMAGE} {found}. Of an asynchronous file give `await file.read()`.")
        data += part
    return bytes(data)
