"""The server over real sockets, with a fake encoder and real galleries."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hypothesis import strategies as st

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import BadSetting, Unavailable
from serving.gallery import item as gallery_item
from serving.gallery import metadata as gallery_metadata
from serving.gallery.folder.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.search.filter import AnyOf, Equal, Exists, Not, Range
from serving.model import preprocess
from serving.rpc import limits
from serving.rpc.filters import filter_message
from serving.rpc.gate.address import check_address
from serving.rpc.server import server
from serving.rpc.server.server import Server
from serving.rpc.server.settings import Settings
from serving.rpc.services import arrivals, neighbours
from serving.rpc.wire import bytes_of, metadata_of, vector_of
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving, vector_for
from tests.serving.stubs import Stubs, connected, fields_of, image, item, refused


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def running(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Server]:
    with serving(encoder, GalleryDirectory(tmp_path)) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


def test_embed_answers_each_image_in_order_with_the_model_and_the_times(stubs: Stubs) -> None:
    images = [b"%d" % i for i in range(40)]
    reply = stubs.embed(*images)
    for data, result in zip(images, reply.results, strict=True):
        np.testing.assert_array_equal(vector_of(result.vector), vector_for(data))
    assert (reply.model_name, reply.model_fingerprint, reply.dimension) == ("fake", "a" * 64, DIMENSION)
    times = reply.timings
    assert 0 < times.decode_us <= times.total_us
    assert 0 < times.encode_us <= times.total_us


def test_vectors_travel_as_little_endian_float32(stubs: Stubs) -> None:
    (result,) = stubs.embed(b"x").results
    assert len(result.vector) == 4 * DIMENSION
    np.testing.assert_array_equal(np.frombuffer(result.vector, "<f4"), vector_for(b"x"))


def test_one_bad_image_fails_alone(stubs: Stubs, encoder: FakeEncoder) -> None:
    reply = stubs.embed(b"good", b"bad", b"", b"also good")
    assert [bool(each.vector) for each in reply.results] == [True, False, False, True]
    assert reply.results[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert reply.results[1].error.message == "These bytes hold no image."
    assert "empty" in reply.results[2].error.message
    assert encoder.encoded == 2


def test_a_bug_in_one_image_fails_it_alone_and_tells_no_internals(stubs: Stubs) -> None:
    reply = stubs.embed(b"good", b"bug")
    assert reply.results[0].vector
    assert reply.results[1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(reply.results[1].error)


def test_when_every_input_is_bad_the_call_fails_with_the_first_and_names_all(stubs: Stubs) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"bad", b"")
    assert refused("INVALID_ARGUMENT", failure, "BAD_IMAGE") == "images[0]: These bytes hold no image."
    assert fields_of(failure) == ["images[0]", "images[1]"]


def test_a_failing_batch_fails_its_members_and_the_next_call_works(
    stubs: Stubs, encoder: FakeEncoder
) -> None:
    encoder.failing = RuntimeError("secret")
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"1", b"2")
    assert "secret" not in refused("INTERNAL", failure, "INTERNAL")
    encoder.failing = None
    assert stubs.embed(b"1", b"2").results[1].vector


def test_search_by_image_vector_and_key(stubs: Stubs) -> None:
    stubs.create("birds")
    keys = [f"k{i}" for i in range(20)]
    items = [item(key, label=f"label {key}", uri=f"file:{key}") for key in keys]
    items[3].metadata.update({"price": 3, "size": 2.5, "tags": ["a", None, True], "deep": {"x": "y"}})
    assert stubs.upsert("birds", *items).stored == 20
    queries = [
        image(b"k3"),
        retrieval_pb.Query(vector=bytes_of(vector_for(b"k4"))),
        retrieval_pb.Query(key="k5"),
    ]
    reply = stubs.search("birds", *queries, k=5)
    vectors = np.stack([vector_for(key.encode()) for key in keys])
    for own, result in zip(("k3", "k4", "k5"), reply.results, strict=True):
        scores = vectors @ vector_for(own.encode())
        assert [hit.key for hit in result.hits] == [keys[i] for i in np.argsort(-scores)[:5]]
        np.testing.assert_allclose([hit.score for hit in result.hits], np.sort(scores)[::-1][:5], atol=1e-6)
    first = reply.results[0].hits[0]
    assert (first.label, first.uri) == ("label k3", "file:k3")
    assert metadata_of(first.metadata) == {
        "price": 3,
        "size": 2.5,
        "tags": ["a", None, True],
        "deep": {"x": "y"},
    }
    assert reply.timings.gallery_us > 0
    assert reply.model_fingerprint == "a" * 64


def test_search_options(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", *(item(f"k{i}") for i in range(20)))
    query = retrieval_pb.Query(key="k5")
    assert len(stubs.search("birds", query).results[0].hits) == limits.DEFAULT_K
    assert len(stubs.search("birds", query, k=1000).results[0].hits) == 20
    hits = stubs.search("birds", query, exclude_keys=["k5", "no such"]).results[0].hits
    assert "k5" not in {hit.key for hit in hits}
    assert [hit.key for hit in stubs.search("birds", query, minimum_score=0.999).results[0].hits] == ["k5"]


def test_one_bad_query_fails_alone(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("k"))
    results = stubs.search(
        "birds",
        image(b"bad"),
        retrieval_pb.Query(key="k"),
        retrieval_pb.Query(key="nobody"),
        retrieval_pb.Query(vector=b"123"),
        retrieval_pb.Query(vector=bytes_of(np.ones(3))),
        retrieval_pb.Query(vector=bytes_of(np.full(DIMENSION, np.nan))),
        retrieval_pb.Query(),
    ).results
    codes = [
        grpc.StatusCode.INVALID_ARGUMENT,
        None,
        grpc.StatusCode.NOT_FOUND,
        *4 * [grpc.StatusCode.INVALID_ARGUMENT],
    ]
    assert [each.error.code for each in results] == [code.value[0] if code else 0 for code in codes]
    assert results[1].hits[0].key == "k"
    assert "nobody" in results[2].error.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"k": 0}, "k"),
        ({"k": limits.MAX_K + 1}, "k"),
        ({"minimum_score": float("nan")}, "minimum_score"),
        ({"minimum_score": 1.5}, "minimum_score"),
        ({"minimum_score": -1.5}, "minimum_score"),
        ({"exclude_keys": ["x"] * 1001}, "exclude_keys"),
        ({"exclude_keys": ["x", ""]}, "exclude_keys"),
        ({"filter": retrieval_pb.Filter()}, "filter"),
        ({"filter": retrieval_pb.Filter(range=retrieval_pb.Filter.Range(field="a"))}, "filter"),
    ],
)
def test_search_out_of_bounds_is_refused(stubs: Stubs, options: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        stubs.search("birds", image(b"x"), **options)
    refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == [field]


def test_too_many_and_no_inputs_are_refused(stubs: Stubs) -> None:
    galleries: Any = stubs.galleries
    calls: list[Callable[[], Any]] = [
        lambda: stubs.embed(),
        lambda: stubs.embed(*[b"x"] * 257),
        lambda: stubs.search("birds"),
        lambda: stubs.search("birds", *[image(b"x")] * 257),
        lambda: stubs.search("birds", *[image(b"x")] * 256, k=1000),
        lambda: stubs.upsert("birds"),
        lambda: stubs.upsert("birds", *(item(f"{i}") for i in range(257))),
        lambda: galleries.DeleteItems(gallery_pb.DeleteItemsRequest(gallery="birds")),
        lambda: galleries.ListGalleries(gallery_pb.ListGalleriesRequest(page_size=1001)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as failure:
            call()
        refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")


def test_a_photograph_larger_than_grpcs_own_limit_arrives_and_one_past_ours_is_refused(
    stubs: Stubs, encoder: FakeEncoder
) -> None:
    assert stubs.embed(bytes(6_000_000)).results[0].vector
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(bytes(preprocess.MAX_BYTES + 1))
    assert f"{preprocess.MAX_BYTES:,}" in refused("INVALID_ARGUMENT", failure, "BAD_IMAGE")
    assert len(encoder.decoded) == 1  # the second was refused by its bytes alone


def test_upsert_is_atomic_and_names_each_bad_field(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("old"))
    bad = [
        item("fine"),
        item("one", image=b""),
        item("two", vector=bytes_of(np.ones(DIMENSION))),
        item("", image=b"x"),
        gallery_pb.Item(key="empty"),
        item("fine"),
    ]
    with pytest.raises(grpc.RpcError) as failure:
        stubs.upsert("birds", *bad)
    refused("INVALID_ARGUMENT", failure, "BAD_IMAGE")
    assert fields_of(failure) == ["items[1].image", "items[2].vector", "items[3]", "items[4]", "items[5].key"]
    with pytest.raises(grpc.RpcError) as failure:
        stubs.upsert("birds", item("fine"), item("x", image=b"good"), item("y", image=b"bad"))
    assert refused("INVALID_ARGUMENT", failure, "BAD_IMAGE").startswith("items[2].image:")
    assert stubs.galleries.GetGallery(gallery_pb.GetGalleryRequest(name="birds")).gallery.items == 1


def test_items_come_and_go_and_are_seen_at_once(stubs: Stubs) -> None:
    stubs.create("birds")
    reply = stubs.upsert("birds", item("a", image=b"a"), item("b"))
    assert reply.stored == 2
    assert reply.timings.encode_us > 0
    assert stubs.search("birds", image(b"a"), k=1).results[0].hits[0].key == "a"
    stubs.upsert("birds", item("a", label="new"))
    assert stubs.search("birds", image(b"a"), k=1).results[0].hits[0].label == "new"
    gone = stubs.galleries.DeleteItems(gallery_pb.DeleteItemsRequest(gallery="birds", keys=["a", "zzz"]))
    assert gone.deleted == 1
    assert [hit.key for hit in stubs.search("birds", image(b"a")).results[0].hits] == ["b"]


def test_galleries_are_made_described_and_listed_by_pages(stubs: Stubs) -> None:
    made = [stubs.create(name) for name in ("c", "a", "b")]
    assert (made[0].name, made[0].model_fingerprint, made[0].dimension) == ("c", "a" * 64, DIMENSION)
    token, names = "", []
    while True:
        request = gallery_pb.ListGalleriesRequest(page_size=2, page_token=token)
        page = stubs.galleries.ListGalleries(request)
        names += [gallery.name for gallery in page.galleries]
        token = page.next_page_token
        if not token:
            break
    assert names == ["a", "b", "c"]
    with pytest.raises(grpc.RpcError) as failure:
        stubs.create("a")
    refused("ALREADY_EXISTS", failure, "ALREADY_EXISTS")
    with pytest.raises(grpc.RpcError) as failure:
        stubs.create("../up")
    refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    with pytest.raises(grpc.RpcError) as failure:
        stubs.search("d", image(b"x"))
    assert "a, b, c" in refused("NOT_FOUND", failure, "NOT_FOUND")


def test_a_gallery_of_another_model_is_refused_by_name_and_leaves_the_others_alone(
    encoder: FakeEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    galleries = GalleryDirectory(tmp_path)
    galleries.create("ours", model_name="fake", fingerprint="a" * 64, dimension=DIMENSION)
    galleries.create("theirs", model_name="other", fingerprint="b" * 64, dimension=DIMENSION)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "gallery.sqlite").write_bytes(b"no database" * 100)
    with caplog.at_level(logging.WARNING), serving(encoder, galleries) as running:
        assert {record.gallery for record in caplog.records if hasattr(record, "gallery")} == {
            "theirs",
            "broken",
        }
        with connected(running.address) as stubs:
            for call in (
                lambda: stubs.search("theirs", image(b"x")),
                lambda: stubs.upsert("theirs", item("x")),
                lambda: stubs.galleries.GetItem(gallery_pb.GetItemRequest(gallery="theirs", key="x")),
                lambda: stubs.galleries.ListItems(gallery_pb.ListItemsRequest(gallery="theirs")),
                lambda: stubs.galleries.DeleteItems(
                    gallery_pb.DeleteItemsRequest(gallery="theirs", keys=["x"])
                ),
            ):
                with pytest.raises(grpc.RpcError) as failure:
                    call()
                message = refused("FAILED_PRECONDITION", failure, "MODEL_MISMATCH")
                assert "fake" in message
                assert "other" in message
            assert encoder.decoded == []  # refused before anything was spent
            with pytest.raises(grpc.RpcError) as failure:
                stubs.search("broken", image(b"x"))
            refused("FAILED_PRECONDITION", failure, "BAD_ARTIFACT")
            listed = stubs.galleries.ListGalleries(gallery_pb.ListGalleriesRequest()).galleries
            code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
            assert {each.name: each.problem.code for each in listed} == {
                "broken": code,
                "ours": 0,
                "theirs": code,
            }
            stubs.upsert("ours", item("x"))
            assert stubs.search("ours", image(b"x")).results[0].hits[0].key == "x"


def test_a_bug_in_the_gallery_is_internal_with_an_id(encoder: FakeEncoder, tmp_path: Path) -> None:
    class Broken(GalleryDirectory):
        def get(self, name: str) -> Any:
            raise KeyError("secret")

    with serving(encoder, Broken(tmp_path)) as running, connected(running.address) as stubs:
        with pytest.raises(grpc.RpcError) as failure:
            stubs.search("birds", image(b"x"))
        message = refused("INTERNAL", failure, "INTERNAL")
        assert "incident" in message
        assert "secret" not in message


def test_a_bug_that_one_gallery_shows_hides_no_other(
    encoder: FakeEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(GalleryDirectory):
        def get(self, name: str) -> Any:
            if name == "a":
                raise KeyError("secret")
            return super().get(name)

    galleries = Broken(tmp_path)
    for name in ("a", "b"):
        galleries.create(name, model_name="fake", fingerprint="a" * 64, dimension=DIMENSION)
    with serving(encoder, galleries) as running, connected(running.address) as stubs:
        listed = stubs.galleries.ListGalleries(gallery_pb.ListGalleriesRequest()).galleries
        codes = [grpc.StatusCode.INTERNAL.value[0], 0]
        assert [(each.name, each.problem.code) for each in listed] == [("a", codes[0]), ("b", codes[1])]
        assert "secret" not in str(listed)
        assert "secret" in caplog.text


def test_the_model_is_described(stubs: Stubs) -> None:
    model = stubs.models.GetModel(model_pb.GetModelRequest()).model
    assert (model.name, model.fingerprint, model.dimension) == ("fake", "a" * 64, DIMENSION)
    assert json.loads(model.spec_json)["name"] == "fake"


def test_overload_is_refused_at_once_and_tells_when_to_return(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_in_flight=256) as running, connected(running.address) as stubs:
        pending = stubs.retrieval.Embed.future(
            retrieval_pb.EmbedRequest(images=[b"%d" % i for i in range(255)]), timeout=20
        )
        _until(lambda: len(encoder.decoded) == 255)
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
    assert running._admission.bytes == 0


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


def test_bytes_that_are_no_item_are_named_by_their_place(stubs: Stubs) -> None:
    stubs.create("birds")
    raw: Any = stubs.channel.unary_unary("/crossbatch.v1.GalleryService/UpsertItems")
    request = arrivals.UnreadItems(gallery="birds", items=[item("a").SerializeToString(), b"\xff"])
    with pytest.raises(grpc.RpcError) as failure:
        raw(request.SerializeToString(), timeout=10)
    refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == ["items[1]"]


def test_a_search_whose_reply_would_be_too_large_is_refused_with_advice(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.create("birds")
    items = [item(f"{i}") for i in range(20)]
    for each in items:
        each.metadata.update({"text": "x" * 60_000})
    stubs.upsert("birds", *items)
    monkeypatch.setattr(neighbours, "MAX_MESSAGE_BYTES", 1_000_000)
    with pytest.raises(grpc.RpcError) as failure:
        stubs.search("birds", image(b"x"), image(b"y"))
    assert "fewer neighbours" in refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == ["k"]
    assert len(stubs.search("birds", image(b"x"), image(b"y"), k=5).results[1].hits) == 5


def test_when_no_image_can_be_embedded_any_more_health_says_so(
    stubs: Stubs, running: Server, caplog: pytest.LogCaptureFixture
) -> None:
    watch = stubs.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    running._fleet.get().batcher._next_batch = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"1")
    refused("UNAVAILABLE", failure, "UNAVAILABLE")
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", *server.SERVICES):
        reply = stubs.health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError):
        stubs.embed(b"2")
    assert any(record.levelname == "CRITICAL" and record.exc_info for record in caplog.records)


def test_no_path_of_the_server_reaches_a_caller(encoder: FakeEncoder, tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    galleries = GalleryDirectory(folder)
    galleries.create("ours", model_name="fake", fingerprint="a" * 64, dimension=DIMENSION)
    (folder / "broken").mkdir()
    (folder / "broken" / "gallery.sqlite").write_bytes(b"no database" * 100)
    with serving(encoder, galleries) as running, connected(running.address) as stubs:
        said: list[str] = []
        for name in ("broken", "nowhere", "ours"):
            for call in (
                lambda name=name: stubs.search(name, image(b"x"), retrieval_pb.Query(key="y")),
                lambda name=name: stubs.upsert(name, item("", image=b"x")),
                lambda name=name: stubs.galleries.DeleteItems(
                    gallery_pb.DeleteItemsRequest(gallery=name, keys=["x"])
                ),
                lambda name=name: stubs.galleries.GetItem(gallery_pb.GetItemRequest(gallery=name, key="x")),
                lambda name=name: stubs.galleries.ListItems(gallery_pb.ListItemsRequest(gallery=name)),
                lambda name=name: stubs.create(name),
                lambda name=name: stubs.galleries.GetGallery(gallery_pb.GetGalleryRequest(name=name)),
            ):
                try:
                    said.append(str(call()))
                except grpc.RpcError as error:
                    said += [str(error), str(rpc_status.from_call(error))]
        said.append(str(stubs.galleries.ListGalleries(gallery_pb.ListGalleriesRequest())))
        # A file that disappears under an open gallery.
        (folder / "ours" / "gallery.sqlite").write_bytes(b"")
        for query in (image(b"x"), retrieval_pb.Query(key="y")):
            try:
                said.append(str(stubs.search("ours", query)))
            except grpc.RpcError as error:
                said += [str(error), str(rpc_status.from_call(error))]
    assert [text for text in said if "secret" in text or str(tmp_path) in text] == []
    assert any("'nowhere'" in text and "the server's folder" in text and "ours" in text for text in said)
    assert any("broken" in text and "damaged" in text for text in said)


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
        _until(lambda: encoder.decoded == [b"first"])
        time.sleep(0.05)
        patience = 0.2 if way == "expired" else 20
        late = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"2", b"3"]), timeout=patience)
        _until(lambda: len(encoder.decoded) == 3)
        if way == "cancelled":
            late.cancel()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            late.result()
        time.sleep(0.1)
        encoder.encode_gate.set()
        blocking.result()
        stubs.embed(b"after")
        assert encoder.encoded == 2
        assert (running._admission.inputs, running._admission.bytes) == (0, 0)


def test_bytes_that_are_no_message_are_a_bad_argument_and_not_our_bug(stubs: Stubs) -> None:
    for method in ("RetrievalService/Embed", "RetrievalService/Search", "GalleryService/UpsertItems"):
        raw: Any = stubs.channel.unary_unary(f"/crossbatch.v1.{method}")
        with pytest.raises(grpc.RpcError) as failure:
            raw(b"\xff\xff\xff\xff", timeout=10)
        refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    unknown: Any = stubs.channel.unary_unary("/crossbatch.v1.RetrievalService/Nothing")
    with pytest.raises(grpc.RpcError) as failure:
        unknown(b"", timeout=10)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_fuzzed_messages_never_show_a_bug_of_ours(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("a", label="l"))
    search = retrieval_pb.SearchRequest(
        gallery="birds", queries=[retrieval_pb.Query(key="a"), image(b"x")], k=3
    )
    filtered = retrieval_pb.SearchRequest(
        gallery="birds",
        queries=[retrieval_pb.Query(key="a")],
        filter=filter_message(AnyOf((Exists("n"), Not(Equal("$label", "l")), Range("$label", "a")))),
        group_by_label=True,
    )
    listed = gallery_pb.ListItemsRequest(gallery="birds", page_token="a", key_prefix="b", with_vectors=True)
    deleted = gallery_pb.DeleteItemsRequest(gallery="birds", keys=["z"], expected_versions=[0])
    upsert = gallery_pb.UpsertItemsRequest(
        gallery="birds", items=[item("a", label="l"), item("b", image=b"x")]
    )
    upsert.items[0].metadata.update({"a": 1, "b": ["c", None]})
    calls: list[tuple[str, bytes]] = [
        ("RetrievalService/Embed", retrieval_pb.EmbedRequest(images=[b"x", b"bad"]).SerializeToString()),
        ("RetrievalService/Search", search.SerializeToString()),
        ("RetrievalService/Search", filtered.SerializeToString()),
        ("GalleryService/ListItems", listed.SerializeToString()),
        ("GalleryService/DeleteItems", deleted.SerializeToString()),
        ("GalleryService/GetItem", gallery_pb.GetItemRequest(gallery="birds", key="a").SerializeToString()),
        ("GalleryService/UpsertItems", upsert.SerializeToString()),
        ("GalleryService/GetGallery", gallery_pb.GetGalleryRequest(name="birds").SerializeToString()),
        ("GalleryService/ListGalleries", gallery_pb.ListGalleriesRequest(page_token="a").SerializeToString()),
    ]

    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.given(
        call=st.sampled_from(calls),
        edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
        tail=st.binary(max_size=8),
    )
    def fuzz(call: tuple[str, bytes], edits: list[tuple[int, int]], tail: bytes) -> None:
        method, valid = call
        message = bytearray(valid + tail)
        for place, value in edits:
            message[place % len(message)] = value
        send: Any = stubs.channel.unary_unary(f"/crossbatch.v1.{method}")
        try:
            send(bytes(message), timeout=10)
        except grpc.RpcError as failure:
            code: grpc.StatusCode = failure.code()
            assert code.name in {"INVALID_ARGUMENT", "NOT_FOUND", "ABORTED"}, (method, message)

    fuzz()
    assert stubs.embed(b"x").results[0].vector


def test_a_reply_past_the_limit_is_refused_with_advice(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.rpc.gate.boundary.MAX_MESSAGE_BYTES", 100)
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(*[b"x"] * 10)
    assert "split the call" in refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")


def test_the_request_id_comes_back_and_is_in_the_log(stubs: Stubs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="serving.rpc.gate.boundary"):
        request = retrieval_pb.EmbedRequest(images=[b"x"])
        _, call = stubs.retrieval.Embed.with_call(request, metadata=(("x-request-id", "my-id"),))
        assert ("x-request-id", "my-id") in call.trailing_metadata()
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"bad")
        metadata: Any = failure.value.trailing_metadata()
        made = dict(metadata)["x-request-id"]
        assert len(made) == 16
    records = [record for record in caplog.records if hasattr(record, "rpc")]
    assert [(each.rpc, each.code) for each in records] == [  # type: ignore[attr-defined]
        ("RetrievalService/Embed", "OK"),
        ("RetrievalService/Embed", "INVALID_ARGUMENT"),
    ]


def test_health_and_reflection(stubs: Stubs) -> None:
    for name in (
        "",
        "crossbatch.v1.RetrievalService",
        "crossbatch.v1.GalleryService",
        "crossbatch.v1.ModelService",
    ):
        reply = stubs.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflect = reflection_pb2_grpc.ServerReflectionStub(stubs.channel).ServerReflectionInfo
    ask = reflection_pb2.ServerReflectionRequest
    (listed,) = reflect(iter([ask(list_services="")]))
    names = {each.name for each in listed.list_services_response.service}
    assert {*server.SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} == names
    (found,) = reflect(iter([ask(file_containing_symbol="crossbatch.v1.RetrievalService")]))
    file = descriptor_pb2.FileDescriptorProto.FromString(
        found.file_descriptor_response.file_descriptor_proto[0]
    )
    assert file.package == "crossbatch.v1"


def test_draining_says_so_finishes_what_runs_and_stops(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    with (
        serving(encoder, GalleryDirectory(tmp_path), grace=20.0) as running,
        connected(running.address) as stubs,
    ):
        watch = stubs.health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        pending = stubs.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=[b"1"]), timeout=20)
        _until(lambda: encoder.decoded == [b"1"])
        stopping = threading.Thread(target=_stop, args=(running, 20.0))
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
        stopping = threading.Thread(target=_stop, args=(running, 0.1))
        stopping.start()
        with pytest.raises(grpc.RpcError):
            pending.result()
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
        _stop(running, 0.2)
        assert time.monotonic() - began < 2
        with pytest.raises(grpc.RpcError):
            pending.result()


def test_a_port_in_use_is_one_sentence(encoder: FakeEncoder, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with (
            pytest.raises(Unavailable, match=rf"Port {port} on 127.0.0.1 is in use.*--port"),
            serving(encoder, GalleryDirectory(tmp_path), port=port),
        ):
            pass


def test_two_servers_do_not_share_a_port(encoder: FakeEncoder, tmp_path: Path) -> None:
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries) as running:
        port = int(running.address.rpartition(":")[2])
        with pytest.raises(Unavailable, match="in use"), serving(encoder, galleries, port=port):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_plain_text_off_loopback_needs_leave(encoder: FakeEncoder, tmp_path: Path, host: str) -> None:
    with (
        pytest.raises(BadSetting, match="--insecure"),
        serving(encoder, GalleryDirectory(tmp_path), host=host),
    ):
        pass


def test_a_host_that_cannot_be_used_is_one_sentence(encoder: FakeEncoder, tmp_path: Path) -> None:
    galleries = GalleryDirectory(tmp_path)
    with (
        pytest.raises(BadSetting, match="not known"),
        serving(encoder, galleries, host="no-such-host.invalid"),
    ):
        pass
    for host in ("a" * 64 + ".invalid", "a..b", "a\0b", "\udcff", ".", ""):
        with pytest.raises(BadSetting, match="not known"):
            check_address(host, 0, insecure=False)
    with (
        pytest.raises(BadSetting, match="not an address of this machine"),
        serving(encoder, galleries, host="192.0.2.1", insecure=True),
    ):
        pass


def test_settings_hold_their_bounds() -> None:
    for wrong in (
        {"port": 70_000},
        {"max_batch": -1},
        {"grace": -1},
        {"max_wait_ms": -1},
        {"nope": 1},
        {"max_in_flight": limits.MAX_INPUTS - 1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Settings.model_validate({"model": ["m"], "galleries": "g"} | wrong)


def test_the_limits_are_those_of_the_parts_behind() -> None:
    assert limits.MAX_K == gallery_item.MAX_K
    assert limits.MAX_BYTES_IN_FLIGHT >= limits.MAX_MESSAGE_BYTES
    assert limits.MAX_HITS >= limits.MAX_K
    assert limits.MAX_MESSAGE_BYTES > preprocess.MAX_BYTES + gallery_metadata.MAX_METADATA_BYTES


def _until(condition: Any, patience: float = 10.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _stop(running: Any, grace: float) -> None:
    asyncio.run_coroutine_threadsafe(running.stop(grace), running.loop).result(20)
