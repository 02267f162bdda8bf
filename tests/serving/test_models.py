"""The models that are served: found by name, loaded anew all or none, gone when nobody holds them."""

import gc
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from serving.engine import repository
from serving.engine.instances import InstanceLimits
from serving.engine.models import ModelRegistry
from serving.engine.repository import ModelFile, ModelRepository, served_name
from serving.errors import (
    BadArtifact,
    BadSetting,
    CrossbatchError,
    Draining,
    Mismatch,
    ModelMismatch,
    NotFound,
)
from serving.observability.call import Call
from serving.settings import Settings
from tests.serving.rpc_fakes import FakeEncoder, FakeSources, FakeSpec, until
from tests.tiny_model import write_tiny_model


@contextmanager
def started(sources: Any) -> Iterator[ModelRegistry]:
    limits = InstanceLimits(instances=1, max_batch=4, capacity=100)
    models = ModelRegistry(sources, lambda _: limits)
    models.reload()
    try:
        yield models
    finally:
        models.stop()
        until(lambda: not instance_threads())


def instance_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name[-2:] == "-0"]


def encoder(letter: str, **spec: Any) -> FakeEncoder:
    return FakeEncoder(FakeSpec(**({"name": letter, "fingerprint": letter * 64} | spec)))


def embeds(models: ModelRegistry, name: str = "") -> bool:
    (outcome,) = models.get(name).embed([b"image"], Call("Test/Call"))
    return not isinstance(outcome, Exception)


class Changing(FakeSources):
    """Sources that note what is loaded and may fail or wait."""

    def __init__(self, **models: FakeEncoder) -> None:
        super().__init__(dict(models))
        self.loads: list[str] = []
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def look(self) -> list[ModelFile]:
        return [replace(each, load=partial(self._load, each)) for each in super().look()]

    def _load(self, file: ModelFile) -> Any:
        self.loads.append(file.name)
        assert self.gate.wait(10)
        if file.name in self.failing:
            raise BadArtifact(f"{file.place} is damaged")
        return file.load()


def gallery_of(letter: str, model: str = "") -> Any:
    """A gallery that only one model fits, which was called so when it was made."""

    def check_model(model: Any) -> None:
        if model.fingerprint != letter * 64:
            raise ModelMismatch(f"of {letter} and not {model.name}")

    return SimpleNamespace(check_model=check_model, meta=SimpleNamespace(model_name=model))


def test_models_are_found_by_name_by_gallery_and_the_first_one_without() -> None:
    with started(FakeSources({"a": encoder("a"), "b": encoder("b")})) as models:
        assert [each.name for each in models.all()] == ["a", "b"]
        assert models.get().name == "a"
        assert models.get("b").spec.fingerprint == "b" * 64
        with pytest.raises(NotFound, match="There is no model 'c'; served: a, b"):
            models.get("c")
        with pytest.raises(NotFound, match="'c'"), models.holding("c"):
            pass
        assert models.fitting(gallery_of("b")).name == "b"
        with pytest.raises(ModelMismatch, match="of c and not a"):
            models.fitting(gallery_of("c"))
        with pytest.raises(ModelMismatch, match="of b and not a"):
            models.fitting(gallery_of("b"), "a")


def test_two_models_of_one_name_are_refused_with_both_files_and_the_cure(tmp_path: Path) -> None:
    files = [str(write_tiny_model(tmp_path / name)) for name in ("one.onnx", "two.onnx")]
    for wrong in (files, files[:1] * 2):
        with (
            pytest.raises(Mismatch, match=r"\.onnx and .*\.onnx would both be served as tiny; .*NAME=FILE$"),
            started(repository_of(*wrong)),
        ):
            pass
    with started(repository_of(files[0], f"other={files[1]}")) as models:
        assert [each.name for each in models.all()] == ["tiny", "other"]
    with started(repository_of(tmp_path)) as models:  # of two trainings of one name, say
        assert [each.name for each in models.all()] == ["one", "two"]
        with pytest.raises(NotFound, match="'tiny' is what one and two call themselves; give one of these"):
            models.get("tiny")


