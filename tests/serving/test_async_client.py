"""The asyncio client: the same answers as the other one, many at a time, cancelled with their tasks."""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from serving.client import AsyncClient, Client, Item
from serving.client.requests import IN_FLIGHT
from serving.errors import BadImage, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.server.server import Server
from tests.serving.rpc_fakes import FakeEncoder, serving, until, vector_for
from tests.serving.scripts import scripted
from tests.serving.test_client_uploads import Counter, embedded, stored

UNIT = vector_for(b"x")


def lived(address: str, live: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine with a client, on a loop of their own."""

    async def run() -> None:
        async with AsyncClient(address, timeout=30) as client:
            await live(client)

    asyncio.run(run())


def test_it_has_every_call_of_the_other_client() -> None:
    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)


def test_the_life_of_a_gallery(running: Server, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"a")

    async def live(client: AsyncClient) -> None:
        assert await client.ready(wait=5)
        assert (await client.create("birds")).items == 0
        assert len(await client.upsert("birds", [Item("a", image=photo), Item("b", vector=UNIT)])) == 2
        vectors = await client.embed([photo, b"b"])
        np.testing.assert_array_equal(vectors, np.stack([vector_for(b"a"), vector_for(b"b")]))
        assert (await client.embed([])).shape == (0, 8)
        (hits,) = await client.search("birds", images=[b"a"], k=1)
        assert hits[0].key == (await client.get("birds", "a")).key == "a"
        assert [item.key async for item in client.items("birds")] == ["a", "b"]
        assert {item.key for item in await client.sample("birds")} == {"a", "b"}
        assert await client.fields("birds") == []
        assert (await client.values("birds", "$label")).distinct == 0
        assert [pair async for pair in client.duplicates("birds", 1.0)] == []
        assert await client.delete("birds", ["a", "nobody"]) == 1
        assert [gallery.items for gallery in await client.galleries()] == [1]
        with pytest.raises(NotFound):
            await client.search("nowhere", keys=["a"])
        with pytest.raises(InvalidArgument):
            await client.embed(b"one")  # type: ignore[arg-type]
        lost, good, bad = await client.embed(["no/such.jpg", b"good", b"bad"], on_error="return")
        assert (type(lost), type(good), type(bad)) == (BadImage, np.ndarray, BadImage)
        assert "no/such.jpg" in str(lost)
        found, missing = await client.search("birds", images=[b"good", "no/such.jpg"], on_error="return")
        assert (type(found), type(missing)) == (list, BadImage)
        with pytest.raises(BadImage, match=r"input 1: .*no/such\.jpg"):
            await client.embed([b"good", "no/such.jpg"])

    lived(running.address, live)


def test_several_loops_share_a_client_without_a_flood_of_errors(caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter(embedded)

    async def ask() -> list[int]:
        rows = await asyncio.gather(*(client.embed([b"x" * i]) for i in range(1, 9)))
        return [int(each[0, 0]) for each in rows]

    with scripted({"Embed": counter}) as script, caplog.at_level(logging.DEBUG, "asyncio"):
        client = AsyncClient(script.address)
        with ThreadPoolExecutor(4) as pool:  # each loop begins when others of its thread have ended
            for found in pool.map(lambda _: asyncio.run(ask()), range(12)):
                assert found == list(range(1, 9))
        asyncio.run(client.close())
    assert counter.most > 4
    assert [each for each in caplog.records if each.name == "asyncio" and each.levelno > logging.DEBUG] == []


def test_an_upload_may_come_from_the_loop_itself_and_keeps_its_order() -> None:
    counter = Counter(stored)

    async def items(number: int) -> AsyncIterator[Item]:
        for i in range(number):
            if i % 100 == 0:
                await asyncio.to_thread(time.sleep, 0)  # needs a thread, as reading a file does
            yield Item(str(i), vector=UNIT)

    async def live(client: AsyncClient) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        assert await client.upsert("birds", items(1_000)) == list(range(1_000))
        plain = (Item(str(i), vector=UNIT) for i in range(1_000))
        assert await client.upsert("birds", plain) == list(range(1_000))
        assert counter.most == IN_FLIGHT
        uploads = asyncio.gather(*(client.upsert("birds", items(200)) for _ in range(4)))
        assert await asyncio.wait_for(uploads, 15) == [list(range(200))] * 4

    with scripted({"UpsertItems": counter}) as script:
        lived(script.address, live)


def test_the_loop_goes_on_while_a_source_waits() -> None:
    gate = threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"x"
        assert gate.wait(10)
        yield b"xx"

    async def live(client: AsyncClient) -> None:
        embedding = asyncio.create_task(client.embed(slow()))
        await asyncio.sleep(0.05)
        gate.set()
        assert len(await embedding) == 2

    with scripted({"Embed": embedded}) as script:
        lived(script.address, live)


def test_a_cancelled_call_is_dropped_by_the_server(tmp_path: Path) -> None:
    encoder = FakeEncoder()

    async def live(client: AsyncClient) -> None:
        encoder.encode_gate.clear()
        first = asyncio.create_task(client.embed([b"first"]))
        await asyncio.to_thread(until, lambda: encoder.encoding, 30)
        unwanted = asyncio.create_task(client.embed([b"unwanted"]))
        await asyncio.sleep(0.2)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        await asyncio.sleep(0.2)  # until the server has heard of it
        encoder.encode_gate.set()
        await first
        await client.embed([b"last"])

    with serving(encoder, GalleryDirectory(tmp_path), threads=1) as running:
        lived(running.address, live)
    assert encoder.encoded == 2


def test_cancelling_an_upload_ends_all_that_it_began() -> None:
    gate = threading.Event()

    async def endless() -> AsyncIterator[Item]:
        for i in range(500):
            yield Item(str(i), vector=UNIT)
        await asyncio.sleep(3_600)

    async def live(client: AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.upsert("birds", endless())
        assert not gate.is_set()
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) == 1

    with scripted({"UpsertItems": lambda request: gate.wait(5) and stored(request)}) as script:
        lived(script.address, live)
        gate.set()


def test_failures_are_tried_again_and_end_with_the_deadline() -> None:
    failures: list[Any] = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE]
    gate = threading.Event()

    async def live(client: AsyncClient) -> None:
        await client.embed([b"x"])
        failures.append(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable):
            await client.with_options(retries=0).embed([b"x"])
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s") as failure:
            await client.with_options(timeout=0.1, request_id="order-7").model()
        assert failure.value.request_id == "order-7"

    def embed(request: Any) -> Any:
        return failures.pop() if failures else embedded(request)

    with scripted({"Embed": embed, "GetModel": lambda _: gate.wait(5)}) as script:
        lived(script.address, live)
        assert len(script.requests) == 5
        gate.set()


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

    async def live(client: AsyncClient) -> None:
        (last,) = [each async for each in client.build_index("birds")]
        assert last.gallery is not None
        async for each in client.build_index("birds"):
            assert each.stage == "training"
            break
        # Leaving the loop leaves the iterator to the event loop, which closes it.

    with scripted({"BuildIndex": lambda request: works.pop()()}) as script:
        lived(script.address, live)
        assert broken_off.wait(5)


def test_closing_a_client_ends_the_calls_that_are_on_their_way() -> None:
    arrived, gate = threading.Event(), threading.Event()

    def slowly(request: Any) -> Any:
        arrived.set()
        return gate.wait(5) and embedded(request)

    async def live(client: AsyncClient) -> None:
        waiting = asyncio.create_task(client.embed([b"x"]))
        await asyncio.to_thread(arrived.wait, 5)
        await client.close()
        for call in (waiting, client.model()):
            with pytest.raises(InvalidArgument, match="has been closed"):
                await call
        assert not gate.is_set()

    with scripted({"Embed": slowly}) as script:
        lived(script.address, live)
        gate.set()
