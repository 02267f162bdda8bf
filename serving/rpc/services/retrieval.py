"""RetrievalService: images to embeddings and explanations, and queries to their nearest items."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct

from protos import retrieval_service_pb2 as pb
from protos import retrieval_service_pb2_grpc
from serving.engine.galleries import GalleryExecutor
from serving.engine.instances import ModelInstances, Outcome
from serving.engine.models import ModelRegistry
from serving.errors import InvalidArgument, NotFound
from serving.gallery.item import BadVector
from serving.gallery.place import AnyGallery
from serving.gallery.search.filter import AllOf, Exists
from serving.gallery.store.schema import Meta
from serving.observability.call import Call
from serving.rpc.admission import Admission
from serving.rpc.limits import MAX_EXPLAINED, MAX_INPUTS, MAX_MESSAGE_BYTES
from serving.rpc.services import convert
from serving.rpc.status import Refusal, Violation, refusal, to_status
from serving.rpc.wire import vector_of

__all__ = ["RetrievalCalls", "neighbours"]

HITS_AT_ONCE = 1_024
"""Most neighbours that are read from a gallery before their bytes are counted, but for those of one query."""
_SPARE_BYTES = 3 * 65_536  # for what stands beside the results in a reply: 64 KiB of unknown fields at most


class RetrievalCalls(retrieval_service_pb2_grpc.RetrievalServiceServicer):
    """Answers Embed, Explain and Search."""

    def __init__(self, models: ModelRegistry, galleries: GalleryExecutor, admission: Admission) -> None:
        self._models = models
        self._galleries = galleries
        self._admission = admission

    def Embed(self, request: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:  # noqa: N802
        """Embed each image of the request; the call fails only if every one does."""
        images = list(request.images)
        convert.check_count("images", len(images), MAX_INPUTS)
        self._admission.admit(call, len(images))
        with self._models.holding(request.model) as model:
            outcomes = model.embed(images, call)
        convert.refuse_if_all_failed(outcomes, "images[{}]".format)
        return pb.EmbedResponse(
            results=[convert.embed_result(outcome) for outcome in outcomes],
            model_name=model.name,
            model_fingerprint=model.spec.fingerprint,
            dimension=model.spec.dimension,
            timings=convert.timings_of(call),
        )

    def Explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainResponse:  # noqa: N802
        """Tell which prototypes make up each image of the request, and where."""
        images = list(request.images)
        convert.check_count("images", len(images), MAX_EXPLAINED)
        self._admission.admit(call, len(images))
        with self._models.holding(request.model) as model:
            outcomes = model.explain(images, call)
        convert.refuse_if_all_failed(outcomes, "images[{}]".format)
        return pb.ExplainResponse(
            results=[convert.explain_result(outcome) for outcome in outcomes],
            model_name=model.name,
            model_fingerprint=model.spec.fingerprint,
            prototypes=model.spec.prototypes,
            timings=convert.timings_of(call),
        )

    def Search(self, request: pb.SearchRequest, call: Call) -> pb.SearchResponse:  # noqa: N802
        """Find the nearest items to each query of the request; the call fails only if every one does."""
        queries = list(request.queries)
        options = convert.search_options(request)
        images = {i: query.image for i, query in enumerate(queries) if query.HasField("image")}
        embedded: dict[int, Outcome] = {}
        search = partial(_found, queries=queries, embedded=embedded, options=options, call=call)
        began = 0.0

        def embed_and_search(meta: Meta, model: ModelInstances) -> pb.SearchResponse:
            nonlocal began
            embedded.update(zip(images, model.embed(list(images.values()), call), strict=True))
            began = time.monotonic()
            return self._galleries.using(request.gallery, search, call, model=model)

        self._admission.admit(call, len(queries))
        if images:  # the model is looked up before anything is spent on them
            reply = self._galleries.with_model(request.gallery, embed_and_search, model=request.model)
        else:
            began = time.monotonic()
            reply = self._galleries.using(request.gallery, search, call, model=request.model)
        call.stages.spent("gallery", began, time.monotonic() - began)
        reply.timings.CopyFrom(convert.timings_of(call))
        return reply


def _found(
    gallery: AnyGallery,
    model: ModelInstances,
    *,
    queries: Sequence[pb.Query],
    embedded: Mapping[int, Outcome],
    options: Mapping[str, Any],
    call: Call,
) -> pb.SearchResponse:
    """Look for all queries in one gallery; `embedded` has the vectors of those that are images."""

    def field_of(i: int) -> str:
        return f"queries[{i}].{queries[i].WhichOneof('source') or ''}".rstrip(".")

    vectors = [
        embedded[i] if i in embedded else _given_vector(gallery, query) for i, query in enumerate(queries)
    ]
    reply = pb.SearchResponse(model_fingerprint=model.spec.fingerprint)
    neighbours(reply, gallery, vectors, options, call, [query.key for query in queries])
    for i, error in convert.refuse_if_all_failed(vectors, field_of).items():
        reply.results[i].error.CopyFrom(to_status(error))
    named = [Exists(options["exclude_same"])] if "exclude_same" in options else []
    if wanted := [*named, *([options["filter"]] if "filter" in options else [])]:
        reply.unknown_fields.extend(gallery.unknown_fields(AllOf(tuple(wanted))))
    return reply


def neighbours(
    reply: pb.SearchResponse,
    gallery: AnyGallery,
    vectors: list[Outcome],
    options: Mapping[str, Any],
    call: Call,
    keys: Sequence[str] = (),
) -> None:
    """Add a result for each query to a reply; an error takes the place of a vector (d,) not of unit norm.

    `keys` are those of the queries, empty for what is no item, and wanted only with `exclude_same`. Raises
    Refusal where they are more than a reply may hold, or the filter cannot be applied here.
    """
    left = []
    for i, vector in enumerate(vectors):
        result = reply.results.add()
        if not isinstance(vector, Exception):
            left.append((i, vector, result))
    known: dict[int, Struct] = {}
    room = MAX_MESSAGE_BYTES - _SPARE_BYTES
    step = max(1, HITS_AT_ONCE // options["k"])
    while left:
        some = left[:step]
        try:
            own = [keys[i] for i, _, _ in some] if "exclude_same" in options else ()
            near = gallery.search(np.stack([vector for _, vector, _ in some]), query_keys=own, **options)
        except BadVector as error:  # this query's alone
            vectors[left.pop(error.row)[0]] = error
            call.check()
            continue
        except InvalidArgument as error:
            if "filter" not in options:
                raise
            raise Refusal([Violation("filter", error)]) from error  # all else was checked before
        for (_, _, result), hits in zip(some, near, strict=True):
            convert.write_hits(result, hits, known)
            room -= result.ByteSize() + convert.FRAME_BYTES
            if room < 0:
                raise refusal(
                    "k",
                    f"The neighbours and what is stored with them are more than the {MAX_MESSAGE_BYTES:,} "
                    "bytes of a reply; ask for fewer neighbours or send fewer queries.",
                )
        if left := left[step:]:  # however long this block took
            call.check()


def _given_vector(gallery: AnyGallery, query: pb.Query) -> Outcome:
    """The vector (d,) of a query that is no image, or why it has none; the search checks its norm."""
    try:
        match query.WhichOneof("source"):
            case "vector":
                vector, dimension = vector_of(query.vector), gallery.meta.dimension
                if len(vector) == dimension:
                    return vector
                return InvalidArgument(f"The vector has {len(vector)} values; expected {dimension} here.")
            case "key":
                return gallery.get([query.key])[0].vector
            case _:
                return InvalidArgument("The query is empty; give an image, a vector or a key.")
    except (InvalidArgument, NotFound) as error:  # this query's alone
        return error
