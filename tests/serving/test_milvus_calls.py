"""The server over a Milvus: every call through gRPC, and a Milvus that goes and comes back."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import gallery_service_pb2 as pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.place import galleries_at
from serving.rpc.wire import bytes_of
from serving.server.server import Server
from tests.serving.milvus_lite import free_port, milvus_lite
from tests.serving.rpc_fakes import FakeEncoder, serving, until, vector_for
from tests.serving.stubs import Stubs, connected, image, item, refusal_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    with milvus_lite(tmp_path_factory.mktemp("milvus"), port):
        yield f"milvus://127.0.0.1:{port}"


@pytest.fixture
def running(place: str) -> Iterator[Server]:
    with galleries_at(place) as galleries:
        for name in galleries.names():
            galleries.drop(name)
        with serving(FakeEncoder(), galleries) as running:
            yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


def equal(value: str) -> Any:
    return pb.Filter(condition=pb.Condition(field="brand", equal=pb.FilterValue(text=value)))


def test_items_are_stored_read_changed_and_found(stubs: Stubs) -> None:
    calls = stubs.galleries
    assert stubs.create("birds").items == 0
    things = [item(f"k{n}", image=b"photo %d" % n, label=f"l{n % 2}") for n in range(5)]
    assert stubs.upsert("birds", *things).stored == 5
