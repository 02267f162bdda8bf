"""GRPCInferenceService: the Open Inference Protocol, over the models and batches of our own calls."""

from collections.abc import Callable, Sequence
from importlib import metadata
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protos import open_inference_pb2 as pb
from protos import open_inference_pb2_grpc
from serving.engine.instances import ModelInstances
from serving.engine.models import ModelRegistry
from serving.errors import NotFound
from serving.observability.call import Call
from serving.rpc.admission import Admission
from serving.rpc.limits import MAX_INPUTS
from serving.rpc.services.convert import good_or_refused
from serving.rpc.status import refusal

__all__ = ["InferenceCalls"]

Images: TypeAlias = NDArray[np.uint8] | list[bytes]
"""Pixels, uint8 (B, S, S, 3), RGB; or B encoded images."""

_DATATYPES = {"images": "UINT8", "encoded": "BYTES"}  # a request has one of the two
_OUTPUTS = ("embeddings", "histograms", "assignments")
_UNSERVED = ("shared_memory_region", "classification")


class InferenceCalls(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every call of the protocol."""

    def __init__(self, models: ModelRegistry, admission: Admission, ready: Callable[[], bool]) -> None:
        self._models = models
        self._admission = admission
        self._ready = ready

    def ServerLive(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:  # noqa: N802
        """Say yes, since this runs."""
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:  # noqa: N802
        """Say what the health service says."""
        return pb.ServerReadyResponse(ready=self._ready())

    def ModelReady(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:  # noqa: N802
        """Say whether a model is there; one that is not is no error, as clients ask until it is."""
        try:
            _check_version(self._models.get(request.name), request.version)
        except NotFound:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._ready())

    def ServerMetadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:  # noqa: N802
        """Name the server."""
        return pb.ServerMetadataResponse(name="crossbatch", version=metadata.version("crossbatch"))

    def ModelMetadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:  # noqa: N802
        """Describe the tensors of a model."""
        model = self._models.get(request.name)
        _check_version(model, request.version)
        spec = model.spec
        side = spec.image_size
        reply = pb.ModelMetadataResponse(name=model.name, platform="onnxruntime_onnx")
        reply.versions.extend(_versions(model))
        reply.inputs.add(name="images", datatype="UINT8", shape=[-1, side, side, 3])
        reply.inputs.add(name="encoded", datatype="BYTES", shape=[-1])
        reply.outputs.add(name="embeddings", datatype="FP32", shape=[-1, spec.dimension])
        if spec.prototypes:
            reply.outputs.add(name="histograms", datatype="FP32", shape=[-1, spec.prototypes])
            reply.outputs.add(name="assignments", datatype="UINT8", shape=[-1, *(spec.grid or (-1, -1))])
        return reply

    def ModelInfer(self, request: pb.ModelInferRequest, call: Call) -> pb.ModelInferResponse:  # noqa: N802
        """Compute the outputs that are asked for; they come as bytes or listed, as the input did."""
        with self._models.holding(request.model_name) as model:
            _check_version(model, request.model_version)
            name, shape = _checked_input(request, model.spec.image_size)
            names = _wanted_outputs(request.outputs, _OUTPUTS if model.spec.prototypes else _OUTPUTS[:1])
            self._admission.admit(call, shape[0])
            images = _images(request, name, shape)
            arrays = _computed(model, images, names, call)
        reply = pb.ModelInferResponse(
            model_name=model.name,
            model_version=request.model_version or _versions(model)[-1],
            id=request.id,
            parameters={"fingerprint": pb.InferParameter(string_param=model.spec.fingerprint)},
        )
        _write_outputs(reply, arrays, raw=bool(request.raw_input_contents))
        return reply


def _versions(model: ModelInstances) -> list[str]:
    """What the version of a model may be called: whatever is served now, or these weights and no others."""
    return ["1", model.spec.fingerprint[:12]]


def _check_version(model: ModelInstances, version: str) -> None:
    served = _versions(model)
    if version and version not in served:
        raise NotFound(
            f"There is no version {version[:80]!r} of the model {model.name}; {' and '.join(served)} name "
            "the one that is served."
        )


def _checked_input(request: pb.ModelInferRequest, side: int) -> tuple[str, tuple[int, ...]]:
    """Check the one input of a request but for its elements; return its name and shape."""
    if (count := len(request.inputs)) != 1:
        raise refusal("inputs", f"{count} tensors were sent; send one, images or encoded.")
    tensor, raw = request.inputs[0], len(request.raw_input_contents)
    name = tensor.name
    if name not in _DATATYPES:
        raise refusal("inputs[0].name", f"There is no input {name[:80]!r}; give images or encoded.")
    if tensor.datatype != _DATATYPES[name]:
        raise refusal(
            "inputs[0].datatype",
            f"The tensor {name} is {_DATATYPES[name]}, and {tensor.datatype[:20]!r} was sent.",
        )
    shape = _checked_shape(name, tensor.shape, side)
    _check_parameters(f"inputs[0].parameters of {name}", tensor.parameters)
    listed = tensor.HasField("contents")
    if raw + listed != 1:
        raise refusal("inputs[0]", f"The elements of {name} were sent {raw + listed} times; send them once.")
    return name, shape


def _checked_shape(name: str, shape: Sequence[int], side: int) -> tuple[int, ...]:
    found = tuple(shape[:5])
    fits = found[1:] == (side, side, 3) if name == "images" else found[1:] in ((), (1,))
    if not found or not fits or not 1 <= found[0] <= MAX_INPUTS:
        wanted = f"[B, {side}, {side}, 3]" if name == "images" else "[B] or [B, 1]"
        told = ", ".join(map(str, found)) + (", ..." if len(shape) > len(found) else "")
        raise refusal(
            "inputs[0].shape",
            f"The tensor {name} takes {wanted} with B from 1 to {MAX_INPUTS}, and [{told}] was sent.",
        )
    return found


def _check_parameters(place: str, parameters: Any) -> None:
    for name in _UNSERVED:
        if name in parameters:
            raise refusal(place, f"The parameter {name} is not served; send and take whole tensors.")


def _wanted_outputs(
    asked: Sequence[pb.ModelInferRequest.InferRequestedOutputTensor], served: Sequence[str]
) -> list[str]:
    """Check which outputs a request asks for; return their names in its order."""
    names: list[str] = []
    for i, output in enumerate(asked):
        place = f"outputs[{i}]"
        if output.name not in served:
            told = f"There is no output {output.name[:80]!r}; the model has {', '.join(served)}."
            raise refusal(place, told)
        if output.name in names:
            raise refusal(place, f"The output {output.name} is asked for twice; ask once.")
        _check_parameters(f"{place}.parameters of {output.name}", output.parameters)
        names.append(output.name)
    return names or ["embeddings"]


def _images(request: pb.ModelInferRequest, name: str, shape: tuple[int, ...]) -> Images:
    """Take the images out of a checked request."""
    if request.raw_input_contents:
        raw, place = request.raw_input_contents[0], "raw_input_contents[0]"
        found: Images = np.frombuffer(raw, np.uint8) if name == "images" else _prefixed(raw, shape[0])
    else:
        found, place = _listed(request.inputs[0].contents, name), "inputs[0].contents"
    if len(found) != prod(shape):
        told = ", ".join(map(str, shape))
        raise refusal(
            place,
            f"The tensor {name} of shape [{told}] has {prod(shape):,} elements, and {len(found):,} came.",
        )
    return found.reshape(shape) if isinstance(found, np.ndarray) else found


def _prefixed(raw: bytes, count: int) -> list[bytes]:
    """Elements of which each stands after its length in four bytes, little-endian."""
    images: list[bytes] = []
    at = 0
    while at < len(raw):
        start = at + 4
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw):
            raise refusal(
                "raw_input_contents[0]",
                f"The tensor encoded ends within element {len(images)}; put its length in 4 bytes, "
                "little-endian, before each.",
            )
        if len(images) == count:
            raise refusal(
                "raw_input_contents[0]",
                f"The tensor encoded has more than the {count} elements that its shape says.",
            )
        images.append(raw[start:at])
    return images


def _listed(contents: pb.InferTensorContents, name: str) -> Images:
    """The elements in the one list that is for a tensor's type."""
    wanted = "uint_contents" if name == "images" else "bytes_contents"
    for field, _ in contents.ListFields():
        if field.name != wanted:
            raise refusal(
                "inputs[0].contents",
                f"The elements of the tensor {name} are not all in {wanted}: {field.name} is there.",
            )
    if name == "encoded":
        return list(contents.bytes_contents)
    values = np.asarray(contents.uint_contents, np.uint32)
    if values.size and values.max() > 255:
        raise refusal("inputs[0].contents", "The tensor images has an element above 255, which is no UINT8.")
    return values.astype(np.uint8)


def _computed(
    model: ModelInstances, images: Images, names: Sequence[str], call: Call
) -> dict[str, NDArray[Any]]:
    """The named outputs of some images, in that order; a tensor has no place for an error."""
    found: dict[str, NDArray[Any]] = {}
    if "embeddings" in names:
        outcomes = model.embed(list(images), call)
        found["embeddings"] = np.stack(good_or_refused(outcomes, "encoded[{}]".format))
    if set(names) - {"embeddings"}:
        explanations = good_or_refused(model.explain(list(images), call), "encoded[{}]".format)
        found["histograms"] = np.stack([histogram for histogram, _ in explanations])
        found["assignments"] = np.stack([assignments for _, assignments in explanations])
    return {name: found[name] for name in names}


def _write_outputs(reply: pb.ModelInferResponse, arrays: dict[str, NDArray[Any]], *, raw: bool) -> None:
    """Add tensors, float32 or uint8, to a reply: as bytes, or as lists of elements."""
    for name, array in arrays.items():
        tensor = reply.outputs.add(name=name, shape=array.shape)
        tensor.datatype = "UINT8" if array.dtype == np.uint8 else "FP32"
        if raw:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            reply.raw_output_contents.append(little.tobytes())
        elif array.dtype == np.uint8:
            tensor.contents.uint_contents.extend(array.ravel().tolist())
        else:
            tensor.contents.fp32_contents.extend(array.ravel().tolist())
