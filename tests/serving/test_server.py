"""The server as a whole: health, reflection, settings, limits, what is refused, and the drained stop."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import open_inference_pb2 as inference_pb
from serving.gallery import item as gallery_item
from serving.gallery.directory import GalleryDirectory
from serving.model import preprocess
from serving.rpc import limits
from serving.server import server
from serving.server.server import Server
from serving.settings import Settings
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import Stubs, connected, image, item, refusal_of, refused
from tests.serving.test_inference import infer, of_files

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def watching(stubs: Stubs) -> Any:
    """What health tells from now on, after the first word."""
    watch = stubs.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    return watch


def probe(stubs: Stubs, model: str) -> set[int]:
    """What every probe that there is says."""
    names = ("", *server.SERVICES)
    told = {stubs.health.Check(health_pb2.HealthCheckRequest(service=name)).status for name in names}
    calls = stubs.inference
    assert calls.ServerLive(inference_pb.ServerLiveRequest(), timeout=10).live
    ready = calls.ServerReady(inference_pb.ServerReadyRequest(), timeout=10).ready
    assert calls.ModelReady(inference_pb.ModelReadyRequest(name=model), timeout=10).ready == ready
    return told | {SERVING if ready else NOT_SERVING}


def stopping(running: Server, grace: float) -> threading.Thread:
    thread = threading.Thread(target=running.stop, args=(grace,))
    thread.start()
    return thread


def test_when_no_image_can_be_embedded_any_more_every_probe_says_so(
    stubs: Stubs,
    running: Server,
    encoder: FakeEncoder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object, **__: object) -> None:
        raise SystemExit

    watch = watching(stubs)
    assert probe(stubs, "fake") == {SERVING}
    monkeypatch.setattr(encoder, "encode", die)
    refusal_of(lambda: stubs.embed(b"1"), "UNAVAILABLE")
    assert next(watch).status == NOT_SERVING
    assert running.failed.is_set()
    assert probe(stubs, "fake") == {NOT_SERVING}
    refusal_of(lambda: stubs.embed(b"2"), "UNAVAILABLE")
    assert any(record.levelname == "CRITICAL" and record.exc_info for record in caplog.records)


def test_a_probe_of_another_service_finds_none_and_reflection_tells_which_there_are(
    stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        stubs.health.Check(health_pb2.HealthCheckRequest(service="crossbatch.v1.OtherService"))
    reflect = reflection_pb2_grpc.ServerReflectionStub(stubs.channel).ServerReflectionInfo
    ask = reflection_pb2.ServerReflectionRequest
    (listed,) = reflect(iter([ask(list_services="")]))
    names = {each.name for each in listed.list_services_response.service}
    assert {*server.SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} == names
    (found,) = reflect(iter([ask(file_containing_symbol="crossbatch.v1.RetrievalService")]))
    file, *_ = found.file_descriptor_response.file_descriptor_proto
    assert descriptor_pb2.FileDescriptorProto.FromString(file).package == "crossbatch.v1"
    unanswered: Any = stubs.channel.unary_unary("/grpc.health.v1.Health/List")
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        unanswered(b"", timeout=10)
    assert not caplog.messages


def test_settings_hold_their_bounds() -> None:
    wrong: dict[str, Any] = {"port": 70_000, "max_batch": -1, "grace": -1, "max_wait_ms": -1, "nope": 1}
    wrong |= {"max_in_flight": limits.MAX_INPUTS - 1, "trace": "localhost:4318"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            Settings.model_validate({"model": ["m"], "galleries": "g", name: value})


@pytest.mark.parametrize(("on_gpu", "instances"), [(False, 1), (True, 3)])
def test_a_gpu_is_fed_by_the_threads_that_decode(tmp_path: Path, on_gpu: bool, instances: int) -> None:
    encoder = FakeEncoder(on_gpu=on_gpu)
    with serving(encoder, GalleryDirectory(tmp_path), threads=1, decode_threads=3):
        names = [each.name for each in threading.enumerate() if each.name.startswith("fake-")]
        assert len(names) == instances


def test_the_limits_are_those_of_the_parts_behind() -> None:
    assert limits.MAX_K == gallery_item.MAX_K
    assert limits.MAX_BYTES_IN_FLIGHT >= limits.MAX_MESSAGE_BYTES
    assert limits.MAX_HITS >= limits.MAX_K
    assert limits.MAX_MESSAGE_BYTES > preprocess.MAX_BYTES + gallery_item.MAX_METADATA_BYTES


def test_draining_finishes_what_runs_and_stops(stubs: Stubs, running: Server, encoder: FakeEncoder) -> None:
    encoder.encode_gate.clear()
    watch = watching(stubs)
    pending = stubs.embedding(b"1")
    until(lambda: encoder.encoding)
    stop = stopping(running, 20.0)
    assert next(watch).status == NOT_SERVING
    until(lambda: running.admission.draining)
    assert probe(stubs, "fake") == {NOT_SERVING}
    for call in (
        lambda: stubs.embed(b"2"),
        lambda: infer(stubs, of_files(b"2")),
        lambda: stubs.models.GetModel(model_pb.GetModelRequest()),
    ):
        refusal_of(call, "UNAVAILABLE", reason="DRAINING")
    assert stop.is_alive()
    encoder.encode_gate.set()
    assert pending.result().results[0].vector
    stop.join(5)
    assert not stop.is_alive()


def test_what_outlasts_the_grace_is_given_up(stubs: Stubs, running: Server, encoder: FakeEncoder) -> None:
    encoder.encode_gate.clear()
    pending = stubs.embedding(b"1")
    until(lambda: encoder.encoding)
    stop = stopping(running, 0.1)
    said = refusal_of(pending.result, "UNAVAILABLE", reason="DRAINING")
    assert "before the call was done" in said
    encoder.encode_gate.set()
    stop.join(5)
    assert not stop.is_alive()


def test_during_the_drain_delay_calls_are_taken(encoder: FakeEncoder, tmp_path: Path) -> None:
    """A load balancer that asks once in a while sends on calls until it has asked (dagster#15924)."""
    with (
        serving(encoder, GalleryDirectory(tmp_path), drain_delay=0.4) as running,
        connected(running.address) as stubs,
    ):
        watch = watching(stubs)
        began = time.monotonic()
        stop = stopping(running, 5.0)
        assert next(watch).status == NOT_SERVING
        assert stubs.embed(b"1").results[0].vector
        stop.join(5)
        assert 0.4 <= time.monotonic() - began < 5


def test_refusals_are_quick_and_tell_when_to_return(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_in_flight=256) as running, connected(running.address) as stubs:
        pending = stubs.embedding(*(b"%d" % i for i in range(255)))
        until(lambda: running.admission.inputs == 255)
        took = []
        for _ in range(20):
            began = time.monotonic()
            with pytest.raises(grpc.RpcError) as failure:
                stubs.embed(b"4", b"5")  # one would fit: images count, not calls
            took.append(time.monotonic() - began)
        assert sorted(took)[10] < 0.2  # 20 ms on a machine that does nothing else
        refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        details = rpc_status.from_call(failure.value).details
        assert any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in details)
        encoder.encode_gate.set()
        assert len(pending.result().results) == 255
        assert len(stubs.embed(*[b"x"] * 256).results) == 256


