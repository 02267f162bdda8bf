"""What a search asks for, read from its request: a large one is unpacked part by part, in a thread."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from protos import retrieval_service_pb2 as pb
from serving.errors import InvalidArgument
from serving.gallery.item import check_keys
from serving.rpc.filters import filter_of
from serving.rpc.limits import DEFAULT_K, MAX_EXCLUDED, MAX_HITS, MAX_K
from serving.rpc.loose import loosened
from serving.rpc.parts import LARGE, check_parts
from serving.rpc.services.neighbours import Options
from serving.rpc.status import refusal

__all__ = [
    "MAX_FILTER_MESSAGE",
    "Asked",
    "Request",
    "UnreadSearch",
    "is_quickly_read",
    "read_search",
    "search_request",
]

MAX_FILTER_MESSAGE = 524_288
"""Most bytes of a filter as it travels: its 64 KiB of text, and 1,000 conditions 30 levels deep."""

UnreadSearch = loosened(pb.SearchRequest)
"""A SearchRequest whose `queries` and `filter` are bytes."""

Request: TypeAlias = Any
"""A SearchRequest or an `UnreadSearch`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one search asks for."""

    queries: list[pb.Query]
    """What to look for."""
    options: Options
    """What to find for each."""


def search_request(data: bytes) -> Request:
    """Unpack a request, a large one but for its parts.

    Raises:
        DecodeError: if the bytes are no SearchRequest.
    """
    return pb.SearchRequest.FromString(data) if len(data) <= LARGE else UnreadSearch.FromString(data)


def is_quickly_read(request: Request) -> bool:
    """Tell whether `read_search` takes so little time that the event loop may do it."""
    return isinstance(request, pb.SearchRequest) and not request.HasField("filter")


def read_search(request: Request) -> Asked:
    """Unpack and check what a request asks for; may take long.

    Raises:
        Refusal: if something is out of bounds; names the field.
    """
    k = request.k if request.HasField("k") else DEFAULT_K
    if not 1 <= k <= MAX_K:
        raise refusal("k", f"{k} neighbours were asked for; 1 to {MAX_K:,} can be had.")
    if k * len(request.queries) > MAX_HITS:
        raise refusal(
            "k", f"{k} neighbours of {len(request.queries)} queries are more than {MAX_HITS:,} in all."
        )
    if len(request.exclude_keys) > MAX_EXCLUDED:
        raise refusal(
            "exclude_keys", f"{len(request.exclude_keys)} were sent; a call takes at most {MAX_EXCLUDED:,}."
        )
    minimum = request.minimum_score if request.HasField("minimum_score") else None
    if minimum is not None and not -1 <= minimum <= 1:  # NaN too
        raise refusal("minimum_score", f"{minimum} is not a score; scores lie between -1 and 1.")
    try:
        exclude = check_keys(list(request.exclude_keys))
    except InvalidArgument as error:
        raise refusal("exclude_keys", str(error)) from error
    try:
        wanted = filter_of(_filter_message(request.filter)) if request.HasField("filter") else None
    except InvalidArgument as error:
        raise refusal("filter", str(error)) from error
    queries = [_query_message(i, query) for i, query in enumerate(request.queries)]
    return Asked(queries, Options(k, minimum, exclude, wanted, request.group_by_label))


def _filter_message(part: pb.Filter | bytes) -> pb.Filter:
    if isinstance(part, pb.Filter):
        return part
    if len(part) > MAX_FILTER_MESSAGE:
        raise InvalidArgument(
            f"The filter takes {len(part):,} bytes; one of 1,000 conditions with 64 KiB of text takes less "
            f"than {MAX_FILTER_MESSAGE:,}. Use fewer or shorter conditions."
        )
    try:
        return pb.Filter.FromString(part)
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(
            "The bytes are no Filter, or it is nested too deep; check the proto files."
        ) from error


def _query_message(position: int, part: pb.Query | bytes) -> pb.Query:
    if isinstance(part, pb.Query):
        return part
    try:
        check_parts(part)
        return pb.Query.FromString(part)
    except InvalidArgument as error:
        raise refusal(f"queries[{position}]", str(error)) from error
    except (DecodeError, ValueError) as error:
        raise refusal(f"queries[{position}]", "The bytes are no Query; check the proto files.") from error
