"""Explain over real sockets, with a fake encoder that has prototypes."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from protos import retrieval_service_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.rpc.limits import MAX_EXPLAINED
from serving.rpc.wire import vector_of
from tests.serving.rpc_fakes import FakeEncoder, FakeSpec, explanation_for, serving
from tests.serving.stubs import Stubs, connected, fields_of, refused


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder(FakeSpec(prototypes=5))


@pytest.fixture
def stubs(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Stubs]:
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        yield stubs


def explain(stubs: Stubs, *images: bytes, model: str = "") -> pb.ExplainResponse:
    reply: pb.ExplainResponse = stubs.retrieval.Explain(
        pb.ExplainRequest(images=images, model=model), timeout=10
    )
    return reply


def test_each_image_has_its_histogram_and_where_its_prototypes_are(stubs: Stubs) -> None:
    reply = explain(stubs, b"one", b"two")
    assert (reply.model_name, reply.model_fingerprint, reply.prototypes) == ("fake", "a" * 64, 5)
    assert reply.timings.total_us > 0
    for image, result in zip((b"one", b"two"), reply.results, strict=True):
        histogram, assignments = explanation_for(zlib.crc32(image), 5)
        np.testing.assert_array_equal(vector_of(result.histogram), histogram)
        assert (result.height, result.width) == assignments.shape
        rows = np.frombuffer(result.assignments, np.uint8).reshape(result.height, result.width)
        np.testing.assert_array_equal(rows, assignments)
    assert reply.results[0].histogram != reply.results[1].histogram


def test_one_bad_image_is_not_explained_and_harms_no_other(stubs: Stubs) -> None:
    good, bad, also = explain(stubs, b"good", b"bad image", b"good").results
    assert good.histogram == also.histogram != b""
    assert not good.HasField("error")
    assert bad.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    info = error_details_pb2.ErrorInfo()
    assert bad.error.details[0].Unpack(info)
    assert info.reason == "BAD_IMAGE"
    assert (bad.histogram, bad.assignments, bad.height) == (b"", b"", 0)


def test_when_no_image_can_be_explained_the_call_fails_and_names_all(stubs: Stubs) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        explain(stubs, b"bad one", b"bad two")
    refused("INVALID_ARGUMENT", failure, "BAD_IMAGE")
    assert fields_of(failure) == ["images[0]", "images[1]"]


@pytest.mark.parametrize("count", [0, MAX_EXPLAINED + 1])
def test_too_many_and_no_images_are_refused_before_any_is_decoded(
    stubs: Stubs, encoder: FakeEncoder, count: int
) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        explain(stubs, *[b"x"] * count)
    refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == ["images"]
    assert encoder.decoded == []


def test_a_model_that_is_not_served_cannot_explain(stubs: Stubs) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        explain(stubs, b"x", model="other")
    assert "fake" in refused("NOT_FOUND", failure, "NOT_FOUND")


def test_a_model_without_prototypes_says_so(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        with pytest.raises(grpc.RpcError) as failure:
            explain(stubs, b"x")
        assert "prototypes" in refused("FAILED_PRECONDITION", failure, "MISMATCH")
        assert encoder.decoded == []
        running._admission.inputs = running._admission.most_inputs
        with pytest.raises(grpc.RpcError) as failure:
            explain(stubs, b"x")
        refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        running._admission.inputs = 0
