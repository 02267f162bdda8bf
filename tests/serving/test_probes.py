"""Probes as orchestrators send them: gRPC health in plain bytes, and those of the inference protocol."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import open_inference_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.server.server import SERVICES, Server
from tests.serving.inference_calls import infer, of_files
from tests.serving.rpc_fakes import FakeEncoder, serving, stop, until
from tests.serving.stubs import Stubs, refusal_of

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
NAMES = (
    "",
    "crossbatch.v1.RetrievalService",
    "crossbatch.v1.GalleryService",
    "crossbatch.v1.ModelService",
    "inference.GRPCInferenceService",
)


@pytest.fixture
def running(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Server]:
    with serving(encoder, GalleryDirectory(tmp_path), grace=20.0) as running:
        yield running


def check(stubs: Stubs, service: str) -> bytes:
    """Field 1 of the request is the service; field 1 of the reply is the status."""
    call: Any = stubs.channel.unary_unary("/grpc.health.v1.Health/Check")
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    reply: bytes = call(request, timeout=10)
    return reply


def test_a_probe_finds_every_service_serving_and_no_other(stubs: Stubs) -> None:
    assert set(NAMES) == {"", *SERVICES}
    assert {name: check(stubs, name) for name in NAMES} == dict.fromkeys(NAMES, SERVING)
    with pytest.raises(grpc.RpcError) as failure:
        check(stubs, "crossbatch.v1.OtherService")
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_call_of_health_that_is_not_answered_leaves_no_error_in_the_log(
    stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    call: Any = stubs.channel.unary_unary("/grpc.health.v1.Health/List")
    with pytest.raises(grpc.RpcError) as failure:
        call(b"", timeout=10)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.messages


def test_every_probe_says_no_while_the_server_stops(
    stubs: Stubs, running: Server, encoder: FakeEncoder
) -> None:
    calls = stubs.inference

    def ready() -> bool:
        server = calls.ServerReady(pb.ServerReadyRequest(), timeout=10).ready
        assert calls.ModelReady(pb.ModelReadyRequest(name="fake"), timeout=10).ready == server
        assert calls.ServerLive(pb.ServerLiveRequest(), timeout=10).live
        return bool(server)

    assert ready()
    encoder.encode_gate.clear()
    try:
        pending = calls.ModelInfer.future(of_files(b"1"), timeout=20)
        until(lambda: encoder.encoding)
        stopping = threading.Thread(target=stop, args=(running, 20.0))
        stopping.start()
        until(lambda: check(stubs, "") == NOT_SERVING)
        assert {name: check(stubs, name) for name in NAMES} == dict.fromkeys(NAMES, NOT_SERVING)
        assert not ready()
        refusal_of(lambda: infer(stubs, of_files(b"2")), "UNAVAILABLE", reason="DRAINING")
    finally:
        encoder.encode_gate.set()
    assert pending.result().outputs
    stopping.join()
