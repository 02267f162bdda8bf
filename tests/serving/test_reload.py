"""New models and galleries in a server that runs: no call fails, and none is answered by another model."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.engine import galleries as engine_galleries
from serving.engine.repository import ModelFile
from serving.errors import BadArtifact, BadSetting, CrossbatchError, Mismatch, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.item import GalleryItem
from serving.server.server import Server
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSources, FakeSpec, serving, until, vector_for
from tests.serving.stubs import Stubs, connected, image, refused


@dataclass
class Turned(FakeEncoder):
    """Another model: its vectors point the other way."""

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        return -super().encode(images)


@pytest.fixture
def sources() -> FakeSources:
    models = {"a": FakeEncoder(FakeSpec("a", "a" * 64)), "b": Turned(FakeSpec("b", "b" * 64, "b" * 64))}
    return FakeSources(dict(models))


@pytest.fixture
def a(sources: FakeSources) -> FakeEncoder:
    encoder: FakeEncoder = sources.models["a"]
    return encoder


@pytest.fixture
def galleries(tmp_path: Path) -> GalleryDirectory:
    """`birds` is of the model a and `next` of b; each has the picture `x` as its model embeds it."""
    galleries = GalleryDirectory(tmp_path)
    for name, model, vector in (("birds", "a", vector_for(b"x")), ("next", "b", -vector_for(b"x"))):
        gallery = galleries.create(
            name, model_name=model, fingerprint=model * 64, dimension=DIMENSION, thumbnail_side=0
        )
        gallery.upsert([GalleryItem(key=f"x of {model}", vector=vector)])
    return galleries


@pytest.fixture
def running(sources: FakeSources, galleries: GalleryDirectory) -> Iterator[Server]:
    with serving(sources, galleries, max_batch=4, threads=1) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


def _reload(stubs: Stubs) -> pb.ReloadModelsResponse:
    reply: pb.ReloadModelsResponse = stubs.models.ReloadModels(pb.ReloadModelsRequest(), timeout=10)
    return reply


def test_a_search_whose_gallery_goes_to_another_model_is_embedded_again(
    stubs: Stubs, a: FakeEncoder, sources: FakeSources, galleries: GalleryDirectory
) -> None:
    a.encode_gate.clear()
    request = retrieval_pb.SearchRequest(gallery="birds", queries=[image(b"x")], k=1)
    search = stubs.retrieval.Search.future(request, timeout=10)
    until(lambda: a.decoded == [b"x"])
    galleries.switch("birds", "next")
    a.encode_gate.set()

    reply = search.result()

    assert reply.model_fingerprint == "b" * 64
    (hit,) = reply.results[0].hits
    assert (hit.key, round(hit.score, 5)) == ("x of b", 1)
    assert (a.encoded, sources.models["b"].encoded) == (1, 1)


def test_an_upsert_whose_gallery_goes_to_another_model_is_embedded_again(
    stubs: Stubs, a: FakeEncoder, galleries: GalleryDirectory
) -> None:
    a.encode_gate.clear()
    request = gallery_pb.UpsertItemsRequest(gallery="birds", items=[gallery_pb.Item(key="new", image=b"n")])
    upsert = stubs.galleries.UpsertItems.future(request, timeout=10)
    until(lambda: a.decoded == [b"n"])
    galleries.switch("birds", "next")
    a.encode_gate.set()

    assert upsert.result().stored == 1

    (stored,) = galleries.get("birds").get(["new"])
    np.testing.assert_allclose(stored.vector, -vector_for(b"n"), atol=1e-6)
    assert [each.key for each in galleries.get("next").list(limit=9)] == ["x of a"]


def test_a_gallery_that_goes_to_another_model_again_and_again_is_given_up(
    stubs: Stubs, sources: FakeSources, galleries: GalleryDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = {"a": lambda: galleries.switch("birds", "next"), "b": lambda: galleries.rollback("birds")}
    tries = []
    for name, move in moves.items():
        encode = sources.models[name].encode

        def moving(images: Any, threads: int = 0, move: Any = move, encode: Any = encode) -> Any:
            move()
            tries.append(1)
            return encode(images)

        monkeypatch.setattr(sources.models[name], "encode", moving)
    with pytest.raises(grpc.RpcError) as failure:
        stubs.search("birds", image(b"x"))
    refused("FAILED_PRECONDITION", failure, "MODEL_MISMATCH")
    assert len(tries) == engine_galleries.TRIES


def test_a_call_that_is_on_its_way_is_finished_by_the_model_it_began_with(
    stubs: Stubs, a: FakeEncoder, sources: FakeSources
) -> None:
    a.encode_gate.clear()
    request = retrieval_pb.SearchRequest(gallery="birds", queries=[image(b"x")], k=1)
    search = stubs.retrieval.Search.future(request, timeout=10)
    until(lambda: a.decoded == [b"x"])
    quantized = Turned(FakeSpec("a", "c" * 64, "a" * 64, precision="int8"))
    sources.models = {"a": quantized, "b": sources.models["b"]}
    assert list(_reload(stubs).loaded) == ["a"]
    a.encode_gate.set()
    assert search.result().model_fingerprint == "a" * 64
    assert stubs.search("birds", image(b"x")).model_fingerprint == "c" * 64


def test_models_are_loaded_anew_and_no_call_fails(
    running: Server, stubs: Stubs, a: FakeEncoder, sources: FakeSources, galleries: GalleryDirectory
) -> None:
    galleries.drop("next")  # so that b may go
    done = threading.Event()
    seen: list[str] = []

    def ask() -> None:
        with connected(running.address) as mine:
            while not done.is_set():
                seen.append(mine.embed(b"1", b"2").model_fingerprint)

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for letter in "cdefg":
                sources.models = {"new": FakeEncoder(FakeSpec("new", letter * 64)), "a": a}
                reply = _reload(stubs)
                assert [(each.name, each.fingerprint[0]) for each in reply.models] == [
                    ("new", letter),
                    ("a", "a"),
                ]
                assert list(reply.loaded) == ["new"]
                assert list(reply.removed) == (["b"] if letter == "c" else [])
                before = len(seen)
                until(lambda before=before: len(seen) > before + 3)  # type: ignore[misc]
        finally:
            done.set()
        assert [each.result(10) for each in asking] == [None] * 3
    assert {letter * 64 for letter in "cdefg"} <= set(seen)
    assert stubs.models.GetModel(pb.GetModelRequest(name="new")).model.fingerprint == "g" * 64


def test_a_reload_that_is_refused_says_why_and_changes_nothing(
    stubs: Stubs,
    sources: FakeSources,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources.models = {**sources.models, "": FakeEncoder(FakeSpec("a", "c" * 64))}
    with pytest.raises(grpc.RpcError) as failure:
        _reload(stubs)
    message = refused("FAILED_PRECONDITION", failure, "MISMATCH")
    assert "a.onnx and a.onnx would both be served as a" in message

    for error in (
        BadArtifact("/secret/m.onnx is damaged"),
        NotFound("/secret/m.onnx is not there"),
        BadSetting("empty"),
        FileNotFoundError("a bug"),
    ):

        def look(error: Exception = error) -> list[object]:
            raise error

        monkeypatch.setattr(sources, "look", look)
        with pytest.raises(grpc.RpcError) as failure:
            _reload(stubs)
        assert "secret" not in str(failure.value.details())
        assert failure.value.code().name == (
            "FAILED_PRECONDITION" if isinstance(error, CrossbatchError) else "INTERNAL"
        )
    assert "every model stays as it was: /secret/m.onnx is damaged" in caplog.messages
    reply = stubs.models.ListModels(pb.ListModelsRequest())
    assert [(model.name, model.fingerprint[0]) for model in reply.models] == [("a", "a"), ("b", "b")]
    stubs.embed(b"x")


def test_a_reload_that_would_leave_a_gallery_without_a_model_is_refused(
    running: Server, stubs: Stubs, sources: FakeSources, galleries: GalleryDirectory, tmp_path: Path
) -> None:
    galleries.create("strange", model_name="z", fingerprint="f" * 64, dimension=DIMENSION)  # as it was before
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "gallery.sqlite").write_bytes(b"nothing")
    b = sources.models["b"]
    retrained = FakeEncoder(FakeSpec("a", "c" * 64, "c" * 64))
    sources.models = {"a": retrained, "b": b}  # in the place of the old file

    with pytest.raises(grpc.RpcError) as failure:
        _reload(stubs)
    message = refused("FAILED_PRECONDITION", failure, "MISMATCH")
    assert "no model would be served that fits birds (of the model a);" in message
    assert "load the new model beside the old one under another name" in message
    with pytest.raises(Mismatch, match="fits birds"):  # as for SIGHUP
        running.reload()
    assert stubs.search("birds", image(b"x")).model_fingerprint == "a" * 64

    sources.models = {"a": FakeEncoder(), "new": retrained, "b": b}
    assert list(_reload(stubs).loaded) == ["a", "new"]
    galleries.create("birds-new", model_name="a", fingerprint="c" * 64, dimension=DIMENSION)
    galleries.switch("birds", "birds-new")
    galleries.drop("birds-new")
    sources.models = {"new": retrained, "b": b}
    assert list(_reload(stubs).removed) == ["a"]
    assert stubs.search("birds", image(b"x")).model_fingerprint == "c" * 64


def test_a_reload_looks_at_the_galleries_again(
    stubs: Stubs, galleries: GalleryDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "gallery.sqlite").write_bytes(b"nothing")
    with caplog.at_level(logging.INFO):
        _reload(stubs)
    assert [record.gallery for record in caplog.records if "cannot be used" in record.message] == ["broken"]  # type: ignore[attr-defined]
    other = GalleryDirectory(tmp_path)  # as another process
    other.create("later", model_name="a", fingerprint="a" * 64, dimension=DIMENSION)
    assert list(stubs.search("later", image(b"x")).results[0].hits) == []


class Slow:
    """Sources whose models are loaded when the gate opens."""

    def __init__(self, sources: FakeSources, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.gate = threading.Event()
        files = [*sources.look(), ModelFile("new", "new.onnx", "new", self._load)]
        monkeypatch.setattr(sources, "look", lambda: files)

    def _load(self) -> Any:
        self.loads += 1
        assert self.gate.wait(20)
        return FakeEncoder(FakeSpec("new", "c" * 64))


def test_a_reload_whose_caller_leaves_is_carried_through(
    stubs: Stubs, sources: FakeSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(sources, monkeypatch)
    pending = stubs.models.ReloadModels.future(pb.ReloadModelsRequest(), timeout=10)
    until(lambda: slow.loads == 1)
    pending.cancel()
    until(lambda: "CANCELLED" in str(pending.code()))
    time.sleep(0.1)  # the server has noticed
    slow.gate.set()
    until(lambda: len(stubs.models.ListModels(pb.ListModelsRequest()).models) == 3)


def test_a_stop_waits_for_no_load_beyond_the_grace_however_many_asked(
    running: Server, stubs: Stubs, sources: FakeSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(sources, monkeypatch)
    calls = [stubs.models.ReloadModels.future(pb.ReloadModelsRequest(), timeout=20) for _ in range(60)]
    until(lambda: slow.loads == 1)
    time.sleep(0.2)  # they wait
    began = time.monotonic()
    try:
        running.stop(0.5)
        took = time.monotonic() - began
    finally:
        slow.gate.set()
    assert took < 3
    assert slow.loads == 1
    for call in calls:
        assert call.code().name in ("UNAVAILABLE", "CANCELLED")
