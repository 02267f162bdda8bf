"""The models that are served: found by name, loaded anew all or none, gone when nobody holds them."""

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from serving.engine import fleet as fleet_module
from serving.engine.fleet import Fleet
from serving.engine.library import Library
from serving.engine.pipeline import Bounds
from serving.engine.plan import Kind, Plan
from serving.errors import BadArtifact, CrossbatchError, Draining, Mismatch, ModelMismatch, NotFound
from serving.observability.call import Stages
from serving.observability.metrics import Metrics
from serving.settings import Settings
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSource, FakeSources, FakeSpec
from tests.tiny_model import write_tiny_model

T = TypeVar("T")


def run(
    sources: Any,
    use: Callable[[Fleet], Awaitable[T]],
    *,
    max_batch: int = 4,
    plans: Mapping[Kind, Plan] | None = None,
) -> T:
    """Start a fleet in a loop of its own, use it, stop it."""

    async def main() -> T:
        bounds = Bounds(max_batch=max_batch, max_wait=0.0, capacity=100)
        fleet = Fleet(sources, bounds, decode_threads=1, metrics=Metrics(), failed=lambda: None, plans=plans)
        await fleet.start()
        try:
            return await use(fleet)
        finally:
            await fleet.stop()

    return asyncio.run(asyncio.wait_for(main(), 15))


def encoder(letter: str, **spec: Any) -> FakeEncoder:
    return FakeEncoder(FakeSpec(**({"name": letter, "fingerprint": letter * 64} | spec)))


async def embeds(fleet: Fleet, name: str = "") -> bool:
    (outcome,) = await fleet.get(name).embed([b"image"], None, Stages())
    return not isinstance(outcome, Exception)


class Changing(FakeSources):
    """Sources that count what is loaded and may fail or wait."""

    def __init__(self, **models: FakeEncoder) -> None:
        super().__init__(dict(models))
        self.loads: list[str] = []
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.loading = threading.Event()

    def look(self) -> list[Any]:
        return [Watched(source, self) for source in super().look()]


class Watched:
    def __init__(self, source: FakeSource, sources: Changing) -> None:
        self.name, self.stamp, self.place = source.name, source.stamp, source.place
        self._source, self._sources = source, sources

    def load(self) -> Any:
        self._sources.loads.append(self.name)
        self._sources.loading.set()
        assert self._sources.gate.wait(10)
        if self.name in self._sources.failing:
            raise BadArtifact(f"{self.place} is damaged")
        return self._source.load()


def test_models_are_found_by_name_and_the_first_one_without() -> None:
    async def use(fleet: Fleet) -> None:
        assert [pipeline.name for pipeline in fleet.all()] == ["a", "b"]
        assert fleet.get().name == "a"
        assert fleet.get("b").spec.fingerprint == "b" * 64
        with pytest.raises(NotFound, match="There is no model 'c'; served: a, b"):
            fleet.get("c")
        with pytest.raises(NotFound, match="'c'"), fleet.holding("c"):
            pass

    run(FakeSources({"a": encoder("a"), "b": encoder("b")}), use)


def test_the_model_that_fits_a_gallery_is_found() -> None:
    class Gallery:
        def __init__(self, fingerprint: str) -> None:
            self.fingerprint = fingerprint

        def check_model(self, model: Any) -> None:
            if model.fingerprint != self.fingerprint:
                raise ModelMismatch(f"of {self.fingerprint[0]} and not {model.name}")

    async def use(fleet: Fleet) -> None:
        ours: Any = Gallery("b" * 64)
        theirs: Any = Gallery("c" * 64)
        assert fleet.fitting(ours).name == "b"
        with pytest.raises(ModelMismatch, match="of c and not a"):
            fleet.fitting(theirs)
        with pytest.raises(ModelMismatch, match="of b and not a"):
            fleet.fitting(ours, "a")

    run(FakeSources({"a": encoder("a"), "b": encoder("b")}), use)


