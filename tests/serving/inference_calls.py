"""Requests of the Open Inference Protocol, and what the fake encoder must answer."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import open_inference_pb2 as pb
from tests.serving.rpc_fakes import FakeEncoder, explanation_for, vector_for
from tests.serving.stubs import Stubs

PROTOTYPES = 5
GRID = (2, 3)


def pixels_of(encoder: FakeEncoder, *photos: bytes) -> NDArray[np.uint8]:
    return np.stack([encoder.preprocess(photo) for photo in photos])


def tensor(name: str, datatype: str, *shape: int, **contents: Any) -> pb.ModelInferRequest.InferInputTensor:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        made.contents.CopyFrom(pb.InferTensorContents(**contents))
    return made


def prefixed(*elements: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in elements)


def of_pixels(pixels: NDArray[np.uint8], **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[tensor("images", "UINT8", *pixels.shape)], raw_input_contents=[pixels.tobytes()], **fields
    )


def of_files(*photos: bytes, **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[tensor("encoded", "BYTES", len(photos))], raw_input_contents=[prefixed(*photos)], **fields
    )


def asking(*names: str) -> list[pb.ModelInferRequest.InferRequestedOutputTensor]:
    return [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in names]


def infer(stubs: Stubs, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    reply: pb.ModelInferResponse = stubs.inference.ModelInfer(request, timeout=20)
    return reply


def arrays_in(reply: pb.ModelInferResponse) -> dict[str, NDArray[Any]]:
    types = {"FP32": "<f4", "UINT8": "u1"}
    return {
        output.name: np.frombuffer(raw, types[output.datatype]).reshape(output.shape)
        for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True)
    }


def expected(*photos: bytes) -> NDArray[np.float32]:
    return np.stack([vector_for(photo) for photo in photos])


def explained(photo: bytes) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    return explanation_for(zlib.crc32(photo), PROTOTYPES)
