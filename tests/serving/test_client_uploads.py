"""Uploads larger than one call: a few calls at once, in bounded memory, in order, ended by an error."""

import asyncio
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import grpc
import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.client.async_client import AsyncClient
from serving.client.client import Client, Item
from serving.client.splitting import IN_FLIGHT, pieces_of
from serving.errors import BadImage, Conflict, Unavailable
from serving.rpc.limits import MAX_INPUTS
from tests.serving.rpc_fakes import vector_for
from tests.serving.scripts import scripted

UNIT = vector_for(b"x")


def stored(request: gallery_pb.UpsertItemsRequest) -> gallery_pb.UpsertItemsResponse:
    """Gives each item the number in its key as its version."""
    return gallery_pb.UpsertItemsResponse(
        stored=len(request.items), versions=[int(item.key) for item in request.items]
    )


def embedded(request: retrieval_pb.EmbedRequest) -> retrieval_pb.EmbedResponse:
    """Gives each image its length as its vector."""
    vectors = [np.array([len(image)], "<f4").tobytes() for image in request.images]
    return retrieval_pb.EmbedResponse(results=[retrieval_pb.EmbedResult(vector=each) for each in vectors])


def items(number: int) -> Iterator[Item]:
    return (Item(str(i), vector=UNIT) for i in range(number))