def test_two_models_of_one_name_are_refused_with_both_files_and_the_cure(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one.onnx")
    write_tiny_model(tmp_path / "two.onnx")

    async def use(fleet: Fleet) -> None:
        raise AssertionError("started")

    files = (str(tmp_path / "one.onnx"), str(tmp_path / "two.onnx"))
    library = Library(Settings(model=files, galleries=tmp_path))
    with pytest.raises(Mismatch, match=r"one.onnx and .*two.onnx would both be served as tiny; .*NAME=FILE$"):
        run(library, use)
    words = (files[0], f"other={files[1]}")

    async def both(fleet: Fleet) -> list[str]:
        return [pipeline.name for pipeline in fleet.all()]

    assert run(Library(Settings(model=words, galleries=tmp_path)), both) == ["tiny", "other"]
    folder = (str(tmp_path),)  # of two trainings of one name, say
    assert run(Library(Settings(model=folder, galleries=tmp_path)), both) == ["one", "two"]


def test_two_models_of_one_name_are_found_before_any_is_tried() -> None:
    """To try how a model is best run takes seconds; to load it, one."""

    async def use(fleet: Fleet) -> None:
        raise AssertionError("started")

    first, second = Tried(FakeSpec(name="same")), Tried(FakeSpec(name="same"))
    sources = Changing(a=first, b=second)
    sources.models = {"": first, "same": second}
    with pytest.raises(Mismatch, match=r"same\.onnx and same\.onnx would both be served as same"):
        run(sources, use, max_batch=0)
    assert not first.tried | second.tried

    class Twice(Changing):
        def look(self) -> list[Any]:
            return [*super().look(), *super().look()]

    given = Twice(same=first)
    with pytest.raises(Mismatch, match="both be served as same"):
        run(given, use, max_batch=0)
    assert not given.loads


def test_a_reload_loads_what_is_new_or_changed_and_nothing_else() -> None:
    sources = Changing(a=encoder("a"), b=encoder("b"), c=encoder("c"))

    async def use(fleet: Fleet) -> None:
        kept = fleet.get("a")
        sources.loads.clear()
        sources.models = {"d": encoder("d"), "a": sources.models["a"], "b": encoder("b")}

        change = await fleet.reload()

        assert (change.loaded, change.removed) == (("d", "b"), ("c",))
        assert sources.loads == ["d", "b"]
        assert [pipeline.name for pipeline in fleet.all()] == ["d", "a", "b"]
        assert fleet.get("a") is kept
        assert all([await embeds(fleet, name) for name in "dab"])
        again = await fleet.reload()
        assert (again.loaded, again.removed) == ((), ())

    run(sources, use)


@dataclass
class Tried(FakeEncoder):
    """Remembers the sizes of the batches that it is warmed up with."""

    tried: set[int] = field(default_factory=set)

    def encode(self, images: Any, threads: int = 0) -> Any:
        self.tried.add(len(images))
        return np.eye(len(images), DIMENSION, dtype=np.float32)


@pytest.mark.parametrize(("side", "sizes"), [(4, {1, 24}), (8, {1, 2, 4, 8, 16, 32})])
def test_a_model_that_replaces_one_of_its_kind_takes_its_batch_size_without_a_trial(
    side: int, sizes: set[int]
) -> None:
    """A trial would take the cores from the calls."""
    sources = FakeSources({"a": encoder("a")})

    async def use(fleet: Fleet) -> None:
        fleet.get().plan = Plan(24)  # what a trial may have found
        new = Tried(FakeSpec("a", image_size=side))
        sources.models = {"a": new}
        await fleet.reload()
        assert new.tried == sizes

    run(sources, use, max_batch=0)


@pytest.mark.parametrize("other", ["", "name", "image_size", "precision", "dimension"])
def test_a_model_of_a_kind_that_others_have_tried_is_run_as_they_found(other: str) -> None:
    spec = FakeSpec("trained")
    told = {"name": "a", "image_size": 4, "precision": "fp32", "dimension": DIMENSION}
    if other:
        told[other] = "int8" if isinstance(told[other], str) else 5
    plans = {Kind(**told): Plan(24, 2, alone_on_all=False)}  # type: ignore[arg-type]
    model = Tried(spec)

    async def use(fleet: Fleet) -> None:
        (kind,) = fleet.plans()
        assert kind == Kind.of("a", spec)  # type: ignore[arg-type]
        assert fleet.plans()[kind] == fleet.get().plan
        assert (fleet.plans() == plans) is not bool(other)
        assert model.tried == ({1, 2, 4, 8, 16, 32} if other else {1, 24})
        assert await embeds(fleet)

    run(FakeSources({"a": model}), use, max_batch=0, plans=plans)


def test_one_file_that_is_named_twice_is_two_models_of_one_name() -> None:
    """Taken over as it is for both words, it would be the same model, which nothing refuses."""
    sources = Changing(**{"": encoder("a")})

    async def use(fleet: Fleet) -> None:
        look = sources.look
        sources.look = lambda: look() * 2  # type: ignore[method-assign]
        with pytest.raises(Mismatch, match="would both be served as a"):
            await fleet.reload()
        assert sources.loads == ["", ""]
        assert await embeds(fleet)
        running = [task for task in asyncio.all_tasks() if task.get_name() == "batcher"]
        assert len(running) == 1

    run(sources, use)


@pytest.mark.parametrize("fault", ["damaged", "same name", "cannot run", "not there"])
def test_a_reload_is_all_or_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Changing(a=encoder("a"), b=encoder("b"))

    async def use(fleet: Fleet) -> None:
        before = fleet.all()
        new, bad = encoder("n"), encoder("b")
        sources.models = {"n": new, "a": encoder("a"), "b": bad}
        match fault:
            case "damaged":
                sources.failing.add("b")
            case "same name":
                sources.models[""] = encoder("a")
            case "cannot run":
                monkeypatch.setattr(bad, "encode", lambda _: 1 / 0)
            case "not there":
                monkeypatch.setattr(sources, "look", lambda: 1 / 0)
        with pytest.raises((CrossbatchError, ZeroDivisionError)):
            await fleet.reload()
        assert fleet.all() == before
        assert await embeds(fleet, "a")
        assert await embeds(fleet, "b")
        running = [task for task in asyncio.all_tasks() if task.get_name() == "batcher"]
        assert len(running) == 2  # those of the models that are served

    run(sources, use)


def test_a_file_that_is_being_copied_is_refused_and_the_old_model_stays(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.onnx")
    data = path.read_bytes()

    async def use(fleet: Fleet) -> None:
        with path.open("r+b") as file:  # over the old one, half of it so far
            file.truncate(len(data) // 2)
        with pytest.raises(BadArtifact):
            await fleet.reload()
        assert [pipeline.name for pipeline in fleet.all()] == ["tiny"]
        path.write_bytes(data)
        assert (await fleet.reload()).loaded == ("tiny",)

    run(Library(Settings(model=(str(path),), galleries=tmp_path)), use)


def test_two_reloads_at_once_go_one_after_the_other() -> None:
    sources = Changing(a=encoder("a"))

    async def use(fleet: Fleet) -> None:
        sources.models = {"a": encoder("a"), "b": encoder("b")}
        sources.gate.clear()
        sources.loading.clear()
        sources.loads.clear()
        both = [asyncio.create_task(fleet.reload()) for _ in range(2)]
        await asyncio.to_thread(sources.loading.wait, 5)
        await asyncio.sleep(0.05)
        assert sources.loads == ["a"]
        sources.gate.set()
        first, second = await asyncio.gather(*both)
        assert (first.loaded, second.loaded) == (("a", "b"), ())
        assert sources.loads == ["a", "b"]

    run(sources, use)


def test_calls_are_answered_while_a_model_is_loaded() -> None:
    sources = Changing(a=encoder("a"))

    async def use(fleet: Fleet) -> None:
        sources.models = {"a": encoder("a")}
        old = fleet.get()
        sources.gate.clear()
        task = asyncio.create_task(fleet.reload())
        await asyncio.sleep(0.02)
        assert await embeds(fleet)
        assert fleet.get() is old
        sources.gate.set()
        await task
        assert fleet.get() is not old

    run(sources, use)


@pytest.mark.parametrize("way", ["replaced", "removed"])
def test_a_model_that_is_held_finishes_its_calls_and_then_its_memory_is_free(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Changing(a=encoder("a"), b=encoder("b"))
    given_back: list[object] = []
    seen = weakref.ref(sources.models["b"])

    async def use(fleet: Fleet) -> None:
        held = asyncio.Event()
        go_on = asyncio.Event()

        async def call() -> bool:
            with fleet.holding("b") as pipeline:
                held.set()
                await go_on.wait()
                (outcome,) = await pipeline.embed([b"image"], None, Stages())
            return not isinstance(outcome, Exception)

        tasks = [asyncio.create_task(call()) for _ in range(2)]
        await held.wait()
        models = {"a": sources.models["a"]}
        sources.models = models if way == "removed" else models | {"b": encoder("b")}
        change = await fleet.reload()
        assert change.removed == (("b",) if way == "removed" else ())
        await asyncio.sleep(0.02)
        assert seen() is not None
        given_back.clear()  # those after a model was loaded
        go_on.set()
        assert await asyncio.gather(*tasks) == [True, True]
        for _ in range(500):
            await asyncio.sleep(0.01)
            if given_back:
                break
        assert given_back == [None], "the model is gone, and then what it freed is given back"

    monkeypatch.setattr(fleet_module, "give_back", lambda: given_back.append(seen()))
    run(sources, use)


def test_another_model_for_calls_that_name_none_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sources = Changing(b=encoder("b"))

    async def use(fleet: Fleet) -> None:
        sources.models = {"b": sources.models["b"], "c": encoder("c")}
        await fleet.reload()
        assert caplog.messages == []
        sources.models = {"a": encoder("a"), **sources.models}
        await fleet.reload()
        assert caplog.messages == ["calls that name no model mean a from now on, and meant b before"]

    with caplog.at_level(logging.WARNING):
        run(sources, use)


def test_a_model_goes_with_the_last_of_those_who_hold_it() -> None:
    sources = Changing(a=encoder("a"))

    async def use(fleet: Fleet) -> None:
        with fleet.holding() as pipeline:
            with fleet.holding():
                sources.models = {"a": encoder("a")}
                await fleet.reload()
            await asyncio.sleep(0.05)  # enough to end it
            (outcome,) = await pipeline.embed([b"image"], None, Stages())
            assert not isinstance(outcome, Exception)

    run(sources, use)


def test_a_fleet_stops_with_models_that_are_still_held() -> None:
    sources = Changing(a=encoder("a"))

    async def use(fleet: Fleet) -> None:
        with fleet.holding():
            sources.models = {"a": encoder("a")}
            await fleet.reload()
            await fleet.stop()

    run(sources, use)
    assert not [thread for thread in threading.enumerate() if "batcher" in thread.name]


def test_a_fleet_that_stops_refuses_the_reloads_that_wait_for_their_turn() -> None:
    sources = Changing(a=encoder("a"))

    async def use(fleet: Fleet) -> None:
        sources.models = {"a": encoder("a")}
        sources.gate.clear()
        sources.loading.clear()
        running, *waiting = [asyncio.create_task(fleet.reload()) for _ in range(3)]
        await asyncio.to_thread(sources.loading.wait, 5)
        stopping = asyncio.create_task(fleet.stop())
        await asyncio.sleep(0)
        sources.gate.set()
        assert (await running).loaded == ("a",)
        for task in waiting:
            with pytest.raises(Draining):
                await task
        await stopping
        assert sources.loads == ["a", "a"]
        with pytest.raises(Draining):
            await fleet.reload()

    run(sources, use)
