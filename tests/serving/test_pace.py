"""Searches that the event loop answers itself: which do, and what sends them back to the threads."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos import retrieval_service_pb2 as pb
from serving.engine import pace
from serving.engine.pace import ENOUGH, PENANCE, QUICK, SLOW, Pace
from serving.gallery.at_hand import NotAtHand
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.item import Item
from serving.gallery.search.filter import Equal
from serving.rpc.filters import filter_message
from serving.rpc.wire import bytes_of
from serving.server.server import Server
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving, vector_for
from tests.serving.stubs import Stubs, connected, image, item

MODEL: dict[str, Any] = {"model_name": "fake", "fingerprint": "a" * 64, "dimension": DIMENSION}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        stubs.create("birds")
        stubs.upsert("birds", item("a", label="owl"))
        yield stubs


@pytest.fixture
def searched_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which galleries have been searched."""
    monkeypatch.setattr(pace, "QUICK", 5.0)  # whatever else this machine does
    threads: list[str] = []
    real = Gallery.search

    def noted(gallery: Gallery, *args: Any, **options: Any) -> Any:
        found = real(gallery, *args, **options)
        threads.append(threading.current_thread().name)
        return found

    monkeypatch.setattr(Gallery, "search", noted)
    return threads


def query(key: str = "a") -> pb.Query:
    return pb.Query(vector=bytes_of(vector_for(key.encode())))


def is_thread(name: str) -> bool:
    return name.startswith("gallery-read")


def warm(stubs: Stubs) -> None:
    for _ in range(ENOUGH):
        stubs.search("birds", query())


def test_a_gallery_is_quick_after_enough_quick_searches_and_long_not_after_a_slow_one_in_the_loop() -> None:
    pace = Pace()
    for _ in range(ENOUGH):
        assert not pace.is_quick("birds")
        pace.note("birds", QUICK, in_loop=False)
    assert pace.is_quick("birds")
    assert not pace.is_quick("cars")
    pace.note("birds", 2 * QUICK, in_loop=False)
    for _ in range(ENOUGH):
        assert not pace.is_quick("birds")
        pace.note("birds", 0.0, in_loop=False)
    assert pace.is_quick("birds")
    pace.note("birds", SLOW, in_loop=True)
    for _ in range(ENOUGH):
        assert not pace.is_quick("birds")
        pace.note("birds", 0.0, in_loop=True)
    assert pace.is_quick("birds")
    pace.note("birds", 2 * SLOW, in_loop=True)
    for _ in range(PENANCE + ENOUGH):
        assert not pace.is_quick("birds")
        pace.note("birds", 0.0, in_loop=False)
    assert pace.is_quick("birds")
    pace.note("birds", 2 * SLOW, in_loop=True)
    pace.note("birds", 2 * SLOW, in_loop=False)  # pays off nothing
    for _ in range(ENOUGH):
        pace.note("birds", 0.0, in_loop=False)
    assert not pace.is_quick("birds")


def test_the_pace_of_so_many_galleries_is_kept() -> None:
    pace = Pace()
    for number in range(5_000):
        pace.note(f"{number}", 0.0, in_loop=False)
    assert len(pace._quick) <= 1_024


def test_a_quick_search_needs_no_thread_and_finds_the_same(stubs: Stubs, searched_by: list[str]) -> None:
    first = stubs.search("birds", query())
    warm(stubs)
    assert all(map(is_thread, searched_by[:ENOUGH]))
    searched_by.clear()
    again = stubs.search("birds", query())
    assert not any(map(is_thread, searched_by))
    assert (again.results, again.model_fingerprint) == (first.results, first.model_fingerprint)


def test_what_may_take_longer_is_left_to_the_threads(stubs: Stubs, searched_by: list[str]) -> None:
    warm(stubs)
    searched_by.clear()
    stubs.search("birds", query(), query("b"))
    stubs.search("birds", query(), k=500)
    stubs.search("birds", query(), exclude_keys=["x"])
    stubs.search("birds", query(), filter=filter_message(Equal("$label", "owl")))
    stubs.search("birds", query(), group_by_label=True)
    stubs.search("birds", image(b"x"))
    stubs.search("birds", pb.Query(key="a"))
    assert len(searched_by) == 7
    assert all(map(is_thread, searched_by))


def test_while_other_calls_are_in_flight_searches_are_left_to_the_threads(
    running: Server, stubs: Stubs, searched_by: list[str]
) -> None:
    warm(stubs)
    searched_by.clear()
    with running._admission.admit():
        stubs.search("birds", query())
    assert all(map(is_thread, searched_by))


def test_what_another_process_wrote_is_read_in_a_thread_and_found(
    stubs: Stubs, searched_by: list[str], tmp_path: Path
) -> None:
    warm(stubs)
    searched_by.clear()
    with GalleryDirectory(tmp_path) as operator:  # as another process would
        operator.get("birds").upsert([Item("b", vector_for(b"b"))])
        assert [hit.key for hit in stubs.search("birds", query("b"), k=1).results[0].hits] == ["b"]
        assert is_thread(searched_by[-1])
        stubs.search("birds", query())
        assert not is_thread(searched_by[-1])
        operator.get("birds").rebuild()
        stubs.search("birds", query())
        assert is_thread(searched_by[-1])
        operator.drop("birds")
        operator.create("birds", **MODEL)
    assert not stubs.search("birds", query()).results[0].hits
    assert is_thread(searched_by[-1])


def test_a_slow_search_holds_up_the_event_loop_once(
    stubs: Stubs, searched_by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(stubs)
    monkeypatch.setattr(pace, "QUICK", -1.0)
    monkeypatch.setattr(pace, "SLOW", -1.0)
    stubs.search("birds", query())
    assert not is_thread(searched_by[-1])
    monkeypatch.setattr(pace, "QUICK", 5.0)
    searched_by.clear()
    warm(stubs)
    warm(stubs)
    assert len(searched_by) == 2 * ENOUGH
    assert all(map(is_thread, searched_by))


def test_a_gallery_that_somebody_else_works_on_is_not_at_hand(tmp_path: Path) -> None:
    with GalleryDirectory(tmp_path) as galleries, GalleryDirectory(tmp_path) as others:
        with pytest.raises(NotAtHand):
            galleries.at_once("birds", lambda _: None)
        gallery = others.create("birds", **MODEL)
        with pytest.raises(NotAtHand):  # it is not open here
            galleries.at_once("birds", lambda _: None)
        galleries.get("birds")
        unit = vector_for(b"a")[None]
        assert galleries.at_once("birds", lambda each: each.search(unit, 1, at_once=True)) == [[]]
        with gallery._snapshots._guard:
            began = time.monotonic()
            with pytest.raises(NotAtHand):
                gallery.search(unit, 1, at_once=True)
            assert time.monotonic() - began < 1


def test_a_call_that_finds_the_gallery_replaced_is_answered_by_the_one_that_has_the_name(
    stubs: Stubs, searched_by: list[str], tmp_path: Path
) -> None:
    stubs.create("next")
    stubs.upsert("next", item("b"))
    warm(stubs)
    with GalleryDirectory(tmp_path) as operator:
        operator.switch("birds", "next")
    assert stubs.search("birds", query()).results[0].hits[0].key == "b"
