"""Galleries that do not fit the model or are broken: what is said of them, and what is not."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from protos import gallery_service_pb2 as pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import MadeFor
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving
from tests.serving.stubs import Stubs, connected, image, item, refusal_of

MADE_FOR: MadeFor = {"model_name": "fake", "fingerprint": "a" * 64, "dimension": DIMENSION}


def calls(stubs: Stubs, name: str) -> list[Callable[[], object]]:
    """Calls that need a gallery to be whole and of the model."""
    galleries = stubs.galleries
    return [
        lambda: stubs.search(name, image(b"x")),
        lambda: stubs.upsert(name, item("x")),
        lambda: galleries.GetItem(pb.GetItemRequest(gallery=name, key="x")),
        lambda: galleries.ListItems(pb.ListItemsRequest(gallery=name)),
        lambda: galleries.CountItems(pb.CountItemsRequest(gallery=name)),
        lambda: galleries.SampleItems(pb.SampleItemsRequest(gallery=name)),
        lambda: galleries.ListFields(pb.ListFieldsRequest(gallery=name)),
        lambda: galleries.ListValues(pb.ListValuesRequest(gallery=name, field="x")),
        lambda: galleries.ListDuplicates(pb.ListDuplicatesRequest(gallery=name)),
        lambda: galleries.DeleteItems(pb.DeleteItemsRequest(gallery=name, keys=["x"])),
    ]


def break_one(folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "gallery.sqlite").write_bytes(b"no database" * 100)


def test_a_gallery_of_another_model_is_refused_by_name_and_leaves_the_others_alone(
    encoder: FakeEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    galleries = GalleryDirectory(tmp_path)
    galleries.create("ours", **MADE_FOR)
    galleries.create("theirs", model_name="other", fingerprint="b" * 64, dimension=DIMENSION)
    break_one(tmp_path)
    with serving(encoder, galleries) as running, connected(running.address) as stubs:
        warned = {record.gallery for record in caplog.records if hasattr(record, "gallery")}
        assert warned == {"theirs", "broken"}
        for call in calls(stubs, "theirs"):
            message = refusal_of(call, "FAILED_PRECONDITION", reason="MODEL_MISMATCH")
            assert "fake" in message
            assert "other" in message
        assert encoder.decoded == []  # refused before anything was spent
        for call in (
            lambda: stubs.search("broken", image(b"x")),
            lambda: list(stubs.galleries.BuildIndex(pb.BuildIndexRequest(name="broken"))),
        ):
            refusal_of(call, "FAILED_PRECONDITION", reason="BAD_ARTIFACT")
        listed = stubs.galleries.ListGalleries(pb.ListGalleriesRequest()).galleries
        code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
        problems = {each.name: each.problem.code for each in listed}
        assert problems == {"broken": code, "ours": 0, "theirs": code}
        stubs.upsert("ours", item("x"))
        assert stubs.search("ours", image(b"x")).results[0].hits[0].key == "x"
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
        galleries.create(name, **MADE_FOR)
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
    assert model.provider == "cpu"
    assert json.loads(model.spec_json)["name"] == "fake"


def test_no_path_of_the_server_reaches_a_caller(encoder: FakeEncoder, tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    galleries = GalleryDirectory(folder)
    galleries.create("ours", **MADE_FOR)
    break_one(folder)
    said: list[str] = []

    def ask(*asked: Callable[[], object]) -> None:
        for call in asked:
            try:
                said.append(str(call()))
            except grpc.RpcError as error:
                said.extend([str(error), str(rpc_status.from_call(error))])

    with serving(encoder, galleries) as running, connected(running.address) as stubs:
        by_key = partial(stubs.search, "ours", retrieval_pb.Query(key="y"))
        ask(partial(stubs.galleries.ListGalleries, pb.ListGalleriesRequest()), by_key)
        for name in ("broken", "nowhere", "ours"):
            ask(*calls(stubs, name), partial(stubs.create, name))
            ask(partial(stubs.galleries.GetGallery, pb.GetGalleryRequest(name=name)))
        (folder / "ours" / "gallery.sqlite").write_bytes(b"")  # it disappears under an open gallery
        ask(partial(stubs.search, "ours", image(b"x")), by_key)
    assert [text for text in said if "secret" in text or str(tmp_path) in text] == []
    assert any("'nowhere'" in text and "the server's folder" in text and "ours" in text for text in said)
    assert any("broken" in text and "damaged" in text for text in said)
