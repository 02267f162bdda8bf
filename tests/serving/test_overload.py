"""What there is no room for is refused, and what waits is bounded and keeps nobody else waiting."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import connected, image, item, refused


def test_overload_is_refused_at_once_and_tells_when_to_return(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_in_flight=256) as running, connected(running.address) as stubs:
        pending = stubs.retrieval.Embed.future(
            retrieval_pb.EmbedRequest(images=[b"%d" % i for i in range(255)]), timeout=20
        )
        until(lambda: running.admission.inputs == 255)
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


def test_refusals_are_quick_while_every_permit_is_held(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_in_flight=256) as running, connected(running.address) as stubs:
        calls = [
            stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"%d" % i]), timeout=30)
            for i in range(256)
        ]
        until(lambda: running.admission.inputs == 256)
        took = []
        for _ in range(20):
            began = time.monotonic()
            with pytest.raises(grpc.RpcError):
                stubs.embed(b"more")
            took.append(time.monotonic() - began)
        assert sorted(took)[10] < 0.2  # 20 ms on a machine that does nothing else
        encoder.encode_gate.set()
        assert all(each.result().results[0].vector for each in calls)


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
        running.admission.inputs = 512
        for call in calls:
            with pytest.raises(grpc.RpcError) as failure:
                call()
            refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        running.admission.inputs = 0
