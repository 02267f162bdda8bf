"""RetrievalService: images to embeddings, and queries to their nearest items."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protos import retrieval_service_pb2 as pb
from protos import retrieval_service_pb2_grpc
from serving.errors import CrossbatchError, InvalidArgument, NotFound
from serving.gallery.item import check_keys
from serving.gallery.unit import unit_rows
from serving.rpc.filters import filter_of
from serving.rpc.gate.admission import Admission
from serving.rpc.gate.boundary import deadline_of
from serving.rpc.limits import DEFAULT_K, MAX_EXCLUDED, MAX_HITS, MAX_INPUTS, MAX_K
from serving.rpc.loose import loosened
from serving.rpc.services.neighbours import Options, search_results
from serving.rpc.status import Refusal, Violation, refusal, to_status
from serving.rpc.wire import bytes_of, vector_of
from serving.rpc.work.fitted import on_gallery_of, with_fitting_model
from serving.rpc.work.fleet import Fleet
from serving.rpc.work.pipeline import Outcome, Pipeline, Stages
from serving.rpc.work.shelf import Shelf

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.gallery.store.schema import Meta

__all__ = ["Retrieval", "check_count", "timings_of"]

UnreadResponse = loosened(pb.SearchResponse)


class Retrieval(retrieval_service_pb2_grpc.RetrievalServiceServicer):
    """Answers Embed and Search."""

    def __init__(self, fleet: Fleet, shelf: Shelf, admission: Admission) -> None:
        """Keep what the calls pass through."""
        self._fleet = fleet
        self._shelf = shelf
        self._admission = admission

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

    async def Search(self, request: pb.SearchRequest, context: Any) -> Any:  # noqa: N802
        """Find the nearest items to each query of the request.

        Returns:
            One result a query, in a SearchResponse whose parts are bytes.

        Raises:
            InvalidArgument: if the request is out of bounds, or its answer would be.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
            Exception: the first query's, if every query failed.
        """
        stages = Stages()
        options = _checked_options(request)
        deadline = deadline_of(context)
        queries = request.queries
        images = {i: query.image for i, query in enumerate(queries) if query.WhichOneof("source") == "image"}
        outcomes: dict[int, Outcome] = {}

        def answer(gallery: "Gallery", pipeline: Pipeline) -> tuple[list[bytes], str]:
            """Read what is looked for and search for it, all in the one gallery."""
            spec = pipeline.spec
            vectors = [
                outcomes[i] if i in outcomes else self._given_vector(gallery, spec.dimension, query)
                for i, query in enumerate(queries)
            ]
            _refuse_if_all_failed(vectors, [_field_of(i, query) for i, query in enumerate(queries)])
            return search_results(gallery, vectors, options, deadline), spec.fingerprint

        async def embed_and_answer(_: "Meta", pipeline: Pipeline) -> tuple[list[bytes], str]:
            embedded = await pipeline.embed(list(images.values()), deadline, stages)
            outcomes.update(zip(images, embedded, strict=True))
            began = time.monotonic()
            found = await self._shelf.read(
                deadline, on_gallery_of, self._shelf, request.gallery, pipeline, answer
            )
            stages.gallery += time.monotonic() - began
            return found

        with self._admission.admit(len(queries)):
            if images:
                # The model is asked for before anything is spent on them.
                results, fingerprint = await with_fitting_model(
                    self._shelf, self._fleet, deadline, request.gallery, embed_and_answer, model=request.model
                )
            else:
                began = time.monotonic()
                results, fingerprint = await self._shelf.read(
                    deadline, self._shelf.using, request.gallery, answer, model=request.model
                )
                stages.gallery += time.monotonic() - began
            return UnreadResponse(
                results=results,
                model_fingerprint=fingerprint,
                timings=timings_of(stages).SerializeToString(),
            )

    def _given_vector(self, gallery: "Gallery", dimension: int, query: pb.Query) -> Outcome:
        """The unit vector (d,) of a query that is no image, or why it has none."""
        try:
            match query.WhichOneof("source"):
                case "vector":
                    rows: NDArray[np.float32] = unit_rows(vector_of(query.vector)[None], dimension=dimension)
                    return rows.reshape(dimension)
                case "key":
                    return gallery.get([query.key])[0].vector
                case _:
                    return InvalidArgument("The query is empty; give an image, a vector or a key.")
        except (InvalidArgument, NotFound) as error:  # this query's alone
            return self._shelf.hide(error)


def check_count(field: str, count: int, most: int) -> None:
    """Check how many inputs a request has.

    Raises:
        Refusal: if there are none or more than `most`; names the field.
    """
    if not 1 <= count <= most:
        raise refusal(field, f"{count} were sent; a call takes 1 to {most:,}. Split it.")


def timings_of(stages: Stages) -> pb.Timings:
    """Write the times of a call as they travel, in whole microseconds."""
    seconds = (stages.decode, stages.queue, stages.encode, stages.gallery, time.monotonic() - stages.began)
    decode, queue, encode, gallery, total = (max(0, round(each * 1e6)) for each in seconds)
    return pb.Timings(decode_us=decode, queue_us=queue, encode_us=encode, gallery_us=gallery, total_us=total)


def _checked_options(request: pb.SearchRequest) -> Options:
    check_count("queries", len(request.queries), MAX_INPUTS)
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
        wanted = filter_of(request.filter) if request.HasField("filter") else None
    except InvalidArgument as error:
        raise refusal("filter", str(error)) from error
    return Options(k, minimum, exclude, wanted, request.group_by_label)


def _embed_result(outcome: Outcome) -> pb.EmbedResult:
    if isinstance(outcome, Exception):
        return pb.EmbedResult(error=to_status(outcome))
    return pb.EmbedResult(vector=bytes_of(outcome))


def _field_of(position: int, query: pb.Query) -> str:
    source = query.WhichOneof("source")
    return f"queries[{position}].{source}" if source else f"queries[{position}]"


def _refuse_if_all_failed(outcomes: Sequence[Outcome], fields: Sequence[str]) -> None:
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if len(errors) < len(outcomes):
        return
    faults = [each for each in errors if isinstance(each, InvalidArgument | NotFound)]
    if len(faults) < len(errors):  # overload, lateness or a bug: not the fault of a field
        raise next(each for each in errors if not isinstance(each, InvalidArgument | NotFound))
    named: list[CrossbatchError] = list(faults)
    raise Refusal([Violation(field, error) for field, error in zip(fields, named, strict=True)])
