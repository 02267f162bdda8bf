"""The calls on a gallery as a whole, over real sockets: made, removed, indexed anew, switched and back."""

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from protos import gallery_service_pb2 as pb
from serving.engine import galleries as executor
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.lock import alone
from serving.rpc.services import galleries as calls
from serving.server.server import Server
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSources, FakeSpec, serving, until
from tests.serving.stubs import Stubs, connected, image, item, refusal_of


@pytest.fixture
def galleries(tmp_path: Path) -> GalleryDirectory:
    """The folder that is served, as another process sees it."""
    return GalleryDirectory(tmp_path)


def switch(stubs: Stubs, name: str, other: str) -> Any:
    return stubs.galleries.SwitchGallery(pb.SwitchGalleryRequest(name=name, other=other)).gallery


def roll_back(stubs: Stubs, name: str) -> Any:
    return stubs.galleries.RollbackGallery(pb.RollbackGalleryRequest(name=name))


def drop(stubs: Stubs, name: str) -> None:
    stubs.galleries.DeleteGallery(pb.DeleteGalleryRequest(name=name))


def build(stubs: Stubs, name: str, timeout: float = 20, **options: Any) -> Any:
    return stubs.galleries.BuildIndex(pb.BuildIndexRequest(name=name, **options), timeout=timeout)


def names(stubs: Stubs) -> list[str]:
    return [each.name for each in stubs.galleries.ListGalleries(pb.ListGalleriesRequest()).galleries]


def found(stubs: Stubs, name: str) -> list[str]:
    return [hit.key for hit in stubs.search(name, image(b"x")).results[0].hits]


def filled(stubs: Stubs, *names: str) -> None:
    """Make galleries, each with one item of its own name."""
    for name in names:
        stubs.create(name)
        stubs.upsert(name, item(name))


