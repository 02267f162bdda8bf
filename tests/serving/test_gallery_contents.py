"""Galleries that do not fit the model or are broken: what is said of them, and what is not."""

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from protos import gallery_service_pb2 as pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving
from tests.serving.stubs import Stubs, connected, image, item, refusal_of


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
                lambda: stubs.galleries.GetItem(pb.GetItemRequest(gallery="theirs", key="x")),
                lambda: stubs.galleries.ListItems(pb.ListItemsRequest(gallery="theirs")),
                lambda: stubs.galleries.DeleteItems(pb.DeleteItemsRequest(gallery="theirs", keys=["x"])),
            ):
                message = refusal_of(call, "FAILED_PRECONDITION", reason="MODEL_MISMATCH")
                assert "fake" in message
                assert "other" in message
            assert encoder.decoded == []  # refused before anything was spent
            refusal_of(
                lambda: stubs.search("broken", image(b"x")), "FAILED_PRECONDITION", reason="BAD_ARTIFACT"
            )
            listed = stubs.galleries.ListGalleries(pb.ListGalleriesRequest()).galleries
            code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
            assert {each.name: each.problem.code for each in listed} == {
                "broken": code,
                "ours": 0,
                "theirs": code,
            }
            stubs.upsert("ours", item("x"))
            assert stubs.search("ours", image(b"x")).results[0].hits[0].key == "x"
            build = stubs.galleries.BuildIndex(pb.BuildIndexRequest(name="broken"))
            refusal_of(lambda: list(build), "FAILED_PRECONDITION", reason="BAD_ARTIFACT")
            stubs.galleries.DeleteGallery(pb.DeleteGalleryRequest(name="broken"))
            assert not (tmp_path / "broken").exists()


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
        listed = stubs.galleries.ListGalleries(pb.ListGalleriesRequest()).galleries
        assert [each.problem.code for each in listed] == [grpc.StatusCode.INTERNAL.value[0], 0]
        said = refusal_of(lambda: stubs.search("a", image(b"x")), "INTERNAL")
        assert "incident" in said
        assert "secret" not in said + str(listed)
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
                    pb.DeleteItemsRequest(gallery=name, keys=["x"])
                ),
                lambda name=name: stubs.galleries.GetItem(pb.GetItemRequest(gallery=name, key="x")),
                lambda name=name: stubs.galleries.ListItems(pb.ListItemsRequest(gallery=name)),
                lambda name=name: stubs.create(name),
                lambda name=name: stubs.galleries.GetGallery(pb.GetGalleryRequest(name=name)),
            ):
                try:
                    said.append(str(call()))
                except grpc.RpcError as error:
                    said += [str(error), str(rpc_status.from_call(error))]
        said.append(str(stubs.galleries.ListGalleries(pb.ListGalleriesRequest())))
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
