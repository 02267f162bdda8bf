"""The Open Inference Protocol while the server is busy, while it stops, and with large tensors."""

import asyncio
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from protos import open_inference_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.rpc.limits import MAX_MESSAGE_BYTES
from tests.serving.inference_calls import arrays_in, expected, infer, of_files, of_pixels, pixels_of, tensor
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSpec, serving
from tests.serving.stubs import Stubs, connected, refused


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


def test_images_are_admitted_and_not_calls(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    with (
        serving(encoder, GalleryDirectory(tmp_path), max_in_flight=256) as running,
        connected(running.address) as stubs,
    ):
        try:
            pixels = np.repeat(pixels_of(encoder, b"1"), 200, axis=0)
            pending = stubs.inference.ModelInfer.future(of_pixels(pixels), timeout=20)
            deadline = time.monotonic() + 10
            while running._admission.inputs != 200:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            with pytest.raises(grpc.RpcError) as failure:
                infer(stubs, of_pixels(pixels[:57]))
            assert "200 of at most 256" in refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
            # Whether it is ready is a question that a busy server answers.
            assert stubs.inference.ServerReady(pb.ServerReadyRequest(), timeout=10).ready
        finally:
            encoder.encode_gate.set()
        assert arrays_in(pending.result())["embeddings"].shape == (200, DIMENSION)


def test_pixels_share_batches_with_other_calls_and_expire_like_them(
    encoder: FakeEncoder, tmp_path: Path
) -> None:
    encoder.encode_gate.clear()
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        try:
            pixels = pixels_of(encoder, b"1")
            first = stubs.inference.ModelInfer.future(of_pixels(pixels), timeout=20)
            time.sleep(0.1)  # it is with the model, which waits
            late = stubs.inference.ModelInfer.future(of_pixels(pixels), timeout=0.2)
            others = [stubs.inference.ModelInfer.future(of_pixels(pixels), timeout=20) for _ in range(4)]
            with pytest.raises(grpc.RpcError) as failure:
                late.result()
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            encoder.encode_gate.set()
        for call in (first, *others):
            np.testing.assert_array_equal(arrays_in(call.result())["embeddings"], expected(b"1"))
        assert encoder.batches == [1, 4]


def test_ready_says_no_while_the_server_stops(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    with (
        serving(encoder, GalleryDirectory(tmp_path), grace=20.0) as running,
        connected(running.address) as stubs,
    ):
        calls = stubs.inference
        try:
            assert calls.ServerLive(pb.ServerLiveRequest(), timeout=10).live
            assert calls.ServerReady(pb.ServerReadyRequest(), timeout=10).ready
            assert calls.ModelReady(pb.ModelReadyRequest(name="fake"), timeout=10).ready
            pending = calls.ModelInfer.future(of_files(b"1"), timeout=20)
            while not encoder.decoded:
                time.sleep(0.005)
            loop: asyncio.AbstractEventLoop = running.loop  # type: ignore[attr-defined]
            stopping = asyncio.run_coroutine_threadsafe(running.stop(20.0), loop)
            deadline = time.monotonic() + 10
            while calls.ServerReady(pb.ServerReadyRequest(), timeout=10).ready:
                assert time.monotonic() < deadline
            assert not calls.ModelReady(pb.ModelReadyRequest(name="fake"), timeout=10).ready
            assert calls.ServerLive(pb.ServerLiveRequest(), timeout=10).live
            with pytest.raises(grpc.RpcError) as failure:
                infer(stubs, of_files(b"2"))
            refused("UNAVAILABLE", failure, "DRAINING")
        finally:
            encoder.encode_gate.set()
        assert arrays_in(pending.result())["embeddings"].shape == (1, DIMENSION)
        stopping.result(10)


def test_32_images_of_224_pixels_fit_in_a_call(tmp_path: Path) -> None:
    class Large(FakeEncoder):
        def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
            return np.eye(DIMENSION, dtype=np.float32)[images[:, 0, 0, 0] % DIMENSION]

    encoder = Large(FakeSpec(image_size=224))
    pixels = np.zeros((32, 224, 224, 3), np.uint8)
    pixels[:, 0, 0, 0] = range(32)
    wanted = np.eye(DIMENSION, dtype=np.float32)[np.arange(32) % DIMENSION]
    with (
        serving(encoder, GalleryDirectory(tmp_path)) as running,
        grpc.insecure_channel(
            running.address, options=[("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
        ) as channel,
    ):
        stubs = Stubs(channel)
        np.testing.assert_array_equal(arrays_in(infer(stubs, of_pixels(pixels)))["embeddings"], wanted)
        pixels[:, 100:] = 200
        given = tensor("images", "UINT8", *pixels.shape)
        given.contents.uint_contents.extend(pixels.ravel().tolist())
        reply = infer(stubs, pb.ModelInferRequest(inputs=[given]))
        assert list(reply.outputs[0].contents.fp32_contents) == wanted.ravel().tolist()
