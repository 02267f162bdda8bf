"""What there is no room for is refused, and what waits is bounded and keeps nobody else waiting."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.rpc.services import arrivals
from serving.rpc.wire import metadata_of
from serving.server.server import Server
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import Stubs, connected, image, item, refused


def test_overload_is_refused_at_once_and_tells_when_to_return(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_in_flight=256) as running, connected(running.address) as stubs:
        pending = stubs.retrieval.Embed.future(
            retrieval_pb.EmbedRequest(images=[b"%d" % i for i in range(255)]), timeout=20
        )
        until(lambda: len(encoder.decoded) == 255)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"4", b"5")  # one would fit: images count, not calls
        assert time.monotonic() - began < 1
        refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        details = rpc_status.from_call(failure.value).details
        assert any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in details)
        encoder.encode_gate.set()
        assert len(pending.result().results) == 255
        assert len(stubs.embed(*[b"x"] * 256).results) == 256


def test_a_call_that_would_come_too_late_behind_others_is_refused_at_once(
    encoder: FakeEncoder, tmp_path: Path
) -> None:
    encoder.encode_gate.clear()
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        running._fleet.get().queue_time._rate = 10.0
        pending = [
            stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"%d" % i])) for i in range(20)
        ]
        until(lambda: len(encoder.decoded) == 20)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"late", timeout=1)
        assert time.monotonic() - began < 0.5
        assert "20 images wait" in refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        encoder.encode_gate.set()
        assert all(len(each.result().results) == 1 for each in pending)
        assert b"late" not in encoder.decoded


def test_every_call_that_works_is_admitted(encoder: FakeEncoder, tmp_path: Path) -> None:
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries) as running, connected(running.address) as stubs:
        stubs.create("birds")
        calls: list[Callable[[], Any]] = [
            lambda: stubs.embed(b"x"),
            lambda: stubs.search("birds", image(b"x")),
            lambda: stubs.upsert("birds", item("a")),
            lambda: stubs.create("more"),
            lambda: stubs.galleries.DeleteItems(gallery_pb.DeleteItemsRequest(gallery="birds", keys=["a"])),
            lambda: stubs.galleries.GetItem(gallery_pb.GetItemRequest(gallery="birds", key="a")),
            lambda: stubs.galleries.ListItems(gallery_pb.ListItemsRequest(gallery="birds")),
            lambda: stubs.galleries.GetGallery(gallery_pb.GetGalleryRequest(name="birds")),
            lambda: stubs.galleries.ListGalleries(gallery_pb.ListGalleriesRequest()),
        ]
        running._admission.inputs = 512
        for call in calls:
            with pytest.raises(grpc.RpcError) as failure:
                call()
            refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        running._admission.inputs = 0


def test_bytes_are_counted_before_anything_is_unpacked(stubs: Stubs, running: Server) -> None:
    running._admission.most_bytes = 10_000
    raw: Any = stubs.channel.unary_unary("/crossbatch.v1.RetrievalService/Embed")
    with pytest.raises(grpc.RpcError) as failure:
        raw(b"\xff" * 10_001, timeout=10)
    assert "10,001 more" in refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
    assert stubs.embed(bytes(9_000)).results[0].vector
    until(lambda: running._admission.bytes == 0)  # of the reply too


def test_items_are_unpacked_once_each_off_the_event_loop_after_they_were_admitted(
    stubs: Stubs, running: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.create("birds")
    seen: list[tuple[bool, int]] = []

    def noted(struct: Any) -> dict[str, Any]:
        seen.append(("gallery-write" in threading.current_thread().name, running._admission.inputs))
        return metadata_of(struct)

    monkeypatch.setattr(arrivals, "metadata_of", noted)
    items = [item(f"{i}", **({"image": b"x"} if i % 2 else {})) for i in range(6)]
    stubs.upsert("birds", *items)
    assert seen == [(True, 6)] * 6


def test_a_call_with_much_metadata_keeps_no_other_call_waiting(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("a"))
    many = [item(f"{i}") for i in range(24)]
    for each in many:
        each.metadata.update({"list": [{}] * 15_000})
    request = gallery_pb.UpsertItemsRequest(gallery="birds", items=many)
    pending = stubs.galleries.UpsertItems.future(request, timeout=50)
    slowest = 0.0
    while not pending.done():
        began = time.monotonic()
        stubs.models.GetModel(model_pb.GetModelRequest())
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.01)
    assert pending.result().stored == 24
    assert slowest < 1.5


def test_an_expired_request_reaches_neither_decoder_nor_model(encoder: FakeEncoder, tmp_path: Path) -> None:
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, decode_threads=1) as running, connected(running.address) as stubs:
        encoder.decode_gate.clear()
        blocking = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"first"]), timeout=20)
        time.sleep(0.1)
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"late", timeout=0.1)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        encoder.decode_gate.set()
        blocking.result()
        stubs.embed(b"after")
        assert encoder.decoded == [b"first", b"after"]
        assert encoder.encoded == 2


@pytest.mark.parametrize("way", ["expired", "cancelled"])
def test_a_request_that_is_given_up_while_it_waits_for_the_model_is_not_computed(
    encoder: FakeEncoder, tmp_path: Path, way: str
) -> None:
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_batch=4) as running, connected(running.address) as stubs:
        encoder.encode_gate.clear()
        blocking = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"first"]), timeout=20)
        until(lambda: encoder.decoded == [b"first"])
        time.sleep(0.05)
        patience = 0.2 if way == "expired" else 20
        late = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"2", b"3"]), timeout=patience)
        until(lambda: len(encoder.decoded) == 3)
        if way == "cancelled":
            late.cancel()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            late.result()
        time.sleep(0.1)
        encoder.encode_gate.set()
        blocking.result()
        stubs.embed(b"after")
        assert encoder.encoded == 2
        until(lambda: (running._admission.inputs, running._admission.bytes) == (0, 0))  # its reply too
