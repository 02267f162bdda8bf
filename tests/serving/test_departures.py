"""Clients that do not read their replies: each call has its time, and only what is stuck is ended."""

import asyncio
import gc
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import gallery_service_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.rpc import admission, departures
from serving.rpc.fuse import Fuse
from serving.rpc.resets import hang_up
from serving.server.server import Server
from tests.serving.boundary_fakes import METHOD, Behind, Running, running
from tests.serving.raw_http2 import (
    ACK,
    DATA,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Raw,
    begin,
    frame,
    message,
)
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import connected, refused

LIST = "/crossbatch.v1.ModelService/ListModels"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
WHOLE, STREAMED = METHOD.format("Whole"), METHOD.format("Streamed")
NO_WINDOW = struct.pack(">HI", 4, 0)
WIDE = 2**31 - 1
WIDE_WINDOW = struct.pack(">HI", 4, WIDE)
ELSEWHERE = "127.0.0.2"  # another address than that of the stubs
SHARE = 768  # of the calls
MEGABYTE = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server, connected(server.address) as stubs:
        stubs.embed(b"x")  # the first call of a process is one that gRPC does not let go
        yield server


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of 4 MiB."""

    async def whole(behind: Behind, request: Any, context: Any) -> pb.Gallery:
        return pb.Gallery(name="x" * 4 * MEGABYTE)

    monkeypatch.setattr(Behind, "whole", whole)


def ask(raw: Raw, path: str, calls: int) -> None:
    raw.send(frame(SETTINGS, ACK, 0))
    for each in range(1, 2 * calls, 2):
        raw.send(begin(each, path), frame(DATA, END_STREAM, each, message(b"")))


def window(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def is_hung_up_on(raw: Raw, within: float = 5.0) -> bool:
    """Read to the end; false if none comes."""
    list(raw.frames(within))
    raw.socket.settimeout(0.1)
    try:
        return not raw.socket.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def holds(condition: Callable[[], Any], tries: int = 1_000) -> None:
    for _ in range(tries):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


async def another_call(it: Running) -> None:
    """Make one, since gRPC lets go of the newest only then, and of the first of a process never."""
    with pytest.raises(grpc.aio.AioRpcError):
        await it.channel.unary_unary("/crossbatch.v1.TestService/None")(b"")


def test_who_reads_no_reply_has_his_share_of_the_calls_for_a_time(server: Server) -> None:
    with connected(server.address) as stubs, ExitStack() as stack:
        raws = [stack.enter_context(Raw(server.address, NO_WINDOW, ELSEWHERE)) for _ in range(2)]
        for raw in raws:
            ask(raw, LIST, 500)
        until(lambda: server._fuse.count() == SHARE)
        assert stubs.embed(b"x").results[0].vector
        assert server._admission.reply_bytes > 0
        server._boundary._departures.seconds = 0.5
        until(lambda: server._fuse.count() <= 1)
        assert stubs.embed(b"x").results[0].vector
        until(lambda: server._fuse.count() == 0)
        until(lambda: server._admission.reply_bytes == 0)
        for raw in raws:  # a call of it is answered as before
            raw.send(begin(2_001, CHECK), window(2_001, 100), frame(DATA, END_STREAM, 2_001, message(b"")))
            assert any(kind == HEADERS and flags & END_STREAM for kind, flags, stream, _ in raw.frames()
                       if stream == 2_001)  # fmt: skip


def test_memory_of_replies_that_are_not_read_comes_back(big: None) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async def scenario() -> None:
        async with running() as it:
            await another_call(it)
            it.boundary._departures.seconds = 0.3
            before, most = resident(), 0
            with Raw(it.address, NO_WINDOW) as raw:
                raw.send(frame(SETTINGS, ACK, 0))
                for turn in range(6):
                    for each in range(20 * turn, 20 * turn + 20):
                        raw.send(
                            begin(2 * each + 1, WHOLE), frame(DATA, END_STREAM, 2 * each + 1, message(b""))
                        )
                    await holds(lambda: it.admission.reply_bytes >= 70 * MEGABYTE)
                    most = max(most, resident() - before)
                    await holds(lambda: it.admission.reply_bytes <= 5 * MEGABYTE)
                await another_call(it)
                await holds(lambda: it.admission.reply_bytes == 0)
                await holds(lambda: it.boundary._fuse.count() == 0)
            # Each is there twice, once as gRPC's. Six turns of 80 MiB that stayed would be 960.
            assert 70 * MEGABYTE < most < 400 * MEGABYTE

    asyncio.run(scenario())


def test_other_calls_of_the_connection_go_on(big: None) -> None:
    async def scenario() -> None:
        async with running() as it:
            await another_call(it)
            it.boundary._departures.seconds = 0.3
            with Raw(it.address, NO_WINDOW) as raw:
                ask(raw, STREAMED, 1)
                raw.send(window(1, 1_000))
                await it.behind.started.wait()
                raw.send(begin(3, WHOLE), frame(DATA, END_STREAM, 3, message(b"")))
                await holds(lambda: it.admission.reply_bytes > 0)
                await another_call(it)
                await holds(lambda: it.admission.reply_bytes == 0)
                it.behind.go_on.set()
                frames = await asyncio.to_thread(lambda: list(raw.frames(2.0)))
                assert {stream for kind, _, stream, _ in frames if kind == RST_STREAM} == {3}
                assert sum(kind == DATA and stream == 1 for kind, _, stream, _ in frames) == 3
                assert any(kind == HEADERS and flags & END_STREAM and stream == 1
                           for kind, flags, stream, _ in frames)  # fmt: skip
            assert sorted(it.metrics.codes) == ["OK", "OK"]

    asyncio.run(scenario())


@pytest.mark.parametrize("found", [True, False])
def test_a_connection_that_takes_nothing_at_all_is_hung_up_on_and_keeps_its_places_until_then(
    big: None, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    """As it is if gRPC ever kept its calls in another way, so that they were not found."""
    if not found:
        monkeypatch.setattr(departures, "owners", lambda tasks: {})

    async def scenario() -> None:
        async with running() as it:
            await another_call(it)
            it.boundary._departures.seconds = 0.3
            with Raw(it.address, WIDE_WINDOW) as raw:
                raw.send(window(0, WIDE - 65_535))
                ask(raw, WHOLE, 10)
                await holds(lambda: it.boundary._departures._resets)
                await asyncio.sleep(0.3)
                await another_call(it)
                assert it.admission.reply_bytes >= 30 * MEGABYTE
                assert it.boundary._fuse.count() >= 8
                monkeypatch.setattr(departures, "HANG_UP_SECONDS", 0.5)
                # Well before TCP gives it up, after 20 s without a byte.
                await holds(lambda: it.admission.reply_bytes == 0, 400)
                await holds(lambda: it.boundary._fuse.count() == 0)
                assert await asyncio.to_thread(is_hung_up_on, raw)

    asyncio.run(scenario())


def test_who_reads_slowly_but_steadily_is_served(monkeypatch: pytest.MonkeyPatch, big: None) -> None:
    async def streamed(behind: Behind, request: Any, context: Any) -> AsyncIterator[pb.Gallery]:
        for _ in range(4):
            yield pb.Gallery(name="x" * 100_000)

    monkeypatch.setattr(Behind, "streamed", streamed)

    def read(address: str, path: str, step: int) -> int:
        """Read a reply in three seconds, a part at a time."""
        with Raw(address, NO_WINDOW) as raw:
            ask(raw, path, 1)
            size, ended, began = 0, False, time.monotonic()
            while not ended and time.monotonic() - began < 30:
                raw.send(window(0, step), window(1, step))
                for kind, flags, _, payload in raw.frames(0.15):
                    size += len(payload) if kind == DATA else 0
                    ended = ended or (kind == HEADERS and bool(flags & END_STREAM))
                    assert kind != RST_STREAM
            assert time.monotonic() - began > 2
            return size

    async def scenario() -> None:
        async with running() as it:
            it.boundary._departures.seconds = 15.0
            assert await asyncio.to_thread(read, it.address, WHOLE, MEGABYTE // 4) > 4 * MEGABYTE
            it.boundary._departures.seconds = 2.0  # for each reply of a stream
            assert await asyncio.to_thread(read, it.address, STREAMED, 20_000) > 400_000

    asyncio.run(scenario())


def test_who_reads_no_answer_of_health_leaves_room_for_other_probes(server: Server) -> None:
    server._boundary._answers.seconds = 1.0
    with connected(server.address) as stubs, ExitStack() as stack:
        for _ in range(3):
            ask(stack.enter_context(Raw(server.address, NO_WINDOW, ELSEWHERE)), CHECK, 100)
        until(lambda: server._fuse.count("checks") == 48)
        assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        until(lambda: server._fuse.count("checks") <= 1)
        assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        until(lambda: server._fuse.count("checks") == 0)


def test_who_reads_nothing_of_a_stream_is_reset(server: Server) -> None:
    server._boundary._answers.seconds = 0.5
    with connected(server.address) as stubs, Raw(server.address, NO_WINDOW) as raw:
        ask(raw, WATCH, 3)
        until(lambda: server._fuse.count("watchers") == 3)
        until(lambda: server._fuse.count("watchers") <= 1)
        assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        until(lambda: server._fuse.count("watchers") == 0)
        assert {stream for kind, _, stream, _ in raw.frames(1.0) if kind == RST_STREAM} == {1, 3, 5}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_right_connection_is_hung_up_on_and_no_file_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(departures, "HANG_UP_SECONDS", 0.2)
    monkeypatch.setattr(departures, "owners", lambda tasks: {})  # nothing less will do
    with serving(FakeEncoder(), GalleryDirectory(tmp_path), host=host) as server:
        server._boundary._answers.seconds = 0.3
        address = server.address.replace("[", "").replace("]", "")
        with Raw(address) as other, Raw(address, NO_WINDOW) as raw:
            ask(raw, CHECK, 3)
            until(lambda: server._fuse.count("checks") == 3)
            before = len(os.listdir("/dev/fd"))
            assert is_hung_up_on(raw)
            until(lambda: len(os.listdir("/dev/fd")) < before)  # its end is closed, and no copy stays
            other.send(frame(SETTINGS, ACK, 0), begin(1, CHECK), frame(DATA, END_STREAM, 1, message(b"")))
            assert other.ended(1)


def test_for_a_call_that_grpc_itself_holds_no_connection_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does the newest, for as long as a quiet server gets no other."""
    monkeypatch.setattr(departures, "HANG_UP_SECONDS", 0.2)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server:
        server._boundary._answers.seconds = 0.2
        with Raw(server.address, NO_WINDOW) as raw:
            ask(raw, CHECK, 2)
            until(lambda: len(server._boundary._answers._resets) > 0)
            assert not is_hung_up_on(raw, within=1.0)


