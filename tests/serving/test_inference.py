"""The Open Inference Protocol over real sockets, with a fake encoder."""

import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import open_inference_pb2 as pb
from serving.engine.pipeline import Pipeline
from serving.gallery.directory import GalleryDirectory
from serving.rpc.services import inference as inference_calls
from serving.rpc.services import tensors
from serving.server.server import Server
from tests.serving.inference_calls import (
    GRID,
    PROTOTYPES,
    arrays_in,
    asking,
    expected,
    explained,
    infer,
    of_files,
    of_pixels,
    pixels_of,
    prefixed,
    raw_infer,
    tensor,
)
from tests.serving.rpc_fakes import (
    DIMENSION,
    SIZE,
    FakeEncoder,
    FakeSources,
    FakeSpec,
    serving,
    vector_for,
)
from tests.serving.stubs import Stubs, connected, refused

PHOTOS = [b"photo %d" % i for i in range(3)]


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder(FakeSpec(prototypes=PROTOTYPES, grid=GRID))


@pytest.fixture
def running(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Server]:
    plain = FakeEncoder(FakeSpec(name="plain", fingerprint="b" * 64))
    sources = FakeSources({"": encoder, "plain": plain})
    with serving(sources, GalleryDirectory(tmp_path)) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


def test_pixels_and_files_give_the_same_embeddings(stubs: Stubs, encoder: FakeEncoder) -> None:
    for request in (
        of_pixels(pixels_of(encoder, *PHOTOS)),
        of_files(*PHOTOS),
        pb.ModelInferRequest(
            inputs=[tensor("encoded", "BYTES", 3, 1)], raw_input_contents=[prefixed(*PHOTOS)]
        ),
    ):
        found = arrays_in(infer(stubs, request))
        assert list(found) == ["embeddings"]
        np.testing.assert_array_equal(found["embeddings"], expected(*PHOTOS))


def test_listed_elements_are_answered_by_listed_elements(stubs: Stubs, encoder: FakeEncoder) -> None:
    pixels = pixels_of(encoder, *PHOTOS)
    assert (pixels >= 128).any()  # those take two bytes on the wire
    for given in (
        tensor("images", "UINT8", *pixels.shape, uint_contents=pixels.ravel().tolist()),
        tensor("encoded", "BYTES", 3, bytes_contents=PHOTOS),
    ):
        request = pb.ModelInferRequest(inputs=[given], outputs=asking("embeddings", "assignments"))
        reply = infer(stubs, request)
        assert not reply.raw_output_contents
        embeddings, assignments = (output.contents for output in reply.outputs)
        np.testing.assert_array_equal(
            np.array(embeddings.fp32_contents, np.float32).reshape(3, DIMENSION), expected(*PHOTOS)
        )
        assert list(assignments.uint_contents[:6]) == explained(PHOTOS[0])[1].ravel().tolist()


def _long(tag: bytes, value: bytes) -> bytes:
    return tag + bytes([len(value) & 127 | 128, len(value) >> 7]) + value


def test_elements_listed_one_by_one_are_read_too(stubs: Stubs, encoder: FakeEncoder) -> None:
    """Packed is how elements are written; a reader has to take them unpacked as well."""
    pixels = pixels_of(encoder, b"x")
    listed = b"".join(
        b"\x20" + (bytes([value]) if value < 128 else bytes([value, 1])) for value in pixels.ravel().tolist()
    )
    given = tensor("images", "UINT8", *pixels.shape).SerializeToString()
    given += b"\x2a" + bytes([len(listed)]) + listed if len(listed) < 128 else _long(b"\x2a", listed)
    assert pb.ModelInferRequest.InferInputTensor.FromString(given).contents.uint_contents == list(
        pixels.ravel()
    )
    reply = pb.ModelInferResponse.FromString(raw_infer(stubs, _long(b"\x2a", given)))
    np.testing.assert_array_equal(
        np.array(reply.outputs[0].contents.fp32_contents, np.float32), vector_for(b"x")
    )


@pytest.mark.parametrize("kind", ["pixels", "files"])
def test_outputs_come_as_they_were_asked_for(stubs: Stubs, encoder: FakeEncoder, kind: str) -> None:
    names = ("assignments", "embeddings", "histograms")
    outputs = asking(*names)
    request = (
        of_files(*PHOTOS, outputs=outputs)
        if kind == "files"
        else of_pixels(pixels_of(encoder, *PHOTOS), outputs=outputs)
    )
    found = arrays_in(infer(stubs, request))
    assert tuple(found) == names
    np.testing.assert_array_equal(found["embeddings"], expected(*PHOTOS))
    for i, photo in enumerate(PHOTOS):
        histogram, assignments = explained(photo)
        np.testing.assert_array_equal(found["histograms"][i], histogram)
        np.testing.assert_array_equal(found["assignments"][i], assignments)


