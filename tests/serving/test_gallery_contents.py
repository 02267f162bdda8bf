"""Calls about galleries and what is in them, those that do not fit or are broken included."""

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.rpc.wire import bytes_of
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving
from tests.serving.stubs import Stubs, connected, fields_of, image, item, refused


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
