"""Health checks as orchestrators send them: the plain bytes of the protocol, without any stub of ours."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.server.server import SERVICES, Server
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs, connected

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
NAMES = (
    "",
    "crossbatch.v1.RetrievalService",
    "crossbatch.v1.GalleryService",
    "crossbatch.v1.ModelService",
    "inference.GRPCInferenceService",
)


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def running(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Server]:
    with serving(encoder, GalleryDirectory(tmp_path), grace=20.0) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


def check(stubs: Stubs, service: str) -> bytes:
    """Field 1 of the request is the service; field 1 of the reply is the status."""
    call: Any = stubs.channel.unary_unary("/grpc.health.v1.Health/Check")
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    reply: bytes = call(request, timeout=10)
    return reply


def test_a_probe_finds_every_service_serving(stubs: Stubs) -> None:
    assert set(NAMES) == {"", *SERVICES}
    assert {name: check(stubs, name) for name in NAMES} == dict.fromkeys(NAMES, SERVING)


def test_a_probe_of_a_service_that_is_not_there_is_not_found(stubs: Stubs) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        check(stubs, "crossbatch.v1.OtherService")
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_probe_finds_no_service_serving_while_the_server_stops(
    stubs: Stubs, running: Server, encoder: FakeEncoder
) -> None:
    encoder.encode_gate.clear()
    try:
        pending = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"1"]), timeout=20)
        while not encoder.decoded:
            time.sleep(0.005)
        loop: asyncio.AbstractEventLoop = running.loop  # type: ignore[attr-defined]
        stopping = asyncio.run_coroutine_threadsafe(running.stop(20.0), loop)
        deadline = time.monotonic() + 10
        while check(stubs, "") != NOT_SERVING:
            assert time.monotonic() < deadline
        assert {name: check(stubs, name) for name in NAMES} == dict.fromkeys(NAMES, NOT_SERVING)
    finally:
        encoder.encode_gate.set()
    assert pending.result().results[0].vector
    stopping.result(10)