def test_every_call_that_works_is_admitted(stubs: Stubs, running: Server) -> None:
    stubs.create("birds")
    calls: list[Callable[[], Any]] = [
        lambda: stubs.embed(b"x"),
        lambda: stubs.search("birds", image(b"x")),
        lambda: stubs.upsert("birds", item("a")),
        lambda: stubs.create("more"),
        lambda: stubs.galleries.DeleteItems(gallery_pb.DeleteItemsRequest(gallery="birds", keys=["a"])),
        lambda: stubs.galleries.GetItem(gallery_pb.GetItemRequest(gallery="birds", key="a")),
        lambda: stubs.galleries.ListItems(gallery_pb.ListItemsRequest(gallery="birds")),
        lambda: stubs.galleries.CountItems(gallery_pb.CountItemsRequest(gallery="birds")),
        lambda: stubs.galleries.SampleItems(gallery_pb.SampleItemsRequest(gallery="birds")),
        lambda: stubs.galleries.ListFields(gallery_pb.ListFieldsRequest(gallery="birds")),
        lambda: stubs.galleries.ListValues(gallery_pb.ListValuesRequest(gallery="birds", field="x")),
        lambda: stubs.galleries.ListDuplicates(gallery_pb.ListDuplicatesRequest(gallery="birds")),
        lambda: stubs.galleries.GetGallery(gallery_pb.GetGalleryRequest(name="birds")),
        lambda: stubs.galleries.ListGalleries(gallery_pb.ListGalleriesRequest()),
    ]
    running.admission.inputs = 512
    for call in calls:
        refusal_of(call, "RESOURCE_EXHAUSTED", reason="OVERLOADED")
    running.admission.inputs = 0


def test_watchers_of_health_keep_no_call_waiting_and_no_stop(stubs: Stubs, running: Server) -> None:
    watchers = [watching(stubs) for _ in range(200)]
    assert len(stubs.embed(*[b"x"] * 256).results) == 256
    leaving = threading.Thread(target=lambda: [each.cancel() for each in watchers[:100]])
    leaving.start()  # while the others are told of the stop
    running.stop(2.0)
    leaving.join()
    assert all(next(each).status == NOT_SERVING for each in watchers[100:])


@pytest.mark.parametrize(
    ("size", "on_gpu", "batch"),
    [(224, False, 2), (128, False, 8), (32, False, 32), (512, False, 1), (224, True, 32)],
)
def test_a_batch_is_of_as_many_pixels_as_a_core_holds(size: int, on_gpu: bool, batch: int) -> None:
    encoder: Any = SimpleNamespace(on_gpu=on_gpu, spec=SimpleNamespace(image_size=size))
    for asked, most in ((0, batch), (5, 5)):
        settings = Settings.model_validate({"model": ["m"], "galleries": "g", "max_batch": asked})
        assert server._limits(settings, encoder).max_batch == most
