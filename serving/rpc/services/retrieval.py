"""RetrievalService: images to embeddings and explanations, and queries to their nearest items."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct
from numpy.typing import NDArray

from protos import retrieval_service_pb2 as pb
from protos import retrieval_service_pb2_grpc
from serving.engine.galleries import GalleryExecutor
from serving.engine.instances import ModelInstances, Outcome
from serving.engine.models import ModelRegistry
from serving.errors import InvalidArgument, NotFound
from serving.gallery.gallery import Gallery
from serving.gallery.store.schema import Meta
from serving.gallery.validation import normalize_queries
from serving.observability.call import Call
from serving.rpc.admission import Admission
from serving.rpc.limits import MAX_EXPLAINED, MAX_INPUTS, MAX_MESSAGE_BYTES
from serving.rpc.services.convert import (
    check_count,
    embed_result,
    explain_result,
    refuse_if_all_failed,
    search_options,
    timings_of,
    write_hits,
)
from serving.rpc.status import Refusal, Violation, refusal, to_status
from serving.rpc.wire import vector_of

__all__ = ["RetrievalCalls", "neighbours"]

HITS_AT_ONCE = 1_024
"""Most neighbours that are read from a gallery before their bytes are counted, but for those of one query."""
_SPARE_BYTES = 3 * 65_536  # for what stands beside the results in a reply: 64 KiB of unknown fields at most
_FRAME_BYTES = 12  # at most, around each result


class RetrievalCalls(retrieval_service_pb2_grpc.RetrievalServiceServicer):
    """Answers Embed, Explain and Search."""

    def __init__(self, models: ModelRegistry, galleries: GalleryExecutor, admission: Admission) -> None:
        self._models = models
        self._galleries = galleries
        self._admission = admission

    def Embed(self, request: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:  # noqa: N802
        """Embed each image of the request; the call fails only if every one does."""
        images = list(request.images)
        check_count("images", len(images), MAX_INPUTS)
        self._admission.admit(call, len(images))
        with self._models.holding(request.model) as model:
            outcomes = model.embed(images, call)
        refuse_if_all_failed(outcomes, "images[{}]".format)
        return pb.EmbedResponse(
            results=[embed_result(outcome) for outcome in outcomes],
            model_name=model.name,
            model_fingerprint=model.spec.fingerprint,
            dimension=model.spec.dimension,
            timings=timings_of(call),
        )

    def Explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainResponse:  # noqa: N802
        """Tell which prototypes make up each image of the request, and where."""
        images = list(request.images)
        check_count("images", len(images), MAX_EXPLAINED)
        self._admission.admit(call, len(images))
        with self._models.holding(request.model) as model:
            outcomes = model.explain(images, call)
        refuse_if_all_failed(outcomes, "images[{}]".format)
        return pb.ExplainResponse(
            results=[explain_result(outcome) for outcome in outcomes],
            model_name=model.name,
            model_fingerprint=model.spec.fingerprint,
            prototypes=model.spec.prototypes,
            timings=timings_of(call),
        )

    def Search(self, request: pb.SearchRequest, call: Call) -> pb.SearchResponse:  # noqa: N802
        """Find the nearest items to each query of the request; the call fails only if every one does."""
        queries = list(request.queries)
        options = search_options(request)
        images = {i: query.image for i, query in enumerate(queries) if query.HasField("image")}

        def embed_and_search(meta: Meta, model: ModelInstances) -> pb.SearchResponse:
            embedded = dict(zip(images, model.embed(list(images.values()), call), strict=True))
            began = time.monotonic()
            work = partial(_found, queries=queries, embedded=embedded, options=options, call=call)
            reply = self._galleries.using(request.gallery, work, model=model)
            call.stages.spent("gallery", began, time.monotonic() - began)
            return reply

        self._admission.admit(call, len(queries))
        if images:  # the model is looked up before anything is spent on them
            reply = self._galleries.with_model(request.gallery, embed_and_search, model=request.model)
        else:
            began = time.monotonic()
            work = partial(_found, queries=queries, embedded={}, options=options, call=call)
            reply = self._galleries.using(request.gallery, work, model=request.model)
            call.stages.spent("gallery", began, time.monotonic() - began)
        reply.timings.CopyFrom(timings_of(call))
        return reply


def _found(
    gallery: Gallery,
    model: ModelInstances,
    *,
    queries: Sequence[pb.Query],
    embedded: Mapping[int, Outcome],
    options: Mapping[str, Any],
    call: Call,
) -> pb.SearchResponse:
    """Look for all queries in one gallery; `embedded` has the vectors of those that are images."""
    vectors = _vectors(gallery, queries, embedded, model.spec.dimension)
    refuse_if_all_failed(vectors, lambda i: ".".join(filter(None, (f"queries[{i}]", _source(queries[i])))))
    reply = pb.SearchResponse(model_fingerprint=model.spec.fingerprint)
    neighbours(reply, gallery, vectors, options, call)
    if "filter" in options:
        reply.unknown_fields.extend(gallery.unknown_fields(options["filter"]))
    return reply


def neighbours(
    reply: pb.SearchResponse,
    gallery: Gallery,
    vectors: Sequence[Outcome],
    options: Mapping[str, Any],
    call: Call,
) -> None:
    """Add a result for each query to a reply.

    Args:
        reply: Takes the results.
        gallery: Where to look.
        vectors: Unit vectors (d,), or why there is none.
        options: What to find for each, as `Gallery.search` takes it.
        call: That waits for the reply.

    Raises:
        Refusal: if they are more than a reply may hold, or the filter cannot be applied to this gallery.
        BadArtifact: if an item holds metadata that cannot be sent.
    """
    good = []
    for vector in vectors:
        if isinstance(vector, Exception):
            reply.results.add(error=to_status(vector))
        else:
            good.append((vector, reply.results.add()))
    known: dict[int, Struct] = {}
    room = MAX_MESSAGE_BYTES - _SPARE_BYTES
    step = max(1, HITS_AT_ONCE // options["k"])
    for start in range(0, len(good), step):
        if start:  # however long the blocks before it took
            call.check()
        some = good[start : start + step]
        try:
            near = gallery.search(np.stack([vector for vector, _ in some]), **options)
        except InvalidArgument as error:
            if "filter" not in options:
                raise
            raise Refusal([Violation("filter", error)]) from error  # all else was checked before
        for (_, result), hits in zip(some, near, strict=True):
            write_hits(result, hits, known)
            room -= result.ByteSize() + _FRAME_BYTES
            if room < 0:
                raise refusal(
                    "k",
                    f"The neighbours and their metadata are more than the {MAX_MESSAGE_BYTES:,} bytes of "
                    "a reply; ask for fewer neighbours or send fewer queries.",
                )


def _vectors(
    gallery: Gallery, queries: Sequence[pb.Query], embedded: Mapping[int, Outcome], dimension: int
) -> list[Outcome]:
    """The unit vector (d,) of each query, or why it has none; those of images are there already."""
    given = [query.vector for query in queries if query.HasField("vector")]
    if len(given) == len(queries):  # one check of all takes a fraction of the time
        with suppress(InvalidArgument, ValueError):
            return list(normalize_queries(np.stack([vector_of(each) for each in given]), dimension=dimension))
    return [
        embedded[i] if i in embedded else _given_vector(gallery, dimension, query)
        for i, query in enumerate(queries)
    ]


def _given_vector(gallery: Gallery, dimension: int, query: pb.Query) -> Outcome:
    """The unit vector (d,) of a query that is no image, or why it has none."""
    try:
        match _source(query):
            case "vector":
                rows: NDArray[np.float32] = normalize_queries(
                    vector_of(query.vector)[None], dimension=dimension
                )
                return rows.reshape(dimension)
            case "key":
                return gallery.get([query.key])[0].vector
            case _:
                return InvalidArgument("The query is empty; give an image, a vector or a key.")
    except (InvalidArgument, NotFound) as error:  # this query's alone
        return error


def _source(query: pb.Query) -> str:
    return query.WhichOneof("source") or ""
