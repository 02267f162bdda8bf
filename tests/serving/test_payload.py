"""The reader of inference requests against protobuf's own, and against bytes that are none."""

from contextlib import suppress
from typing import Any

import hypothesis
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from protos import open_inference_pb2 as pb
from serving.errors import InvalidArgument
from serving.rpc.services import tensors
from serving.rpc.services.payload import Payload
from serving.rpc.services.tensors import Given, images_of
from serving.rpc.status import Refusal

texts = st.text(max_size=5)
parameters = st.dictionaries(texts, st.builds(pb.InferParameter, string_param=texts), max_size=2)
contents = st.builds(
    pb.InferTensorContents,
    uint_contents=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    bytes_contents=st.lists(st.binary(max_size=200), max_size=3),
)
given_tensors = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=texts,
    datatype=texts,
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    parameters=parameters,
    contents=st.none() | contents,
)
requests = st.builds(
    pb.ModelInferRequest,
    model_name=texts,
    id=texts,
    parameters=parameters,
    inputs=st.lists(given_tensors, max_size=3),
    outputs=st.lists(st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=texts), max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)


@hypothesis.given(requests)
def test_a_request_is_read_as_protobuf_reads_it(request: pb.ModelInferRequest) -> None:
    payload = Payload.read(request.SerializeToString())
    whole = payload.request
    whole.raw_input_contents.extend(map(bytes, payload.raw))
    for tensor, parts in zip(payload.inputs, payload.contents, strict=True):
        added = whole.inputs.add()
        added.CopyFrom(tensor)
        if parts:
            added.contents.MergeFromString(b"".join(parts))
    assert whole == request


def test_elements_that_come_in_two_parts_are_one_list() -> None:
    """A message that is there twice is merged, as protobuf demands."""
    tensor = pb.ModelInferRequest.InferInputTensor
    halves = [
        tensor(name="encoded", contents=pb.InferTensorContents(bytes_contents=[each])).SerializeToString()
        for each in (b"1", b"2")
    ]
    whole = b"".join(halves)
    payload = Payload.read(b"\x2a" + bytes([len(whole)]) + whole)
    given = Given("encoded", (2,), None, payload.contents[0])
    assert images_of(given) == [b"1", b"2"]


@hypothesis.given(st.lists(st.integers(0, 255), max_size=300), st.integers(1, 9))
def test_listed_pixels_are_unpacked_as_protobuf_unpacks_them(values: list[int], piece: int) -> None:
    packed = pb.InferTensorContents(uint_contents=values).SerializeToString()
    given = Given("images", (len(values),), None, [memoryview(packed)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_PIECE", piece)
        np.testing.assert_array_equal(images_of(given), values)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("encoded", b"\x40\x01"),  # bytes_contents as a number
        ("images", b"\x25\0\0\0\0"),  # uint_contents of four bytes each
        ("images", b"\x22\x01\x80"),  # a number that does not end
        ("images", b"\x22\x02\x01"),  # longer than the message
    ],
)
def test_elements_of_another_wire_type_are_refused(name: Any, part: bytes) -> None:
    with pytest.raises(Refusal, match=name):
        images_of(Given(name, (1,), None, [memoryview(part)]))


@hypothesis.given(requests, st.data())
def test_bytes_that_are_no_request_end_in_one_of_two_errors(
    request: pb.ModelInferRequest, data: st.DataObject
) -> None:
    message = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if message:
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DecodeError, InvalidArgument):
        payload: Any = Payload.read(bytes(message))
        for parts in payload.contents:
            for name in ("images", "encoded"):
                with suppress(Refusal):
                    images_of(Given(name, (2,), None, parts))
        for raw in payload.raw:
            with suppress(Refusal):
                images_of(Given("encoded", (2,), raw, []))