def test_what_is_not_asked_for_is_not_computed(stubs: Stubs, encoder: FakeEncoder) -> None:
    infer(stubs, of_files(*PHOTOS))
    assert (encoder.encoded, encoder.explained) == (3, 0)
    infer(stubs, of_files(*PHOTOS, outputs=asking("histograms")))
    assert (encoder.encoded, encoder.explained) == (3, 3)


def test_the_reply_names_the_model_and_brings_back_the_id(stubs: Stubs) -> None:
    reply = infer(stubs, of_files(b"1", id="call 7", parameters={"mood": pb.InferParameter(bool_param=True)}))
    assert (reply.model_name, reply.model_version, reply.id) == ("fake", "a" * 12, "call 7")
    assert reply.parameters["fingerprint"].string_param == "a" * 64
    for version in ("1", "b" * 12):
        reply = infer(stubs, of_files(b"1", model_name="plain", model_version=version))
        assert (reply.model_name, reply.model_version, reply.id) == ("plain", version, "")
        assert reply.parameters["fingerprint"].string_param == "b" * 64


def test_metadata(stubs: Stubs) -> None:
    server = stubs.inference.ServerMetadata(pb.ServerMetadataRequest(), timeout=10)
    assert (server.name, server.version) == ("crossbatch", metadata.version("crossbatch"))
    model = stubs.inference.ModelMetadata(pb.ModelMetadataRequest(), timeout=10)
    assert (model.name, list(model.versions), model.platform) == ("fake", ["1", "a" * 12], "onnxruntime_onnx")
    assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
        ("images", "UINT8", [-1, SIZE, SIZE, 3]),
        ("encoded", "BYTES", [-1]),
    ]
    assert [(each.name, each.datatype, list(each.shape)) for each in model.outputs] == [
        ("embeddings", "FP32", [-1, DIMENSION]),
        ("histograms", "FP32", [-1, PROTOTYPES]),
        ("assignments", "UINT8", [-1, *GRID]),
    ]
    plain = stubs.inference.ModelMetadata(pb.ModelMetadataRequest(name="plain", version="1"), timeout=10)
    assert [each.name for each in plain.outputs] == ["embeddings"]


def test_a_model_or_version_that_is_not_served_is_not_found(stubs: Stubs) -> None:
    for name, version in (("other", ""), ("fake", "2"), ("plain", "a" * 12)):
        for call, request in (
            (stubs.inference.ModelMetadata, pb.ModelMetadataRequest(name=name, version=version)),
            (stubs.inference.ModelInfer, of_files(b"1", model_name=name, model_version=version)),
        ):
            with pytest.raises(grpc.RpcError) as failure:
                call(request, timeout=10)
            refused("NOT_FOUND", failure, "NOT_FOUND")
        ready = stubs.inference.ModelReady(pb.ModelReadyRequest(name=name, version=version), timeout=10)
        assert not ready.ready  # clients ask until it is


def test_the_deadline_of_a_call_is_that_of_its_images(
    stubs: Stubs, encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    for name in ("embed", "encode", "explain"):
        inner = getattr(Pipeline, name)

        def noted(self: Any, images: Any, deadline: float, stages: Any, inner: Any = inner) -> Any:
            seen.append(deadline - time.monotonic())
            return inner(self, images, deadline, stages)

        monkeypatch.setattr(Pipeline, name, noted)
    infer(stubs, of_files(b"1"))
    infer(stubs, of_pixels(pixels_of(encoder, b"1"), outputs=asking("embeddings", "histograms")))
    assert len(seen) == 3
    assert all(15 < left < 21 for left in seen)


def test_large_tensors_do_not_hold_the_event_loop(
    encoder: FakeEncoder, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What copies elements runs in another thread than the one that reads small requests."""
    threads: list[str] = []
    inner = tensors.images_of

    def noted(given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return inner(given)

    monkeypatch.setattr(inference_calls, "images_of", noted)
    loop, _ = infer(stubs, of_files(b"1")), infer(stubs, of_files(b"1" * 400_000))
    assert loop.outputs
    small, large = threads
    assert small != large
    assert large.startswith(("asyncio", "uvloop"))
