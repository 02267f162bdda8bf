"""The asyncio client: the same answers as the other one, many at a time, cancelled with their tasks."""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.client import attempts
from serving.client.async_client import AsyncClient
from serving.client.client import Client, Item
from serving.client.splitting import IN_FLIGHT
from serving.errors import BadImage, DeadlineExceeded, InvalidArgument, NotFound, Overloaded, Unavailable
from serving.gallery.directory import GalleryDirectory
from tests.serving.rpc_fakes import FakeEncoder, serving, vector_for
from tests.serving.scripts import scripted
from tests.serving.test_client_uploads import Counter, embedded, stored

UNIT = vector_for(b"x")


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def address(encoder: FakeEncoder, tmp_path: Path) -> Iterator[str]:
    with serving(encoder, GalleryDirectory(tmp_path)) as running:
        yield running.address


def public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(each)
        for name, each in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_it_has_every_call_of_the_other_client_with_the_same_parameters() -> None:
    sync, asynchronous = public(Client), public(AsyncClient)
    assert set(sync) == set(asynchronous)
    for name, signature in sync.items():
        ours = asynchronous[name].parameters.values()
        assert [(each.name, each.default) for each in ours] == [
            (each.name, each.default) for each in signature.parameters.values()
        ], name


def test_the_life_of_a_gallery(address: str, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"a")

    async def live() -> None:
        async with AsyncClient(address) as client:
            assert await client.ready(wait=5)
            assert (await client.model()).name == (await client.models())[0].name == "fake"
            vectors = await client.embed([photo, b"b"])
            np.testing.assert_array_equal(vectors, np.stack([vector_for(b"a"), vector_for(b"b")]))
            assert (await client.create("birds")).items == 0
            assert len(await client.upsert("birds", [Item("a", image=photo), Item("b", vector=UNIT)])) == 2
            (hits,) = await client.search("birds", images=[b"a"], k=1)
            assert hits[0].key == "a"
            assert (await client.get("birds", "b")).key == "b"
            assert [item.key async for item in client.items("birds")] == ["a", "b"]
            assert await client.delete("birds", ["a", "nobody"]) == 1
            assert (await client.gallery("birds")).items == (await client.galleries())[0].items == 1
            with pytest.raises(NotFound):
                await client.search("nowhere", keys=["a"])
            with pytest.raises(BadImage, match="input 1"):
                await client.embed([b"good", b"bad"])
            with pytest.raises(InvalidArgument):
                await client.embed(b"one")  # type: ignore[arg-type]

    asyncio.run(live())


def test_many_calls_are_on_their_way_at_once() -> None:
    counter = Counter(embedded)

    async def live(address: str) -> None:
        async with AsyncClient(address) as client:
            rows = await asyncio.gather(*(client.embed([b"x" * i]) for i in range(1, 30)))
            assert [int(each[0, 0]) for each in rows] == list(range(1, 30))

    with scripted({"Embed": counter}) as script:
        asyncio.run(live(script.address))
    assert counter.most > 4


def test_an_upload_may_come_from_the_loop_itself_and_keeps_its_order() -> None:
    counter = Counter(stored)

    async def items(number: int) -> AsyncIterator[Item]:
        for i in range(number):
            if i % 100 == 0:
                await asyncio.sleep(0)
            yield Item(str(i), vector=UNIT)

    async def live(address: str) -> None:
        async with AsyncClient(address) as client:
            assert await client.upsert("birds", items(1_000)) == list(range(1_000))
            plain = (Item(str(i), vector=UNIT) for i in range(1_000))
            assert await client.upsert("birds", plain) == list(range(1_000))

    with scripted({"UpsertItems": counter}) as script:
        asyncio.run(live(script.address))
    assert counter.most == IN_FLIGHT


def test_the_loop_goes_on_while_a_source_waits() -> None:
    def slow() -> Iterator[bytes]:
        yield b"x"
        time.sleep(0.2)
        yield b"xx"

    async def live(address: str) -> int:
        async with AsyncClient(address) as client:
            embedding = asyncio.create_task(client.embed(slow()))
            beats = 0
            while not embedding.done():
                await asyncio.sleep(0.01)
                beats += 1
            assert len(await embedding) == 2
            return beats

    with scripted({"Embed": embedded}) as script:
        assert asyncio.run(live(script.address)) > 8


def test_a_cancelled_call_is_dropped_by_the_server(encoder: FakeEncoder, address: str) -> None:
    async def decoded(number: int) -> None:
        for _ in range(1_000):
            if len(encoder.decoded) == number:
                return
            await asyncio.sleep(0.005)

    async def live() -> None:
        async with AsyncClient(address) as client:
            encoder.encode_gate.clear()
            first = asyncio.create_task(client.embed([b"first"]))
            await decoded(1)
            await asyncio.sleep(0.05)
            unwanted = asyncio.create_task(client.embed([b"unwanted"]))
            await decoded(2)
            unwanted.cancel()
            with pytest.raises(asyncio.CancelledError):
                await unwanted
            await asyncio.sleep(0.05)
            encoder.encode_gate.set()
            await first
            await client.embed([b"last"])

    asyncio.run(live())
    assert encoder.encoded == 2


