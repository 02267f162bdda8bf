"""New models and galleries in a server that runs: no call fails, and none is answered by another model."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.engine import galleries as engine_galleries
from serving.engine.repository import ModelFile
from serving.errors import BadArtifact, Mismatch
from serving.gallery.directory import GalleryDirectory
from serving.gallery.item import GalleryItem
from serving.server.server import Server
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSources, FakeSpec, serving, until, vector_for
from tests.serving.stubs import Stubs, image, refusal_of


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
def a(sources: FakeSources) -> Any:
    return sources.models["a"]


@pytest.fixture
def galleries(tmp_path: Path) -> GalleryDirectory:
    """`birds` is of the model a and `next` of b; each has the picture `x` as its model embeds it."""
    galleries = GalleryDirectory(tmp_path)
    for name, model, vector in (("birds", "a", vector_for(b"x")), ("next", "b", -vector_for(b"x"))):
        gallery = galleries.create(name, model_name=model, fingerprint=model * 64, dimension=DIMENSION)
        gallery.upsert([GalleryItem(key=f"x of {model}", vector=vector)])
    return galleries


@pytest.fixture
def running(sources: FakeSources, galleries: GalleryDirectory) -> Iterator[Server]:
    with serving(sources, galleries, max_batch=4, threads=1) as running:
        yield running


def _reload(stubs: Stubs) -> Any:
    return stubs.models.ReloadModels(pb.ReloadModelsRequest(), timeout=10)


def _names(stubs: Stubs) -> list[str]:
    """Names and fingerprints of the models that are served."""
    models = stubs.models.ListModels(pb.ListModelsRequest()).models
    return [f"{model.name} {model.fingerprint[0]}" for model in models]


def test_a_call_whose_gallery_goes_to_another_model_is_embedded_again(
    running: Server, stubs: Stubs, a: FakeEncoder, sources: FakeSources, galleries: GalleryDirectory
) -> None:
    a.encode_gate.clear()
    request = retrieval_pb.SearchRequest(gallery="birds", queries=[image(b"x")], k=1)
    search = stubs.retrieval.Search.future(request, timeout=10)
    new = gallery_pb.UpsertItemsRequest(gallery="birds", items=[gallery_pb.Item(key="new", image=b"n")])
    upsert = stubs.galleries.UpsertItems.future(new, timeout=10)
    until(lambda: a.encoding and len(a.decoded) + running.models.get("a").waiting == 2)
    galleries.switch("birds", "next")
    a.encode_gate.set()

    reply = search.result()
    assert reply.model_fingerprint == "b" * 64
    (hit,) = reply.results[0].hits
    assert (hit.key, round(hit.score, 5)) == ("x of b", 1)

    assert upsert.result().stored == 1
    (stored,) = galleries.get("birds").get(["new"])
    np.testing.assert_allclose(stored.vector, -vector_for(b"n"), atol=1e-6)
    assert [each.key for each in galleries.get("next").list(limit=9)] == ["x of a"]
    assert (a.encoded, sources.models["b"].encoded) == (2, 2)


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
    refusal_of(lambda: stubs.search("birds", image(b"x")), "FAILED_PRECONDITION", reason="MODEL_MISMATCH")
    assert len(tries) == engine_galleries.TRIES


def test_models_are_loaded_anew_and_no_call_fails(
    stubs: Stubs, a: FakeEncoder, sources: FakeSources, galleries: GalleryDirectory
) -> None:
    galleries.drop("next")  # so that b may go
    with ThreadPoolExecutor(3) as pool:
        for letter in "cdefg":
            sources.models = {"new": FakeEncoder(FakeSpec("new", letter * 64)), "a": a}
            calls = [pool.submit(stubs.embed, b"1", b"2") for _ in range(50)]
            reply = _reload(stubs)
            assert _names(stubs) == [f"new {letter}", "a a"]
            assert (reply.loaded, reply.removed) == (["new"], ["b"] if letter == "c" else [])
            assert {len(call.result(10).results) for call in calls} == {2}
            assert stubs.embed(b"1").model_fingerprint == letter * 64


def test_a_reload_that_is_refused_says_why_and_changes_nothing(
    stubs: Stubs, sources: FakeSources, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (BadArtifact("/secret/m.onnx is damaged"), FileNotFoundError("/secret/m.onnx: a bug")):
        monkeypatch.setattr(sources, "look", MagicMock(side_effect=error))
        with pytest.raises(grpc.RpcError) as failure:
            _reload(stubs)
        assert "secret" not in str(failure.value.details())
        expected = "FAILED_PRECONDITION" if isinstance(error, BadArtifact) else "INTERNAL"
        assert failure.value.code().name == expected
    assert "every model stays as it was: /secret/m.onnx is damaged" in caplog.messages
    assert _names(stubs) == ["a a", "b b"]
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

    message = refusal_of(lambda: _reload(stubs), "FAILED_PRECONDITION", reason="MISMATCH")
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


@pytest.fixture
def slow(sources: FakeSources, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A third model, which is loaded when the gate opens; counts how often."""
    slow = SimpleNamespace(loads=0, gate=threading.Event())

    def load() -> Any:
        slow.loads += 1
        assert slow.gate.wait(20)
        return FakeEncoder(FakeSpec("new", "c" * 64))

    files = [*sources.look(), ModelFile("new", "new.onnx", "new", load)]
    monkeypatch.setattr(sources, "look", lambda: files)
    return slow


def test_a_reload_whose_caller_leaves_is_carried_through(stubs: Stubs, slow: SimpleNamespace) -> None:
    pending = stubs.models.ReloadModels.future(pb.ReloadModelsRequest(), timeout=10)
    until(lambda: slow.loads == 1)
    pending.cancel()
    until(lambda: "CANCELLED" in str(pending.code()))
    time.sleep(0.1)  # the server has noticed
    slow.gate.set()
    until(lambda: len(_names(stubs)) == 3)


def test_a_stop_waits_for_no_load_beyond_the_grace_however_many_asked(
    running: Server, stubs: Stubs, slow: SimpleNamespace
) -> None:
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
