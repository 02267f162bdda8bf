"""ModelService: what the server computes embeddings with."""

from typing import TYPE_CHECKING, Any

from protos import model_service_pb2 as pb
from protos import model_service_pb2_grpc

if TYPE_CHECKING:
    from serving.model.spec import ModelSpec

__all__ = ["Models"]


class Models(model_service_pb2_grpc.ModelServiceServicer):
    """Answers GetModel."""

    def __init__(self, spec: "ModelSpec") -> None:
        """Write the answer once, as it never changes."""
        self._model = pb.Model(
            name=spec.name,
            fingerprint=spec.fingerprint,
            dimension=spec.dimension,
            image_size=spec.image_size,
            precision=spec.precision,
            spec_json=spec.model_dump_json(),
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        """Describe the model."""
        return pb.GetModelResponse(model=self._model)
