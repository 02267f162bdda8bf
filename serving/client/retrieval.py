"""Images and queries: embedded, searched for, explained."""

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from protos import retrieval_service_pb2 as pb
from serving.client.answers import explanation_of, hits_of
from serving.client.given import ImageLike, at_hand, text
from serving.client.models import get_model
from serving.client.query import images_of, queries_of, search_request
from serving.client.splitting import answers_to
from serving.client.step import Call, Plan
from serving.errors import InvalidArgument
from serving.rpc.limits import MAX_EXPLAINED, MAX_HITS, MAX_INPUTS
from serving.rpc.status import from_status
from serving.rpc.wire import vector_of

__all__ = ["embed_images", "explain_images", "search_gallery"]

logger = logging.getLogger(__name__)


def embed_images(images: Iterable[ImageLike], *, model: str, on_error: str) -> Plan[Any]:
    """Embed images.

    Returns:
        float32 (N, d), or the list of rows and errors.

    Raises:
        CrossbatchError: if an argument makes no sense, or a call fails.
    """
    raising, name = _raising(on_error), text(model, "model")
    rows = yield from answers_to(
        images_of(images),
        len,
        MAX_INPUTS,
        lambda some: Call(pb.EmbedRequest(images=some, model=name)),
        lambda reply: [_answer(each, lambda good: vector_of(good.vector)) for each in reply.results],
        raising=raising,
        waits=not at_hand(images),
    )
    if not raising:
        return rows
    if not rows:
        return np.zeros((0, (yield from get_model(name)).dimension), np.float32)
    return np.stack(rows)


def search_gallery(gallery: str, *, on_error: str, **options: Any) -> Plan[list[Any]]:
    """Find the nearest items to each query.

    Returns:
        One list of hits a query, or an error.

    Raises:
        CrossbatchError: if an argument makes no sense, or a call fails.
    """
    raising = _raising(on_error)
    sources = {source: options.pop(source, None) for source in ("images", "vectors", "keys")}
    asked = search_request(gallery, **options)

    def search(queries: list[pb.Query]) -> Call:
        request = pb.SearchRequest(queries=queries)
        request.MergeFrom(asked)
        return Call(request)

    return (
        yield from answers_to(
            queries_of(**sources),
            pb.Query.ByteSize,
            min(MAX_INPUTS, MAX_HITS // asked.k),
            search,
            lambda reply: _found(reply, asked.gallery),
            raising=raising,
            waits=not at_hand(sources["images"] if sources["images"] is not None else ()),
        )
    )


def explain_images(images: Iterable[ImageLike], *, model: str, on_error: str) -> Plan[list[Any]]:
    """Tell which prototypes make up each image.

    Returns:
        One explanation an image, or an error.

    Raises:
        CrossbatchError: if an argument makes no sense, or a call fails.
    """
    raising, name = _raising(on_error), text(model, "model")
    return (
        yield from answers_to(
            images_of(images),
            len,
            MAX_EXPLAINED,
            lambda some: Call(pb.ExplainRequest(images=some, model=name)),
            lambda reply: [_answer(each, explanation_of) for each in reply.results],
            raising=raising,
            waits=not at_hand(images),
        )
    )


def _found(reply: pb.SearchResponse, gallery: str) -> list[Any]:
    for field in reply.unknown_fields:
        _warn_once(gallery, field)
    return [_answer(each, hits_of) for each in reply.results]


@lru_cache(maxsize=1_024)
def _warn_once(gallery: str, field: str) -> None:
    """Say that a field may be misspelt; not with each search, as it may be gone for a good reason."""
    logger.warning(
        "no item of the gallery %s has the field %r of the filter; is it misspelt?", gallery, field
    )


def _answer(result: Any, read: Any) -> Any:
    return from_status(result.error) if result.HasField("error") else read(result)


def _raising(choice: str) -> bool:
    if choice not in ("raise", "return"):
        raise InvalidArgument(f"on_error cannot be {choice!r}; it must be 'raise' or 'return'.")
    return choice == "raise"