class Counter:
    """Counts how many answers are being made at once."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.now, self.most, self.lock = answer, 0, 0, threading.Lock()

    def __call__(self, request: Any) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self.lock:
            self.now -= 1
        return self.answer(request)


def test_an_upload_is_not_bound_by_round_trips_and_keeps_its_order() -> None:
    counter = Counter(stored)
    with scripted({"UpsertItems": counter}) as script, Client(script.address) as client:
        assert client.upsert("birds", items(1_500)) == list(range(1_500))
    assert counter.most == IN_FLIGHT
    assert max(len(each.items) for each in script.requests) * IN_FLIGHT <= MAX_INPUTS


def test_what_fits_one_call_is_one_call_which_stores_all_or_none() -> None:
    with scripted({"UpsertItems": stored}) as script, Client(script.address) as client:
        client.upsert("birds", items(MAX_INPUTS))
        assert len(script.requests) == 1
        client.upsert("birds", items(MAX_INPUTS + 1))
        assert len(script.requests) == 1 + 5


def test_images_are_embedded_in_their_order_several_calls_at_a_time() -> None:
    counter = Counter(embedded)
    with scripted({"Embed": counter}) as script, Client(script.address) as client:
        vectors = client.embed(b"x" * (i % 97 + 1) for i in range(1_000))
    assert [int(each) for each in vectors[:, 0]] == [i % 97 + 1 for i in range(1_000)]
    assert counter.most == IN_FLIGHT


def test_uploads_whose_sources_need_the_threads_of_the_loop_do_not_take_them() -> None:
    """As files that are read through `asyncio.to_thread`."""

    async def read() -> AsyncIterator[Item]:
        for each in items(200):
            await asyncio.to_thread(time.sleep, 0)
            yield each

    async def live(address: str) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        async with AsyncClient(address) as client:
            uploads = asyncio.gather(*(client.upsert("birds", read()) for _ in range(4)))
            assert await asyncio.wait_for(uploads, 15) == [list(range(200))] * 4

    with scripted({"UpsertItems": stored}) as script:
        asyncio.run(live(script.address))
    until = time.monotonic() + 5
    while [each for each in threading.enumerate() if each.name.startswith("crossbatch-client")]:
        assert time.monotonic() < until, "a thread of a plan has outlived it"
        time.sleep(0.01)


def test_memory_stays_bounded_while_a_large_upload_is_sent() -> None:
    size, number = 2**20, 120
    made = count()

    def photos() -> Iterator[Item]:
        for i in range(number):
            next(made)
            yield Item(str(i), image=bytes(size))

    with scripted({"UpsertItems": stored}) as script, Client(script.address) as client:
        # The server of this test keeps no requests.
        script.requests = type("Nowhere", (), {"append": lambda *_: None})()
        tracemalloc.start()
        client.upsert("birds", photos())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert next(made) == number
    assert peak < 70 * size, f"{peak / size:.0f} of {number} MiB were held at once"


def test_no_more_is_taken_than_there_is_room_for() -> None:
    gate, taken = threading.Event(), count()

    def slowly(request: Any) -> Any:
        assert gate.wait(10)
        return stored(request)

    def some() -> Iterator[Item]:
        for each in items(5_000):
            next(taken)
            yield each

    with scripted({"UpsertItems": slowly}) as script, Client(script.address) as client:
        thread = threading.Thread(target=lambda: client.upsert("birds", some()))
        thread.start()
        deadline = time.monotonic() + 5
        while len(script.requests) < IN_FLIGHT and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(script.requests) == IN_FLIGHT
        assert next(taken) <= (IN_FLIGHT + 1) * MAX_INPUTS // IN_FLIGHT + MAX_INPUTS
        gate.set()
        thread.join(10)
        assert not thread.is_alive()


def test_an_error_stops_an_upload_and_tells_how_far_it_got() -> None:
    def choosy(request: gallery_pb.UpsertItemsRequest) -> Any:
        if request.items[0].key == "640":
            raise Conflict("it has another version", key="650")
        if request.items[0].key == "576":
            time.sleep(0.1)  # it ends after the one that fails
        return stored(request)

    taken = count()
    with scripted({"UpsertItems": choosy}) as script, Client(script.address) as client:
        with pytest.raises(Conflict) as failure:
            client.upsert("birds", (item for item in items(10_000) if next(taken) >= 0))
        assert failure.value.stored == 640
        assert (failure.value.key, next(taken) < 1_500) == ("650", True)
        assert len(script.requests) < 20


def test_an_error_of_the_source_comes_after_what_was_on_its_way() -> None:
    def breaking() -> Iterator[Item]:
        yield from items(700)
        yield Item("broken", image="/no/such/file")

    with scripted({"UpsertItems": stored}) as script, Client(script.address) as client:
        with pytest.raises(BadImage, match="cannot be read") as failure:
            client.upsert("birds", breaking())
        assert failure.value.stored == sum(len(each.items) for each in script.requests) == 640

        def failing() -> Iterator[Item]:
            yield from items(700)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            client.upsert("birds", failing())


def test_of_two_items_with_one_key_the_later_one_wins() -> None:
    finished: list[str] = []

    def slow_at_first(request: gallery_pb.UpsertItemsRequest) -> Any:
        time.sleep(0.15 if request.items[0].key == "0" else 0)
        finished.extend(item.label for item in request.items if item.key == "7")
        return stored(request)

    twice = [*items(300)]
    twice[7] = Item("7", vector=UNIT, label="earlier")
    twice[100] = Item("7", vector=UNIT, label="later")
    with scripted({"UpsertItems": slow_at_first}) as script, Client(script.address) as client:
        assert len(client.upsert("birds", twice)) == 300
    assert finished == ["earlier", "later"]


def test_within_an_upload_only_calls_without_condition_are_made_again() -> None:
    lost = {"64", "128"}

    def losing(request: gallery_pb.UpsertItemsRequest) -> Any:
        if request.items[0].key in lost:
            lost.discard(request.items[0].key)
            return grpc.StatusCode.UNAVAILABLE
        return stored(request)

    with scripted({"UpsertItems": losing}) as script, Client(script.address) as client:
        assert client.upsert("birds", items(400)) == list(range(400))
        lost.add("128")
        conditional = (Item(str(i), vector=UNIT, expected_version=0) for i in range(400))
        with pytest.raises(Unavailable) as failure:
            client.upsert("birds", conditional)
        assert failure.value.stored == 128
        assert not lost


def test_pieces_are_as_small_as_all_on_their_way_may_be_together() -> None:
    sizes = [len(piece.inputs) for piece in pieces_of(iter(range(1_000)), lambda _: 1, 256)]
    assert sum(sizes) == 1_000
    assert max(sizes) == 64
    places = [piece.place for piece in pieces_of(iter(range(1_000)), lambda _: 1, 256)]
    assert places == [sum(sizes[:i]) for i in range(len(sizes))]
    (only,) = pieces_of(iter(range(256)), lambda _: 1, 256)
    assert (len(only.inputs), only.last) == (256, True)
    assert [piece.inputs for piece in pieces_of(iter("abc"), lambda _: 2**26, 256)] == [["a"], ["b"], ["c"]]
    assert list(pieces_of(iter(()), lambda _: 1, 256)) == []
