"""What the Python client asks for in a search, as it travels."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

from numpy.typing import ArrayLike

from protos import retrieval_service_pb2 as pb
from serving.client.given import (
    ImageLike,
    check_k,
    check_score,
    excluded,
    floats_of,
    image_bytes,
    many,
    text,
    texts,
)
from serving.errors import InvalidArgument
from serving.gallery.search.filter import Filter, parse_filter
from serving.rpc.filters import filter_message
from serving.rpc.limits import DEFAULT_K
from serving.rpc.wire import bytes_of

__all__ = ["FilterLike", "SearchOptions", "images_of", "queries_of", "search_request"]

FilterLike = Filter | Mapping[str, Any]
"""A filter, or the mapping that `parse_filter` makes one of."""


class SearchOptions(TypedDict, total=False):
    """What a search can be told; exactly one of `images`, `vectors` and `keys` must be given."""

    images: Iterable[ImageLike] | None
    vectors: ArrayLike | None
    keys: Iterable[str] | None
    k: int
    minimum_score: float | None
    exclude: Iterable[str]
    filter: FilterLike | None
    group_by_label: bool
    model: str


def search_request(
    gallery: str,
    *,
    k: int = DEFAULT_K,
    minimum_score: float | None = None,
    exclude: Iterable[str] = (),
    filter: FilterLike | None = None,
    group_by_label: bool = False,
    model: str = "",
) -> pb.SearchRequest:
    """Write all of a search but its queries.

    Raises:
        InvalidArgument: if something is of another kind or out of range.
    """
    if not isinstance(group_by_label, bool):
        raise InvalidArgument(f"group_by_label must be True or False; found {group_by_label!r}.")
    wanted = parse_filter(filter) if isinstance(filter, Mapping) else filter
    return pb.SearchRequest(
        gallery=text(gallery, "gallery"),
        k=check_k(k),
        minimum_score=check_score(minimum_score),
        exclude_keys=excluded(exclude),
        filter=None if wanted is None else filter_message(wanted),
        group_by_label=group_by_label,
        model=text(model, "model"),
    )


def queries_of(
    images: Iterable[ImageLike] | None, vectors: ArrayLike | None, keys: Iterable[str] | None
) -> Iterator[pb.Query]:
    """Write what is looked for, each when its turn comes.

    Raises:
        InvalidArgument: at once, if it is not exactly one of the three or no list; later, if one is bad.
    """
    if sum(each is not None for each in (images, vectors, keys)) != 1:
        raise InvalidArgument("Give exactly one of images, vectors and keys to search for.")
    if images is not None:
        return (pb.Query(image=image) for image in images_of(images))
    if vectors is not None:
        rows = floats_of(vectors, "vectors", "(queries, components)")
        return (pb.Query(vector=bytes_of(row)) for row in rows)
    return (pb.Query(key=key) for key in texts(() if keys is None else keys, "keys"))


def images_of(images: Iterable[ImageLike]) -> Iterator[bytes]:
    """Read images, each when its turn comes.

    Raises:
        InvalidArgument: if they are no list, or one is neither bytes nor a path.
        BadImage: if a file cannot be read or is too large.
    """
    return (image_bytes(image) for image in many(images, "images"))
