"""RetrievalService: images to embeddings and explanations, and queries to their nearest items."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protos import retrieval_service_pb2 as pb
from protos import retrieval_service_pb2_grpc
from serving.engine.fitted import on_gallery_of, with_fitting_model
from serving.engine.fleet import Fleet
from serving.engine.pace import Pace
from serving.engine.pipeline import Outcome, Pipeline
from serving.engine.shelf import Shelf
from serving.errors import CrossbatchError, InvalidArgument, NotFound
from serving.gallery.at_hand import NotAtHand
from serving.gallery.validation import normalize_queries
from serving.observability.call import Stages
from serving.rpc.admission import Admission
from serving.rpc.boundary import deadline_of
from serving.rpc.limits import MAX_EXPLAINED, MAX_INPUTS
from serving.rpc.pieces import Pieces, framed
from serving.rpc.services.asked import Asked, Request, is_quickly_read, read_search, search_request
from serving.rpc.services.bounds import check_count
from serving.rpc.services.explanation import explain_result
from serving.rpc.services.neighbours import search_results
from serving.rpc.services.timings import timings_of
from serving.rpc.status import Refusal, Violation, to_status
from serving.rpc.wire import bytes_of, vector_of

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.gallery.store.schema import Meta

__all__ = ["READERS", "Retrieval"]

READERS: Mapping[str, Callable[[bytes], Any]] = {"RetrievalService/Search": search_request}
"""What unpacks the requests of the calls that do not take their own message class."""


class _Found(NamedTuple):
    """What a search found."""

    results: list[bytes]
    """A SearchResult for each query."""
    model_fingerprint: str
    """Of the model that it was made with."""
    unknown_fields: tuple[str, ...]
    """Those of the filter that no item has."""


class Retrieval(retrieval_service_pb2_grpc.RetrievalServiceServicer):
    """Answers Embed, Explain and Search."""

    def __init__(self, fleet: Fleet, shelf: Shelf, admission: Admission) -> None:
        """Keep what the calls pass through."""
        self._fleet = fleet
        self._shelf = shelf
        self._admission = admission
        self._pace = Pace()

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        """Embed each image of the request.

        Returns:
            One result an image.

        Raises:
            InvalidArgument: if there are none or too many.
            NotFound: if there is no such model.
            Exception: the first image's, if every image failed.
        """
        stages = Stages()
        check_count("images", len(request.images), MAX_INPUTS)
        with self._admission.admit(len(request.images)), self._fleet.holding(request.model) as pipeline:
            outcomes = await pipeline.embed(request.images, deadline_of(context), stages)
        _refuse_if_all_failed(outcomes, [f"images[{i}]" for i in range(len(outcomes))])
        spec = pipeline.spec
        return pb.EmbedResponse(
            results=[_embed_result(outcome) for outcome in outcomes],
            model_name=pipeline.name,
            model_fingerprint=spec.fingerprint,
            dimension=spec.dimension,
            timings=timings_of(stages),
        )

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:  # noqa: N802
        """Tell which prototypes make up each image of the request, and where.

        Returns:
            One result an image.

        Raises:
            InvalidArgument: if there are none or too many.
            NotFound: if there is no such model.
            Mismatch: if it has no prototypes.
            Exception: the first image's, if every image failed.
        """
        stages = Stages()
        check_count("images", len(request.images), MAX_EXPLAINED)
        with self._admission.admit(len(request.images)), self._fleet.holding(request.model) as pipeline:
            outcomes = await pipeline.explain(request.images, deadline_of(context), stages)
        _refuse_if_all_failed(outcomes, [f"images[{i}]" for i in range(len(outcomes))])
        return pb.ExplainResponse(
            results=[explain_result(outcome) for outcome in outcomes],
            model_name=pipeline.name,
            model_fingerprint=pipeline.spec.fingerprint,
            prototypes=pipeline.spec.prototypes,
            timings=timings_of(stages),
        )

    async def Search(self, request: Request, context: Any) -> Any:  # noqa: N802
        """Find the nearest items to each query of the request.

        Returns:
            One result a query, in a SearchResponse in pieces.

        Raises:
            InvalidArgument: if the request is out of bounds, or its answer would be.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
            Exception: the first query's, if every query failed.
        """
        stages = Stages()
        deadline = deadline_of(context)
        check_count("queries", len(request.queries), MAX_INPUTS)
        with self._admission.admit(len(request.queries)):
            if is_quickly_read(request):
                asked = read_search(request)
            else:
                asked = await self._shelf.read(deadline, read_search, request)
            found = await self._found(request, asked, deadline, stages)
        rest = pb.SearchResponse(
            model_fingerprint=found.model_fingerprint,
            timings=timings_of(stages),
            unknown_fields=found.unknown_fields,
        )
        return Pieces([*framed(pb.SearchResponse, "results", found.results), rest.SerializeToString()])

    async def _found(self, request: Request, asked: Asked, deadline: float | None, stages: Stages) -> _Found:
        queries = asked.queries
        images = {i: query.image for i, query in enumerate(queries) if query.HasField("image")}
        outcomes: dict[int, Outcome] = {}
        is_plain = len(queries) == 1 and queries[0].HasField("vector") and asked.options.are_plain

        def answer(gallery: "Gallery", pipeline: Pipeline, *, at_once: bool = False) -> _Found:
            """Read what is looked for and search for it, all in the one gallery."""
            began = time.monotonic()
            spec = pipeline.spec
            vectors = self._vectors(gallery, queries, outcomes, spec.dimension)
            _refuse_if_all_failed(vectors, [_field_of(i, query) for i, query in enumerate(queries)])
            results = search_results(gallery, vectors, asked.options, deadline, at_once=at_once)
            if is_plain:
                self._pace.note(request.gallery, time.monotonic() - began, in_loop=at_once)
            wanted = asked.options.filter
            unknown = () if wanted is None else gallery.unknown_fields(wanted)
            return _Found(results, spec.fingerprint, unknown)

        async def embed_and_answer(_: "Meta", pipeline: Pipeline) -> _Found:
            embedded = await pipeline.embed(list(images.values()), deadline, stages)
            outcomes.update(zip(images, embedded, strict=True))
            began = time.monotonic()
            found = await self._shelf.read(
                deadline, on_gallery_of, self._shelf, request.gallery, pipeline, answer
            )
            stages.spent("gallery", began, time.monotonic() - began)
            return found

        if images:
            # The model is asked for before anything is spent on them.
            return await with_fitting_model(
                self._shelf, self._fleet, deadline, request.gallery, embed_and_answer, model=request.model
            )
        began = time.monotonic()
        if is_plain and self._admission.inputs == 1 and self._pace.is_quick(request.gallery):
            # Nobody else is there to be kept waiting.
            with suppress(NotAtHand):
                found = self._shelf.at_once(
                    request.gallery, partial(answer, at_once=True), model=request.model
                )
                stages.spent("gallery", began, time.monotonic() - began)
                return found
        found = await self._shelf.read(
            deadline, self._shelf.using, request.gallery, answer, model=request.model
        )
        stages.spent("gallery", began, time.monotonic() - began)
        return found

    def _vectors(
        self,
        gallery: "Gallery",
        queries: Sequence[pb.Query],
        embedded: Mapping[int, Outcome],
        dimension: int,
    ) -> Sequence[Outcome]:
        """The unit vector (d,) of each query, or why it has none; of the images it is there already."""
        given = [query.vector for query in queries if query.HasField("vector")]
        if len(given) == len(queries):  # one check of all takes a fraction of the time
            with suppress(InvalidArgument, ValueError):
                return list(
                    normalize_queries(np.stack([vector_of(each) for each in given]), dimension=dimension)
                )
        return [
            embedded[i] if i in embedded else self._given_vector(gallery, dimension, query)
            for i, query in enumerate(queries)
        ]

    def _given_vector(self, gallery: "Gallery", dimension: int, query: pb.Query) -> Outcome:
        """The unit vector (d,) of a query that is no image, or why it has none."""
        try:
            match query.WhichOneof("source"):
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
            return self._shelf.hide(error)


def _embed_result(outcome: Outcome) -> pb.EmbedResult:
    if isinstance(outcome, Exception):
        return pb.EmbedResult(error=to_status(outcome))
    return pb.EmbedResult(vector=bytes_of(outcome))


def _field_of(position: int, query: pb.Query) -> str:
    source = query.WhichOneof("source")
    return f"queries[{position}].{source}" if source else f"queries[{position}]"


def _refuse_if_all_failed(outcomes: Sequence[object], fields: Sequence[str]) -> None:
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if len(errors) < len(outcomes):
        return
    faults = [each for each in errors if isinstance(each, InvalidArgument | NotFound)]
    if len(faults) < len(errors):  # overload, lateness or a bug: not the fault of a field
        raise next(each for each in errors if not isinstance(each, InvalidArgument | NotFound))
    named: list[CrossbatchError] = list(faults)
    raise Refusal([Violation(field, error) for field, error in zip(fields, named, strict=True)])
