"""ModelService: what the server computes embeddings with."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from protos import model_service_pb2 as pb
from protos import model_service_pb2_grpc
from serving.engine.fleet import Change, Fleet
from serving.engine.pipeline import Pipeline
from serving.errors import CrossbatchError, Draining, InvalidArgument, Mismatch, NotFound

__all__ = ["Models"]

logger = logging.getLogger(__name__)


class Models(model_service_pb2_grpc.ModelServiceServicer):
    """Answers GetModel, ListModels and ReloadModels."""

    def __init__(self, fleet: Fleet, reload: Callable[[], Coroutine[Any, Any, Change]]) -> None:
        """Keep the models and what loads them anew."""
        self._fleet = fleet
        self._reload = reload

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        """Describe one model.

        Raises:
            NotFound: if there is none of that name.
        """
        return pb.GetModelResponse(model=_described(self._fleet.get(request.name)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """Describe every model, the first one first."""
        return pb.ListModelsResponse(models=[_described(pipeline) for pipeline in self._fleet.all()])

    async def ReloadModels(  # noqa: N802
        self, request: pb.ReloadModelsRequest, context: Any
    ) -> pb.ReloadModelsResponse:
        """Look at the model files and the galleries again, as SIGHUP does.

        Raises:
            Draining: if the server is stopping.
            Mismatch: if a file cannot be served, or a gallery would lose the last model that fits it; then
                everything stays as it was.
        """
        try:
            change = await self._reload()
        except Draining:
            raise
        except CrossbatchError as error:  # which other calls may share
            logger.warning("every model stays as it was: %s", error)
            # What is not there or not allowed is nothing that the request asked for.
            kind = Mismatch if isinstance(error, NotFound | InvalidArgument) else type(error)
            raise kind(self._fleet.hide(str(error))) from error
        return pb.ReloadModelsResponse(
            models=[_described(pipeline) for pipeline in self._fleet.all()],
            loaded=change.loaded,
            removed=change.removed,
        )


def _described(pipeline: Pipeline) -> pb.Model:
    spec = pipeline.spec
    return pb.Model(
        name=pipeline.name,
        fingerprint=spec.fingerprint,
        dimension=spec.dimension,
        image_size=spec.image_size,
        precision=spec.precision,
        spec_json=spec.model_dump_json(),
        prototypes=spec.prototypes,
    )
