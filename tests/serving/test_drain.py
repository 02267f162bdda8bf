"""The stop: health says so, what runs is finished within the grace, the rest is cancelled."""

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.rpc.wire import bytes_of
from tests.serving.rpc_fakes import FakeEncoder, serving, stop, until, vector_for
from tests.serving.stubs import connected, refused


def test_draining_says_so_finishes_what_runs_and_stops(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    with (
        serving(encoder, GalleryDirectory(tmp_path), grace=20.0) as running,
        connected(running.address) as stubs,
    ):
        watch = stubs.health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        pending = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"1"]), timeout=20)
        until(lambda: encoder.decoded == [b"1"])
        stopping = threading.Thread(target=stop, args=(running, 20.0))
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"2")
        refused("UNAVAILABLE", failure, "DRAINING")
        with pytest.raises(grpc.RpcError) as failure:
            stubs.models.GetModel(model_pb.GetModelRequest())
        refused("UNAVAILABLE", failure, "DRAINING")
        assert stopping.is_alive()
        encoder.encode_gate.set()
        assert pending.result().results[0].vector
        stopping.join(5)
        assert not stopping.is_alive()


def test_what_does_not_finish_within_the_grace_is_cancelled(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.decode_gate.clear()
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        pending = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"1"]), timeout=20)
        time.sleep(0.1)
        stopping = threading.Thread(target=stop, args=(running, 0.1))
        stopping.start()
        with pytest.raises(grpc.RpcError) as failure:
            pending.result()
        refused("UNAVAILABLE", failure, "DRAINING")
        assert "before the call was done" in str(failure.value)
        encoder.decode_gate.set()
        stopping.join(5)
        assert not stopping.is_alive()
        assert encoder.encoded == 0


def test_a_long_search_ends_soon_after_the_grace(
    encoder: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def search(gallery: Gallery, vectors: Any, k: int, **options: Any) -> Any:
        begun.set()
        time.sleep(0.1)
        return [[] for _ in vectors]

    monkeypatch.setattr(Gallery, "search", search)
    queries = [retrieval_pb.Query(vector=bytes_of(vector_for(b"x")))] * 60
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        stubs.create("birds")
        request = retrieval_pb.SearchRequest(gallery="birds", queries=queries, k=1024)  # 60 blocks
        pending = stubs.retrieval.Search.future(request)  # without a deadline
        assert begun.wait(5)
        began = time.monotonic()
        stop(running, 0.2)
        assert time.monotonic() - began < 2
        with pytest.raises(grpc.RpcError):
            pending.result()


def test_during_the_drain_delay_health_says_not_serving_and_calls_are_taken(
    encoder: FakeEncoder, tmp_path: Path
) -> None:
    """A load balancer that asks once in a while sends on calls until it has asked (dagster#15924)."""
    with (
        serving(encoder, GalleryDirectory(tmp_path), drain_delay=1.0) as running,
        connected(running.address) as stubs,
    ):
        watch = stubs.health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        began = time.monotonic()
        stopping = threading.Thread(target=stop, args=(running, 5.0))
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert stubs.embed(b"1").results[0].vector
        stopping.join(5)
        assert not stopping.is_alive()
        assert 1.0 <= time.monotonic() - began < 5
