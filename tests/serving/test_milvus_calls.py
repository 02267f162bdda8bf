"""The server over a Milvus: every call through gRPC, and a Milvus that goes and comes back."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from protos import gallery_service_pb2 as pb
from serving.client import Client, Item
from serving.errors import Unavailable
from serving.gallery.milvus.directory import MilvusDirectory
from serving.gallery.place import galleries_at
from serving.server.server import Server
from tests.serving.milvus_process import free_port, milvus_process
from tests.serving.rpc_fakes import FakeEncoder, serving, until, vector_for
from tests.serving.stubs import Stubs, connected, image, item, refusal_of


@pytest.fixture
def running(place: str) -> Iterator[Server]:
    with serving(FakeEncoder(), galleries_at(place)) as running:
        yield running


@pytest.fixture
def client(running: Server) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def photos(count: int) -> list[Item]:
    return [
        Item(
            f"k{n}",
            image=b"photo %d" % n,
            label=f"l{n % 2}",
            uri=f"file:{n}",
            metadata={"n": n, "even": n % 2 == 0},
        )
        for n in range(count)
    ]


def test_items_are_stored_read_changed_and_found(client: Client) -> None:
    assert client.create("birds").items == 0
    versions = client.upsert("birds", photos(5))
    assert versions == sorted(versions)
    stored = client.get("birds", "k3")
    assert (stored.label, stored.uri, stored.metadata, stored.version) == (
        "l1", "file:3", {"n": 3, "even": False}, versions[3],
    )  # fmt: skip
    assert stored.vector is not None
    assert stored.vector.tolist() == vector_for(b"photo 3").tolist()
    assert [it.key for it in client.items("birds")] == ["k0", "k1", "k2", "k3", "k4"]
    assert [it.key for it in client.items("birds", filter={"n": {"$gte": 3}})] == ["k3", "k4"]
    assert {it.key for it in client.sample("birds", 3, filter={"even": True})} == {"k0", "k2", "k4"}
    assert {(it.name, it.items) for it in client.fields("birds")} == {("$label", 5), ("n", 5), ("even", 5)}
    assert [(it.value, it.items) for it in client.values("birds", "$label").values] == [("l0", 3), ("l1", 2)]
    client.update("birds", [Item("k1", metadata={"n": None, "sold": "yes"}), Item("k2", label="other")])
    assert client.get("birds", "k1").metadata == {"even": False, "sold": "yes"}
    assert client.count("birds", filter={"sold": "yes"}) == 1
    (by_image,) = client.search("birds", images=[b"photo 2"], k=2)
    assert (by_image[0].key, by_image[0].label) == ("k2", "other")
    assert by_image[0].score == pytest.approx(1.0, abs=1e-6)
    (by_key,) = client.search("birds", keys=["k4"], k=5, filter={"even": True}, exclude_same="$label")
    assert [hit.key for hit in by_key] == ["k2"]
    assert client.delete("birds", ["k0", "k9"]) == 1
    (by_vector,) = client.search("birds", vectors=[vector_for(b"photo 0")], k=9, with_vectors=True)
    assert {hit.key for hit in by_vector} == {"k1", "k2", "k3", "k4"}
    scores = [
        float(np.dot(hit.vector, vector_for(b"photo 0"))) for hit in by_vector if hit.vector is not None
    ]
    assert [hit.score for hit in by_vector] == pytest.approx(scores, abs=1e-5)
    assert [(info.name, info.items, info.problem) for info in client.galleries()] == [("birds", 4, None)]


def test_names_are_switched_given_back_and_dropped(client: Client) -> None:
    for name, count in (("birds", 1), ("next", 2)):
        client.create(name)
        client.upsert(name, photos(count))
    assert client.switch("birds", "next").items == 2
    assert client.gallery("next").items == 1
    assert client.rollback("birds").items == 1
    client.delete_gallery("next")
    assert [info.name for info in client.galleries()] == ["birds"]


def test_what_milvus_cannot_do_is_told(running: Server) -> None:
    with connected(running.address) as stubs:
        stubs.create("birds")
        stubs.upsert("birds", item("a"))
        asked = {
            "CreateGallery": pb.CreateGalleryRequest(name="seen", thumbnail_side=32),
            "UpsertItems": pb.UpsertItemsRequest(gallery="birds", items=[item("b", expected_version=0)]),
            "UpdateItems": pb.UpdateItemsRequest(
                gallery="birds", items=[{"key": "a", "expected_version": 1}]
            ),
            "DeleteItems": pb.DeleteItemsRequest(gallery="birds", keys=["a"], expected_versions=[1]),
            "GetMapTile": pb.GetMapTileRequest(gallery="birds"),
        }
        for method, request in asked.items():
            call = partial(getattr(stubs.galleries, method), request, timeout=10)
            told = refusal_of(call, "UNIMPLEMENTED", reason="UNSUPPORTED")
            assert "ilvus" in told, method
        building = stubs.galleries.BuildIndex(pb.BuildIndexRequest(name="birds"), timeout=10)
        refusal_of(lambda: list(building), "UNIMPLEMENTED", reason="UNSUPPORTED")
        assert stubs.galleries.GetItem(pb.GetItemRequest(gallery="birds", key="a")).item.key == "a"
        told = refusal_of(lambda: stubs.search("none", image(b"photo")), "NOT_FOUND")
        assert told == "there is no gallery 'none' at its address; it holds birds"


@pytest.mark.timeout(60)
def test_a_milvus_that_went_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    place, given = f"milvus://127.0.0.1:{port}", {"metrics_port": 0}
    with ExitStack() as stack:
        milvus = stack.enter_context(milvus_process(tmp_path, port))
        running = stack.enter_context(serving(FakeEncoder(), MilvusDirectory(place, timeout=2), **given))
        stubs = stack.enter_context(connected(running.address))
        stubs.create("birds")
        stubs.upsert("birds", item("a"))
        milvus.terminate()
        milvus.wait()
        began = time.monotonic()
        told = {refusal_of(lambda: get(stubs), "UNAVAILABLE") for _ in range(20)}.pop()
        assert time.monotonic() - began < 6  # not for each of them
        assert told.startswith("the Milvus server at its address ")
        assert str(port) not in told
        assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        assert stubs.embed(b"photo").dimension == 8
        with pytest.raises(Unavailable):
            running.reload()
        stack.enter_context(milvus_process(tmp_path, port))
        assert until(lambda: reached(stubs)) == "a"
        assert stubs.upsert("birds", item("b")).stored == 1


def get(stubs: Stubs) -> str:
    request = pb.GetItemRequest(gallery="birds", key="a")
    return str(stubs.galleries.GetItem(request, timeout=30).item.key)


def reached(stubs: Stubs) -> str:
    try:
        return get(stubs)
    except grpc.RpcError:
        return ""


def test_a_milvus_that_is_not_there_at_the_start_is_told() -> None:
    with pytest.raises(Unavailable, match=r"the Milvus server at milvus://127\.0\.0\.1:1 cannot be reached"):
        galleries_at("milvus://127.0.0.1:1")