def test_a_model_goes_by_the_name_that_its_galleries_tell_too() -> None:
    """However it is served: from a folder, by another name, or of lower precision."""
    models_of = {
        "a-1": encoder("x", name="a"),
        "a-2": encoder("y", name="a"),
        "": encoder("z", precision="int8"),
    }
    with started(FakeSources(models_of)) as models:
        assert models.get("z").name == "z-int8"
        for letter, served in (("x", "a-1"), ("y", "a-2")):
            assert models.fitting(gallery_of(letter), "a").name == served
            with models.holding("a", gallery_of(letter)) as held:
                assert held.name == served
        with pytest.raises(ModelMismatch, match="of z and not a"):
            models.fitting(gallery_of("z"), "a")
        assert (
            models.fitting(gallery_of("y", "before"), "before").name == "a-2"
        )  # exported by another name since


def test_a_reload_loads_what_is_new_or_changed_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    sources = Changing(a=encoder("a"), b=encoder("b"), c=encoder("c"))
    with started(sources) as models:
        kept = models.get("a")
        sources.loads.clear()
        sources.models = {"d": encoder("d"), "a": sources.models["a"], "b": encoder("b")}
        with caplog.at_level(logging.WARNING):
            change = models.reload()
        assert caplog.messages == ["calls that name no model mean d from now on, and meant a before"]
        assert (change.loaded, change.removed) == (("d", "b"), ("c",))
        assert sources.loads == ["d", "b"]
        assert [each.name for each in models.all()] == ["d", "a", "b"]
        assert models.get("a") is kept
        assert all(embeds(models, name) for name in "dab")
        again = models.reload(Mock(side_effect=Mismatch("asked, though all is as it was")))
        assert (again.loaded, again.removed) == ((), ())
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("fault", ["damaged", "same name", "cannot run", "not there", "not agreed"])
def test_a_reload_is_all_or_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Changing(a=encoder("a"), b=encoder("b"))

    def agree(before: Any, after: Any) -> None:
        assert [each.name for each in before] == ["a", "b"]
        assert [each.name for each in after] == ["n", "a", "b"]
        raise Mismatch("no")

    with started(sources) as models:
        before = models.all()
        bad = encoder("b")
        sources.models = {"n": encoder("n"), "a": encoder("a"), "b": bad}
        if fault == "damaged":
            sources.failing.add("b")
        elif fault == "same name":
            sources.models[""] = encoder("a")
        elif fault != "not agreed":
            broken, what = (bad, "encode") if fault == "cannot run" else (sources, "look")
            monkeypatch.setattr(broken, what, lambda *_, **__: 1 / 0)
        fresh, old = weakref.ref(sources.models["n"]), {served.name: served.encoder for served in before}
        with pytest.raises((CrossbatchError, ZeroDivisionError)):
            models.reload(agree)
        monkeypatch.undo()
        sources.models = old
        gc.collect()
        assert fresh() is None
        assert models.all() == before
        assert embeds(models, "a")
        assert embeds(models, "b")
        assert len(instance_threads()) == 2  # those of the models that are served


def test_one_reload_runs_at_once_and_all_who_ask_meanwhile_share_the_next() -> None:
    sources = Changing(a=encoder("a"))
    with started(sources) as models, ThreadPoolExecutor(8) as pool:
        sources.models = {"a": encoder("a")}
        sources.gate.clear()
        sources.loads.clear()
        first = pool.submit(models.reload)
        until(lambda: sources.loads == ["a"])
        old = models.get()
        assert models.is_loading
        assert embeds(models)  # meanwhile
        sources.models = {"a": sources.models["a"], "b": encoder("b")}
        others = [pool.submit(models.reload) for _ in range(5)]
        until(lambda: all(each.running() for each in others))
        sources.gate.set()
        assert first.result(10).loaded == ("a",)
        assert [each.result(10).loaded for each in others] == [("b",)] * 5
        assert sources.loads == ["a", "b"]
        assert models.get() is not old


def test_a_model_that_is_held_finishes_its_calls_and_then_its_memory_is_free() -> None:
    sources = Changing(a=encoder("a"), b=encoder("b"))
    seen = weakref.ref(sources.models["b"])
    with started(sources) as models:
        with models.holding("b"):
            with models.holding("b") as held:
                sources.models = {"a": sources.models["a"]}
                assert models.reload().removed == ("b",)
            (outcome,) = held.embed([b"image"], Call("Test/Call"))
            assert not isinstance(outcome, Exception)
            del held, outcome
        until(lambda: seen() is None)