def test_cancelling_an_upload_ends_all_that_it_began() -> None:
    gate = threading.Event()

    def slowly(request: Any) -> Any:
        gate.wait(5)
        return stored(request)

    async def endless() -> AsyncIterator[Item]:
        i = 0
        while True:
            yield Item(str(i), vector=UNIT)
            i += 1
            if i == 500:
                await asyncio.sleep(3_600)

    async def live(address: str) -> None:
        async with AsyncClient(address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.upsert("birds", endless())
            assert len(asyncio.all_tasks()) == 1

    with scripted({"UpsertItems": slowly}) as script:
        began = time.monotonic()
        asyncio.run(live(script.address))
        assert time.monotonic() - began < 2
        gate.set()


def test_failures_are_tried_again_and_end_with_the_deadline() -> None:
    failures: list[Exception] = [Overloaded("full", retry_after=0.01)] * 3

    def refusing(request: Any) -> Any:
        if failures:
            raise failures.pop()
        return embedded(request)

    def late(request: Any) -> Any:
        time.sleep(0.3)
        return model_pb.GetModelResponse()

    async def live(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.embed([b"x"])
        async with AsyncClient(address, timeout=0.1) as client:
            failures.extend([Overloaded("full", retry_after=0.3)] * 9)
            with pytest.raises(Overloaded):
                await client.embed([b"x"])
            with pytest.raises(DeadlineExceeded):
                await client.model()

    with scripted({"Embed": refusing, "GetModel": late}) as script:
        asyncio.run(live(script.address))
        assert len(script.requests) == 6

    async def alone() -> None:
        client = AsyncClient("127.0.0.1:1", retries=0)
        assert not await client.ready()
        with pytest.raises(Unavailable, match="No server answers"):
            await client.model()
        await client.close()
        with pytest.raises(InvalidArgument, match="has been closed"):
            await client.model()

    asyncio.run(alone())


def test_by_default_only_the_timeout_ends_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 0.01)  # some dozens of tries

    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1", timeout=0.8) as client:
            with pytest.raises(Unavailable, match="No server answers"):
                await client.model()

    began = time.monotonic()
    asyncio.run(ask())
    assert 0.7 < time.monotonic() - began < 5


def test_several_loops_and_threads_share_a_client_without_a_flood_of_errors(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = AsyncClient(address)
    errors: list[BaseException] = []

    async def ask() -> None:
        for _ in range(10):
            rows = await asyncio.gather(*(client.embed([b"%d" % i]) for i in range(8)))
            np.testing.assert_array_equal(np.concatenate(rows), [vector_for(b"%d" % i) for i in range(8)])

    def work() -> None:
        try:
            asyncio.run(ask())
        except BaseException as error:
            errors.append(error)

    with caplog.at_level(logging.DEBUG, "asyncio"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        work()  # a loop that begins when the others have ended
    asyncio.run(client.close())
    assert errors == []
    assert [each for each in caplog.records if each.name == "asyncio" and each.levelno > logging.DEBUG] == []


def test_progress_of_an_index_comes_as_it_is_made_and_leaving_it_breaks_it_off() -> None:
    broken_off = threading.Event()

    def endless() -> Any:
        try:
            while True:
                yield gallery_pb.BuildIndexResponse(stage="training")
        finally:
            broken_off.set()

    built = gallery_pb.BuildIndexResponse(gallery=gallery_pb.Gallery(name="birds"))
    works: list[Any] = [endless, lambda: iter([built])]

    async def live(address: str) -> None:
        async with AsyncClient(address) as client:
            (last,) = [each async for each in client.build_index("birds")]
            assert last.gallery is not None
            async for each in client.build_index("birds"):
                assert each.stage == "training"
                break
        # Leaving the loop leaves the iterator to the event loop, which closes it.

    with scripted({"BuildIndex": lambda request: works.pop()()}) as script:
        asyncio.run(live(script.address))
        assert broken_off.wait(5)


def test_an_empty_reply_is_an_answer_too() -> None:
    async def live(address: str) -> None:
        async with AsyncClient(address) as client:
            assert await client.search("birds", images=[]) == []
            assert await client.upsert("birds", []) == []

    with scripted({"Search": lambda request: retrieval_pb.SearchResponse()}) as script:
        asyncio.run(live(script.address))
        assert script.requests == []


def test_closing_a_client_ends_the_calls_that_are_on_their_way() -> None:
    arrived, gate = threading.Event(), threading.Event()

    def slowly(request: Any) -> Any:
        arrived.set()
        gate.wait(5)
        return embedded(request)

    async def live(address: str) -> None:
        client = AsyncClient(address)
        waiting = asyncio.create_task(client.embed([b"x"]))
        await asyncio.to_thread(arrived.wait, 5)
        await client.close()
        with pytest.raises(InvalidArgument, match="has been closed"):
            await waiting

    with scripted({"Embed": slowly}) as script:
        began = time.monotonic()
        asyncio.run(live(script.address))
        assert time.monotonic() - began < 3
        gate.set()
