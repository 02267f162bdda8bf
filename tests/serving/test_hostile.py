"""Clients that know no better: the others are served meanwhile."""

import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import retrieval_service_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.server.server import Server
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs, connected


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path_factory.mktemp("g")), grace=1.0) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs
        assert stubs.embed(b"x").results[0].vector
        assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS says hello
        bytes(range(256)) * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100_000,
    ],
)
def test_what_is_no_http_2_is_hung_up_on(running: Server, stubs: Stubs, sent: bytes) -> None:
    host, _, port = running.address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), 5) as connection:
            try:
                connection.sendall(sent)
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass


def test_a_message_that_is_too_long_is_refused(stubs: Stubs) -> None:
    request = pb.EmbedRequest(images=[bytes(13 << 20)] * 5)
    with pytest.raises(grpc.RpcError) as failure:
        stubs.retrieval.Embed(request, timeout=20)
    assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_call_that_ends_before_its_message_is_none(running: Server, stubs: Stubs) -> None:
    empty: Any = stubs.channel.stream_unary("/crossbatch.v1.RetrievalService/Embed")
    with pytest.raises(grpc.RpcError) as failure:
        empty(iter(()), timeout=5)
    assert failure.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)


def test_watchers_of_health_keep_no_call_waiting(stubs: Stubs) -> None:
    watchers = [stubs.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(300)]
    assert all(next(each).status == 1 for each in watchers)
    assert len(stubs.embed(*[b"x"] * 256).results) == 256
    for each in watchers:
        each.cancel()
