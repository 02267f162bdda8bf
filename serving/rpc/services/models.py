"""ModelService: what the server computes embeddings with."""

from typing import Any

from protos import model_service_pb2 as pb
from protos import model_service_pb2_grpc
from serving.rpc.work.fleet import Fleet
from serving.rpc.work.pipeline import Pipeline

__all__ = ["Models"]


class Models(model_service_pb2_grpc.ModelServiceServicer):
    """Answers GetModel and ListModels."""

    def __init__(self, fleet: Fleet) -> None:
        """Keep the models."""
        self._fleet = fleet

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        """Describe one model.

        Raises:
            NotFound: if there is none of that name.
        """
        return pb.GetModelResponse(model=_described(self._fleet.get(request.name)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """Describe every model, the first one first."""
        return pb.ListModelsResponse(models=[_described(pipeline) for pipeline in self._fleet.all()])


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