def test_a_peer_that_grpc_knows_no_more_is_none_of_our_own_sockets() -> None:
    one, other = socket.socketpair()
    with one, other:
        hang_up([""])
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_a_reply_that_the_garbage_collector_frees_in_another_thread_is_counted_out_in_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(departures, "owners", lambda tasks: {})

    async def scenario() -> None:
        fuse = Fuse(1)
        leaving, threads = departures.Departures(0.0, fuse.stays), []

        async def call() -> None:
            fuse.hold("calls", cast("asyncio.Task[Any]", asyncio.current_task()))
            fuse.stays.when_gone(lambda: threads.append(threading.current_thread()))
            leaving.begin("ipv4:127.0.0.1:1")
            circle: list[Any] = [asyncio.get_running_loop().create_future()]
            circle.append(circle)
            await circle[0]

        gc.collect()
        gc.disable()
        try:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(call())
            await asyncio.sleep(0.01)
            assert (fuse.count(), threads) == (1, [])
            await asyncio.to_thread(gc.collect)
        finally:
            gc.enable()
        await holds(lambda: fuse.count() == 0)
        assert threads == [threading.current_thread()]

    asyncio.run(scenario())


def test_watchers_who_read_nothing_hold_up_neither_others_nor_a_stop(server: Server) -> None:
    with connected(server.address) as stubs, Raw(server.address, NO_WINDOW, ELSEWHERE) as raw:
        ask(raw, WATCH, 20)
        until(lambda: server._fuse.count("watchers") == 20)
        watching = stubs.health.Watch(health_pb2.HealthCheckRequest(), timeout=4)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        on_loop = server._health.enter_graceful_shutdown()
        asyncio.run_coroutine_threadsafe(on_loop, server.loop).result(2)  # type: ignore[attr-defined]
        assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_watcher_who_reads_stays(server: Server) -> None:
    server._boundary._answers.seconds = 0.2
    with connected(server.address) as stubs:
        watch = stubs.health.Watch(health_pb2.HealthCheckRequest(), timeout=1.0)
        assert next(iter(watch)).status == 1
        with pytest.raises(grpc.RpcError) as failure:
            list(watch)
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_reply_that_there_is_no_room_for_is_refused_but_never_that_to_a_write(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SMALL_REPLY", 4)
    with connected(server.address) as stubs:
        server._admission.most_bytes = 16
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"x")
        assert "bytes of replies" in refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        stubs.create("birds")
        until(lambda: server._admission.reply_bytes == 0)