class Slow:
    """In place of `Gallery.rebuild`: goes on, step by step, until it is allowed to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.finish, self.broken = threading.Event(), threading.Event()
        real = Gallery.rebuild

        def rebuild(gallery: Gallery, *args: Any, progress: Any, **options: Any) -> None:
            done = 0
            try:
                progress("train", 0, 9)
                while not self.finish.wait(0.002):
                    done += 1
                    progress("train", done, 10_000)
                real(gallery, *args, progress=progress, **options)
            except BaseException:
                self.broken.set()
                raise

        monkeypatch.setattr(Gallery, "rebuild", rebuild)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def no_builds() -> bool:
    return not [each for each in threading.enumerate() if each.name.startswith("build ")]


def test_a_gallery_that_is_deleted_is_gone_and_its_name_free(stubs: Stubs, tmp_path: Path) -> None:
    filled(stubs, "birds", "cars")
    drop(stubs, "birds")
    assert names(stubs) == ["cars"]
    assert [each.name for each in tmp_path.iterdir()] == ["cars"]
    said = refusal_of(lambda: drop(stubs, "birds"), "NOT_FOUND")
    assert "cars" in said
    assert str(tmp_path) not in said
    refusal_of(lambda: drop(stubs, "../cars"), "INVALID_ARGUMENT")
    stubs.create("birds")
    assert found(stubs, "birds") == []


def test_galleries_are_listed_page_by_page(stubs: Stubs) -> None:
    for name in "abcde":
        stubs.create(name)
    seen, request = [], pb.ListGalleriesRequest(page_size=2)
    for _ in range(3):
        reply = stubs.galleries.ListGalleries(request, timeout=10)
        seen.append("".join(each.name for each in reply.galleries))
        request.page_token = reply.next_page_token
    assert (seen, request.page_token) == (["ab", "cd", "e"], "")
    assert "a, b, c, d, e" in refusal_of(lambda: stubs.search("f", image(b"x")), "NOT_FOUND")


def test_a_gallery_out_of_bounds_is_not_made(stubs: Stubs) -> None:
    stubs.create("birds")
    for options in ({"recall": 0.0}, {"recall": float("nan")}, {"index": "No7"}, {"thumbnail_side": 1_025}):
        request = pb.CreateGalleryRequest(name="odd", **options)
        refusal_of(partial(stubs.galleries.CreateGallery, request), "INVALID_ARGUMENT")
        if "thumbnail_side" not in options:
            refusal_of(partial(list, build(stubs, "birds", **options)), "INVALID_ARGUMENT")
    refusal_of(lambda: stubs.create("../odd"), "INVALID_ARGUMENT")
    refusal_of(lambda: list(build(stubs, "nobody")), "NOT_FOUND")
    assert names(stubs) == ["birds"]


def test_what_a_gallery_tells_of_itself(stubs: Stubs, galleries: GalleryDirectory) -> None:
    filled(stubs, "birds")
    assert "birds" in refusal_of(lambda: stubs.create("birds"), "ALREADY_EXISTS")
    stubs.upsert("birds", *(item(f"{i}") for i in range(4)))
    ask = pb.GetGalleryRequest(name="birds")
    told = stubs.galleries.GetGallery(ask).gallery
    assert (told.items, told.fresh_items, told.deleted_items, told.thumbnail_side) == (5, 5, 0, 0)
    assert (told.index_type, told.recall) == ("exact", 1.0)
    galleries.get("birds").rebuild()
    stubs.galleries.DeleteItems(pb.DeleteItemsRequest(gallery="birds", keys=["3"]))
    newer = stubs.galleries.GetGallery(ask).gallery
    assert (newer.items, newer.fresh_items, newer.deleted_items) == (4, 0, 1)
    assert newer.generation == told.generation + 1


def test_a_gallery_is_made_for_the_model_that_was_named(tmp_path: Path) -> None:
    other = FakeEncoder(FakeSpec(name="other", fingerprint="b" * 64, fp32_fingerprint="b" * 64))
    models = FakeSources({"first": FakeEncoder(), "second": other})
    with serving(models, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        make = stubs.galleries.CreateGallery
        assert make(pb.CreateGalleryRequest(name="a")).gallery.model_fingerprint == "a" * 64
        made = make(pb.CreateGalleryRequest(name="b", model="second")).gallery
        assert (made.model_fingerprint, made.HasField("problem")) == ("b" * 64, False)
        third = pb.CreateGalleryRequest(name="c", model="third")
        assert "first, second" in refusal_of(lambda: make(third), "NOT_FOUND")
        GalleryDirectory(tmp_path).create("d", model_name="x", fingerprint="c" * 64, dimension=DIMENSION)
        listed = stubs.galleries.ListGalleries(pb.ListGalleriesRequest()).galleries
        assert {each.name: each.HasField("problem") for each in listed} == {"a": False, "b": False, "d": True}
        stubs.upsert("b", item("x", image=b"x"))
        assert found(stubs, "b") == ["x"]


def test_an_index_is_made_anew_and_the_last_message_has_the_gallery(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", *[item(f"{i}") for i in range(200)])
    stubs.galleries.DeleteItems(pb.DeleteItemsRequest(gallery="birds", keys=["3"]))
    *progress, last = build(stubs, "birds", index="HNSW16,SQ8", recall=0.5)
    assert all(each.stage and not each.HasField("gallery") for each in progress)
    assert (last.stage, last.gallery.index_type[:4], last.gallery.generation) == ("", "HNSW", 1)
    assert (last.gallery.items, last.gallery.fresh_items, last.gallery.deleted_items) == (199, 0, 0)
    *_, last = build(stubs, "birds")  # what was wanted is wanted still
    assert (last.gallery.index_type[:4], last.gallery.generation) == ("HNSW", 2)


@pytest.mark.parametrize("end", ["cancelled", "late", "gone"])
def test_a_rebuild_that_nobody_waits_for_is_broken_off_and_leaves_the_index(
    running: Server, stubs: Stubs, slow: Slow, galleries: GalleryDirectory, end: str
) -> None:
    filled(stubs, "birds")
    before = galleries.get("birds").info()
    if end == "gone":
        with connected(running.address) as other:
            next(build(other, "birds"))
    else:
        stream = build(stubs, "birds", timeout=0.4 if end == "late" else 20)
        next(stream)
        if end == "cancelled":
            stream.cancel()
        with pytest.raises(grpc.RpcError) as failure:
            list(stream)
        assert failure.value.code().name == {"late": "DEADLINE_EXCEEDED"}.get(end, "CANCELLED")
    assert slow.broken.wait(5)
    assert galleries.get("birds").info() == before
    until(no_builds)
    slow.finish.set()
    *_, last = build(stubs, "birds")  # and the next one is let in
    assert last.gallery.generation == before.generation + 1


def test_a_drain_ends_a_rebuild(
    running: Server, stubs: Stubs, slow: Slow, galleries: GalleryDirectory
) -> None:
    stubs.create("birds")
    stream = build(stubs, "birds")
    next(stream)
    stopping = threading.Thread(target=running.stop, args=(5,))
    stopping.start()
    refusal_of(lambda: list(stream), "UNAVAILABLE", reason="DRAINING")
    assert slow.broken.wait(5)
    stopping.join()


def test_so_many_rebuilds_run_at_once_and_none_holds_up_a_read_or_write(stubs: Stubs, slow: Slow) -> None:
    for name in "abc":
        stubs.create(name)
    streams = [build(stubs, name) for name in "ab"]
    for stream in streams:
        next(stream)
    assert len(streams) == executor.MOST_BUILDS
    refusal_of(lambda: list(build(stubs, "c")), "RESOURCE_EXHAUSTED", reason="OVERLOADED")
    stubs.upsert("a", item("x"))
    assert found(stubs, "a") == ["x"]
    switch(stubs, "d", "c")
    slow.finish.set()
    for stream in streams:
        assert list(stream)[-1].gallery.generation == 1


def test_a_rebuild_for_which_there_is_no_thread_takes_no_turn(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.create("a")
    with monkeypatch.context() as full:
        full.setattr(executor, "in_daemon", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(executor.MOST_BUILDS):
            refusal_of(lambda: list(build(stubs, "a")), "INTERNAL")
    assert list(build(stubs, "a"))[-1].gallery.generation == 1


def test_a_rebuild_that_waits_for_another_says_so_and_can_be_given_up(stubs: Stubs, tmp_path: Path) -> None:
    stubs.create("birds")
    with alone(tmp_path / "birds", 1):
        stream = build(stubs, "birds")
        assert next(stream).stage == "wait"
        stream.cancel()
        with pytest.raises(grpc.RpcError) as failure:
            list(build(stubs, "birds", timeout=0.3))
        assert failure.value.code().name == "DEADLINE_EXCEEDED"
        until(no_builds)


def test_a_name_is_given_away_and_comes_back(stubs: Stubs) -> None:
    filled(stubs, "birds", "next")
    assert switch(stubs, "birds", "next").name == "birds"
    assert (found(stubs, "birds"), found(stubs, "next")) == (["next"], ["birds"])
    # A second time would undo it.
    refusal_of(lambda: switch(stubs, "birds", "next"), "ALREADY_EXISTS")
    undone = roll_back(stubs, "birds")
    assert (undone.gallery.name, undone.gallery.items, undone.other) == ("birds", 1, "next")
    assert (found(stubs, "birds"), found(stubs, "next")) == (["birds"], ["next"])
    refusal_of(lambda: roll_back(stubs, "birds"), "NOT_FOUND")
    refusal_of(lambda: switch(stubs, "../up", "birds"), "INVALID_ARGUMENT")


def test_a_switch_that_waits_for_a_rebuild_keeps_nobody_waiting_and_gives_up_in_time(
    stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "PATIENCE", 0.5)
    filled(stubs, "birds", "next")
    with alone(tmp_path / "birds", 1), alone(tmp_path / "next", 1):
        request = pb.SwitchGalleryRequest(name="birds", other="next")
        waiting = [stubs.galleries.SwitchGallery.future(request, timeout=10) for _ in range(4)]
        stubs.upsert("birds", item("a"))
        assert "a" in found(stubs, "birds")
        assert not any(call.done() for call in waiting)
        for call in waiting:
            said = refusal_of(call.result, "RESOURCE_EXHAUSTED", reason="OVERLOADED")
            assert str(tmp_path) not in said