def test_what_is_loaded_while_the_server_stops_is_served_no_more() -> None:
    sources = Changing(a=encoder("a"))
    with started(sources) as models, ThreadPoolExecutor(1) as pool:
        sources.models = {"a": encoder("a")}
        sources.gate.clear()
        loading = pool.submit(models.reload)
        until(lambda: sources.loads == ["a", "a"])
        models.stop()
        sources.gate.set()
        for late in (loading.result, models.reload):
            with pytest.raises(Draining):
                late()


def repository_of(*words: object, **settings: Any) -> ModelRepository:
    given = {"model": [str(word) for word in words], "galleries": Path("galleries")}
    return ModelRepository(Settings.model_validate(given | settings))


def test_files_folders_and_names_are_found_in_the_order_given(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a-2.onnx", "b.onnx", "a.onnx", "notes.txt", "c.onnx.part", "lr=0.1"):
        shutil.copy(model, folder / name)
    odd = folder / "lr=0.1"
    files = repository_of(f"mine={model}", folder, model, odd, f"n={odd}").look()
    places = [model, folder / "a.onnx", folder / "a-2.onnx", folder / "b.onnx", model, odd, odd]
    assert [each.name for each in files] == ["mine", "a", "a-2", "b", "", "", "n"]
    assert [each.place for each in files] == list(map(str, places))
    assert files[0].load().spec.name == "tiny"


def test_a_file_that_was_replaced_or_written_to_has_another_stamp(model: Path, tmp_path: Path) -> None:
    files = repository_of(model)
    first = files.look()[0].stamp
    assert files.look()[0].stamp == first
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = files.look()[0].stamp
    assert touched != first
    twin = tmp_path / "twin"
    shutil.copy2(model, twin)
    os.replace(twin, model)  # same size and times
    assert files.look()[0].stamp != touched


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("nowhere.onnx", NotFound, "nowhere.onnx is not there"),
        ("empty", BadSetting, "empty holds no .onnx file"),
        ("name=empty", BadSetting, "names a folder; only a file can be served by another name"),
        ("=model.onnx", BadSetting, "give FILE, FOLDER or NAME=FILE"),
        ("name=", BadSetting, "give FILE, FOLDER or NAME=FILE"),
        ("model.onnx/below", BadArtifact, "cannot be read: Not a directory"),
    ],
)
def test_words_that_stand_for_no_file_are_refused_in_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, word: str, error: type[CrossbatchError], message: str
) -> None:
    (model.parent / "empty").mkdir()
    monkeypatch.chdir(model.parent)
    with pytest.raises(error, match=message):
        repository_of(word).look()


def test_messages_to_callers_do_not_tell_where_models_lie() -> None:
    files = repository_of("/srv/secret/a.onnx", "n=/srv/secret/deep/b.onnx", "/opt/models", "/top.onnx")
    for text, told in (
        ("/srv/secret/a.onnx is damaged", "a.onnx is damaged"),
        ("/srv/secret/deep/b.onnx and here.onnx", "b.onnx and here.onnx"),
        ("/opt/models/c.onnx is damaged", "models/c.onnx is damaged"),
        ("/top.onnx", "/top.onnx"),
    ):
        assert files.hide(text) == told


@pytest.mark.parametrize(("threads", "workers", "each"), [(0, 1, 8), (0, 3, 2), (0, 9, 1), (3, 2, 3)])
def test_cores_are_shared_among_the_workers_and_never_left_to_the_runtime(
    model: Path, monkeypatch: pytest.MonkeyPatch, threads: int, workers: int, each: int
) -> None:
    """In a container the count that ONNX Runtime finds by itself fails (onnxruntime#8313)."""
    monkeypatch.setattr(repository, "usable_cores", lambda: 8)
    (file,) = repository_of(model, threads=threads, workers=workers).look()
    assert file.load().threads == each


def test_precisions_of_one_run_go_by_different_names() -> None:
    specs: list[Any] = [FakeSpec(precision=each) for each in ("fp32", "fp16", "int8")]
    assert [served_name(spec) for spec in specs] == ["fake", "fake-fp16", "fake-int8"]
