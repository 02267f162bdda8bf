"""ModelService: what the server computes embeddings with."""

import logging
from collections.abc import Callable

from protos import model_service_pb2 as pb
from protos import model_service_pb2_grpc
from serving.engine.instances import ModelInstances
from serving.engine.models import Change, ModelRegistry
from serving.errors import CrossbatchError, Draining, InvalidArgument, Mismatch, NotFound
from serving.observability.call import Call

__all__ = ["ModelCalls"]

logger = logging.getLogger(__name__)


class ModelCalls(model_service_pb2_grpc.ModelServiceServicer):
    """Answers GetModel, ListModels and ReloadModels."""

    def __init__(self, models: ModelRegistry, reload: Callable[[Call], Change]) -> None:
        self._models = models
        self._reload = reload

    def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:  # noqa: N802
        """Describe one model."""
        return pb.GetModelResponse(model=_described(self._models.get(request.name)))

    def ListModels(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:  # noqa: N802
        """Describe every model, the first one first."""
        return pb.ListModelsResponse(models=map(_described, self._models.all()))

    def ReloadModels(self, request: pb.ReloadModelsRequest, call: Call) -> pb.ReloadModelsResponse:  # noqa: N802
        """Look at the model files and the galleries again, as SIGHUP does; failing, it changes nothing."""
        try:
            change = self._reload(call)
        except Draining:
            raise
        except CrossbatchError as error:
            logger.warning("every model stays as it was: %s", error)
            # What is not there or not allowed is nothing that the request asked for.
            kind = Mismatch if isinstance(error, NotFound | InvalidArgument) else type(error)
            raise kind(self._models.hide(str(error))) from error
        return pb.ReloadModelsResponse(
            models=map(_described, self._models.all()), loaded=change.loaded, removed=change.removed
        )


def _described(model: ModelInstances) -> pb.Model:
    spec = model.spec
    return pb.Model(
        name=model.name,
        fingerprint=spec.fingerprint,
        dimension=spec.dimension,
        image_size=spec.image_size,
        precision=spec.precision,
        spec_json=spec.model_dump_json(),
        prototypes=spec.prototypes,
        provider=model.encoder.provider,
    )
