"""Requests of the Open Inference Protocol that are refused, by the name of the tensor that is wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from protos import open_inference_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from tests.serving.inference_calls import (
    GRID,
    PROTOTYPES,
    asking,
    infer,
    of_files,
    prefixed,
    raw_infer,
    tensor,
)
from tests.serving.rpc_fakes import DIMENSION, SIZE, FakeEncoder, FakeSources, FakeSpec, serving
from tests.serving.stubs import Stubs, connected, fields_of, refused


@pytest.fixture(scope="module")
def encoder() -> FakeEncoder:
    return FakeEncoder(FakeSpec(prototypes=PROTOTYPES, grid=GRID))


@pytest.fixture(scope="module")
def stubs(encoder: FakeEncoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stubs]:
    plain = FakeEncoder(FakeSpec(name="plain", fingerprint="b" * 64))
    galleries = GalleryDirectory(tmp_path_factory.mktemp("galleries"))
    with (
        serving(FakeSources({"": encoder, "plain": plain}), galleries) as running,
        connected(running.address) as stubs,
    ):
        yield stubs


IMAGES = tensor("images", "UINT8", 1, SIZE, SIZE, 3)
ONE = bytes(SIZE * SIZE * 3)
GOOD_LIST = {"uint_contents": [0] * len(ONE)}


def shaped(name: str, *shape: int) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[tensor(name, "UINT8" if name == "images" else "BYTES", *shape)], raw_input_contents=[ONE]
    )


def listing(name: str, datatype: str, *shape: int, **contents: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(inputs=[tensor(name, datatype, *shape, **contents)])


def raw(name: str, data: bytes, *more: bytes) -> pb.ModelInferRequest:
    given = IMAGES if name == "images" else tensor("encoded", "BYTES", 2)
    return pb.ModelInferRequest(inputs=[given], raw_input_contents=[data, *more])


def with_parameter(place: str, name: str) -> pb.ModelInferRequest:
    request = of_files(b"1", outputs=asking("embeddings"))
    getattr(request, place)[0].parameters[name].string_param = "x"
    return request


BAD: dict[str, tuple[pb.ModelInferRequest, str, str]] = {
    "no tensor": (pb.ModelInferRequest(), "inputs", "No tensor"),
    "unknown tensor": (listing("pixels", "UINT8", 1), "inputs[0].name", "'pixels'"),
    "no name": (listing("", "UINT8", 1), "inputs[0].name", "''"),
    "twice": (pb.ModelInferRequest(inputs=[IMAGES, IMAGES]), "inputs[1].name", "images is there twice"),
    "both": (
        pb.ModelInferRequest(inputs=[IMAGES, tensor("encoded", "BYTES", 1)]), "inputs", "images and encoded",
    ),
    "floats": (listing("images", "FP32", 1, SIZE, SIZE, 3), "inputs[0].datatype", "images is UINT8"),
    "text": (listing("encoded", "UINT8", 1), "inputs[0].datatype", "encoded is BYTES"),
    "no shape": (shaped("images"), "inputs[0].shape", "images takes [B, 4, 4, 3]"),
    "one image": (shaped("images", SIZE, SIZE, 3), "inputs[0].shape", "[4, 4, 3] was sent"),
    "channels first": (shaped("images", 1, 3, SIZE, SIZE), "inputs[0].shape", "images takes"),
    "too many dimensions": (shaped("images", *range(1, 2_000)), "inputs[0].shape", "[1, 2, 3, 4, 5, ...]"),
    "none": (shaped("images", 0, SIZE, SIZE, 3), "inputs[0].shape", "images takes"),
    "negative": (shaped("images", -1, SIZE, SIZE, 3), "inputs[0].shape", "images takes"),
    "two negative": (shaped("images", 1, -SIZE, -SIZE, 3), "inputs[0].shape", "images takes"),
    "a product of 48": (shaped("images", 1 + 2**60, SIZE, SIZE, 3), "inputs[0].shape", "images takes"),
    "too many": (shaped("images", 257, SIZE, SIZE, 3), "inputs[0].shape", "B from 1 to 256"),
    "a thousand million": (shaped("encoded", 10**9), "inputs[0].shape", "encoded takes [B] or [B, 1]"),
    "a thousand million listed": (
        listing("encoded", "BYTES", 10**9, bytes_contents=[b"x"]), "inputs[0].shape", "encoded takes",
    ),
    "encoded in two columns": (shaped("encoded", 1, 2), "inputs[0].shape", "encoded takes"),
    "too short": (raw("images", ONE[1:]), "raw_input_contents[0]", "has 48 elements, and 47 came"),
    "too long": (raw("images", ONE + b"0"), "raw_input_contents[0]", "images of shape [1, 4, 4, 3]"),
    "no elements": (pb.ModelInferRequest(inputs=[IMAGES]), "inputs[0]", "images has no elements"),
    "an empty list": (
        listing("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[]), "inputs[0].contents", "0 came",
    ),
    "raw and listed": (
        pb.ModelInferRequest(
            inputs=[tensor("images", "UINT8", 1, SIZE, SIZE, 3, **GOOD_LIST)], raw_input_contents=[ONE]
        ),
        "inputs[0].contents", "images is there and in raw_input_contents too",
    ),
    "two for one": (raw("images", ONE, ONE), "raw_input_contents", "one tensor images"),
    "listed too short": (
        listing("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[0] * 47), "inputs[0].contents", "47 came",
    ),
    "listed too long": (
        listing("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[0] * 49), "inputs[0].contents", "49 came",
    ),
    "listed above 255": (
        listing("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[0] * 47 + [256]),
        "inputs[0].contents", "images has an element above 255",
    ),
    "another list": (
        listing("images", "UINT8", 1, SIZE, SIZE, 3, int_contents=[0] * 48), "inputs[0].contents", "uint_",
    ),
    "two lists": (
        listing("images", "UINT8", 1, SIZE, SIZE, 3, **GOOD_LIST, fp32_contents=[0.0]),
        "inputs[0].contents", "uint_contents",
    ),
    "text in the list of numbers": (
        listing("encoded", "BYTES", 1, uint_contents=[1]), "inputs[0].contents", "bytes_contents",
    ),
    "fewer listed files": (
        listing("encoded", "BYTES", 2, bytes_contents=[b"1"]), "inputs[0].contents", "encoded of shape [2]",
    ),
    "more listed files": (
        listing("encoded", "BYTES", 1, bytes_contents=[b"1", b"2"]), "inputs[0].contents", "2 came",
    ),
    "fewer files": (raw("encoded", prefixed(b"1")), "raw_input_contents[0]", "encoded of shape [2]"),
    "more files": (raw("encoded", prefixed(b"1", b"2", b"3")), "raw_input_contents[0]", "has more than"),
    "half a length": (raw("encoded", prefixed(b"1") + b"\1\0"), "raw_input_contents[0]", "within element 1"),
    "a length past the end": (raw("encoded", b"\xff\xff\xff\xff1"), "raw_input_contents[0]", "element 0"),
    "no prefix": (raw("encoded", b"\x89PNG\r\n\x1a\n"), "raw_input_contents[0]", "encoded ends within"),
    "unknown output": (of_files(b"1", outputs=asking("logits")), "outputs[0]", "'logits'"),
    "output twice": (of_files(b"1", outputs=asking(*["embeddings"] * 2)), "outputs[1]", "is asked for"),
    "no prototypes": (
        of_files(b"1", model_name="plain", outputs=asking("histograms")), "outputs[0]", "has embeddings",
    ),
    "shared memory in": (
        with_parameter("inputs", "shared_memory_region"), "inputs[0].parameters of encoded", "shared",
    ),
    "shared memory out": (
        with_parameter("outputs", "shared_memory_region"), "outputs[0].parameters of embeddings", "shared",
    ),
    "classification": (
        with_parameter("outputs", "classification"), "outputs[0].parameters of embeddings", "classification",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_tensor_that_is_not_as_the_metadata_says_is_refused_by_name(
    stubs: Stubs, encoder: FakeEncoder, fault: str
) -> None:
    request, field, told = BAD[fault]
    with pytest.raises(grpc.RpcError) as failure:
        infer(stubs, request)
    message = refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == [field]
    assert message.startswith(f"{field}: ")
    assert told in message
    assert message.endswith(".")
    assert len(message) < 300
    assert not encoder.encoded


def test_a_request_of_more_than_any_request_needs_is_refused(stubs: Stubs) -> None:
    for request, told in (
        (pb.ModelInferRequest(raw_input_contents=[b""] * 2_000), "1,024 fields"),
        (listing("encoded", "BYTES", 1, bytes_contents=[b""] * 2_000), "1,024 fields"),
        (pb.ModelInferRequest(inputs=[IMAGES] * 9), "8 tensors"),
        (of_files(b"1", id="7" * 70_000), "bytes beside its elements"),
        (listing("i" * 70_000, "UINT8", 1), "bytes beside its elements"),
    ):
        with pytest.raises(grpc.RpcError) as failure:
            infer(stubs, request)
        assert told in refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    "data",
    [
        b"\x0b",  # a group
        b"\x3a\x05abc",  # longer than the message
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length without end
        b"\x3a",  # a tag alone
        b"\x2a\x02\x2a\x09",  # an input that is none
        b"\x0a\x01\xff",  # a name that is no text
        b"\x0d\x01",  # half a number
    ],
)
def test_bytes_that_are_no_request_are_refused(stubs: Stubs, data: bytes) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        raw_infer(stubs, data)
    assert "not a request" in refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")


@pytest.mark.parametrize("outputs", [(), ("histograms",)])
def test_one_bad_image_refuses_the_call_and_tells_its_place(stubs: Stubs, outputs: tuple[str, ...]) -> None:
    """A tensor has no place for an error."""
    with pytest.raises(grpc.RpcError) as failure:
        infer(stubs, of_files(b"1", b"bad", b"3", b"", outputs=asking(*outputs)))
    assert refused("INVALID_ARGUMENT", failure, "BAD_IMAGE").startswith("encoded[1]: ")
    assert fields_of(failure) == ["encoded[1]", "encoded[3]"]


def test_a_bug_tells_no_internals(stubs: Stubs, encoder: FakeEncoder) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        infer(stubs, of_files(b"1", b"bug"))
    assert "secret" not in refused("INTERNAL", failure, "INTERNAL")


class Blind(FakeEncoder):
    """Takes any pixels."""

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        return np.tile(np.eye(1, DIMENSION, dtype=np.float32), (len(images), 1))


def test_fuzzed_requests_never_show_a_bug_of_ours(tmp_path: Path) -> None:
    whole = of_files(b"1", b"bad", id="x", outputs=asking("embeddings", "histograms", "assignments"))
    valid = [
        whole.SerializeToString(),
        raw("images", ONE).SerializeToString(),
        listing("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[200] * 48).SerializeToString(),
        listing("encoded", "BYTES", 2, bytes_contents=[b"1", b"2"]).SerializeToString(),
    ]
    encoder = Blind(FakeSpec(prototypes=PROTOTYPES, grid=GRID))
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:

        @hypothesis.settings(max_examples=200, deadline=None)
        @hypothesis.given(
            message=st.sampled_from(valid),
            edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
            tail=st.binary(max_size=8),
        )
        def fuzz(message: bytes, edits: list[tuple[int, int]], tail: bytes) -> None:
            changed = bytearray(message + tail)
            for place, value in edits:
                changed[place % len(changed)] = value
            try:
                raw_infer(stubs, bytes(changed))
            except grpc.RpcError as failure:
                code: grpc.StatusCode = failure.code()
                assert code.name in {"INVALID_ARGUMENT", "NOT_FOUND"}, bytes(changed)

        fuzz()
        assert infer(stubs, of_files(b"1")).outputs
