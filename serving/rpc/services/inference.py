"""GRPCInferenceService: the Open Inference Protocol, over the models and batches of our own calls."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar

import numpy as np
from grpc_health.v1 import health, health_pb2
from numpy.typing import NDArray

from protos import open_inference_pb2 as pb
from protos import open_inference_pb2_grpc
from serving.engine.explanation import Explanation
from serving.engine.fleet import Fleet
from serving.engine.pipeline import Pipeline
from serving.errors import InvalidArgument, NotFound
from serving.observability.call import Stages
from serving.rpc.admission import Admission
from serving.rpc.boundary import deadline_of
from serving.rpc.services.payload import Payload
from serving.rpc.services.tensors import (
    INPUTS,
    Images,
    given_in,
    images_of,
    wanted_outputs,
    write_outputs,
)
from serving.rpc.status import Refusal, Violation

__all__ = ["READERS", "Inference"]

T = TypeVar("T")

READERS: Mapping[str, Callable[[bytes], Any]] = {"GRPCInferenceService/ModelInfer": Payload.read}
"""What unpacks the requests of the calls that do not take their own message class."""

# Copying that much takes a tenth of a millisecond, about what handing it to a thread costs.
_INLINE_BYTES = 1 << 18


class Inference(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every call of the protocol."""

    def __init__(self, fleet: Fleet, admission: Admission, health: health.aio.HealthServicer) -> None:
        """Keep what the calls pass through.

        Args:
            fleet: The models.
            admission: Counts images in flight.
            health: Knows whether the server is ready.
        """
        self._fleet = fleet
        self._admission = admission
        self._health = health

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:  # noqa: N802
        """Say yes, since this runs."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:  # noqa: N802
        """Say what the health service says."""
        return pb.ServerReadyResponse(ready=await self._ready(context))

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:  # noqa: N802
        """Say whether a model is there; one that is not is no error, as clients ask until it is."""
        try:
            _check_version(self._fleet.get(request.name), request.version)
        except NotFound:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=await self._ready(context))

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        """Name the server."""
        return pb.ServerMetadataResponse(name="crossbatch", version=metadata.version("crossbatch"))

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        """Describe the tensors of a model.

        Raises:
            NotFound: if there is none of that name and version.
        """
        pipeline = self._fleet.get(request.name)
        _check_version(pipeline, request.version)
        spec = pipeline.spec
        shapes = {"images": [-1, spec.image_size, spec.image_size, 3], "encoded": [-1]}
        reply = pb.ModelMetadataResponse(
            name=pipeline.name, versions=_versions(pipeline), platform="onnxruntime_onnx"
        )
        for name, datatype in INPUTS.items():
            reply.inputs.add(name=name, datatype=datatype, shape=shapes[name])
        reply.outputs.add(name="embeddings", datatype="FP32", shape=[-1, spec.dimension])
        if spec.prototypes:
            reply.outputs.add(name="histograms", datatype="FP32", shape=[-1, spec.prototypes])
            reply.outputs.add(name="assignments", datatype="UINT8", shape=[-1, *(spec.grid or (-1, -1))])
        return reply

    async def ModelInfer(self, request: Payload, context: Any) -> pb.ModelInferResponse:  # noqa: N802
        """Compute the outputs that are asked for of every image of a request.

        Returns:
            The outputs, as bytes or listed, as the request has its input.

        Raises:
            Refusal: if a tensor is not as the metadata says, or an image is bad.
            NotFound: if there is no such model.
            CrossbatchError: if there is no room or no time, or the model fails.
        """
        stages = Stages()
        asked = request.request
        with self._fleet.holding(asked.model_name) as pipeline:
            _check_version(pipeline, asked.model_version)
            spec = pipeline.spec
            given = given_in(request, spec.image_size)
            names = wanted_outputs(asked.outputs, prototypes=spec.prototypes)
            with self._admission.admit(given.count):
                # Raw pixels are not copied, whatever their size.
                heavy = given.size > _INLINE_BYTES and (given.raw is None or given.name == "encoded")
                images = await asyncio.to_thread(images_of, given) if heavy else images_of(given)
                arrays = await _computed(pipeline, images, names, deadline_of(context), stages)
        reply = pb.ModelInferResponse(
            model_name=pipeline.name,
            model_version=asked.model_version or _versions(pipeline)[-1],
            id=asked.id,
            parameters={"fingerprint": pb.InferParameter(string_param=spec.fingerprint)},
        )
        raw = given.raw is not None
        if not raw and sum(array.nbytes for array in arrays.values()) > _INLINE_BYTES:
            await asyncio.to_thread(write_outputs, reply, arrays, raw=False)
        else:
            write_outputs(reply, arrays, raw=raw)
        return reply

    async def _ready(self, context: Any) -> bool:
        status = (await self._health.Check(health_pb2.HealthCheckRequest(), context)).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def _computed(
    pipeline: Pipeline, images: Images, names: Sequence[str], deadline: float | None, stages: Stages
) -> dict[str, NDArray[Any]]:
    """The named outputs of some images, by name and in that order."""
    found: dict[str, NDArray[Any]] = {}
    if "embeddings" in names:
        if isinstance(images, np.ndarray):
            outcomes = await pipeline.encode(images, deadline, stages)
        else:
            outcomes = await pipeline.embed(images, deadline, stages)
        found["embeddings"] = np.stack(_all_of(outcomes))
    if set(names) - {"embeddings"}:
        explanations: list[Explanation] = _all_of(await pipeline.explain(images, deadline, stages))
        found["histograms"] = np.stack([each.histogram for each in explanations])
        found["assignments"] = np.stack([each.assignments for each in explanations])
    return {name: found[name] for name in names}


def _all_of(outcomes: Sequence[T | Exception]) -> list[T]:
    """What came of each image, as a tensor has no place for an error.

    Raises:
        Refusal: if some are no images; names the place of each.
        Exception: another failure, which is not the fault of an image.
    """
    good: list[T] = []
    violations: list[Violation] = []
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, InvalidArgument):
            violations.append(Violation(f"encoded[{i}]", outcome))
        elif isinstance(outcome, Exception):  # overload, lateness or a bug
            raise outcome
        else:
            good.append(outcome)
    if violations:
        raise Refusal(violations)
    return good


def _versions(pipeline: Pipeline) -> list[str]:
    """What the version of a model may be called: whatever is served now, or these weights and no others."""
    return ["1", pipeline.spec.fingerprint[:12]]


def _check_version(pipeline: Pipeline, version: str) -> None:
    """Refuse a version that is not served.

    Raises:
        NotFound: if it is none of the model's.
    """
    served = _versions(pipeline)
    if version and version not in served:
        raise NotFound(
            f"There is no version {version[:80]!r} of the model {pipeline.name}; {' and '.join(served)} name "
            "the one that is served."
        )
