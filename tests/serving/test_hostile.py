"""Clients that mean harm or know no better: the others are served meanwhile, and nothing of it stays."""

import gc
import logging
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.rpc import arrivals, fuse
from serving.server import channel
from serving.server.server import Server
from tests.serving.raw_http2 import (
    CONTINUATION,
    DATA,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Raw,
    begin,
    frame,
    literal,
    message,
)
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import Stubs, connected, refused

EMBED = "/crossbatch.v1.RetrievalService/Embed"
WATCH = "/grpc.health.v1.Health/Watch"
LIMIT = 1_024  # of calls: twice the permits
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path_factory.mktemp("g")), grace=1.0) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


@pytest.fixture(autouse=True)
def _others_are_served_and_nothing_stays(
    running: Server, stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    served(stubs)
    before = resident()
    with caplog.at_level(logging.INFO):
        yield
    until(lambda: not any(running._fuse.count(each) for each in running._fuse._most))
    served(stubs)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []
    assert [each for each in caplog.records if getattr(each, "code", "") == "INTERNAL"] == []
    gc.collect()
    assert resident() - before < 48 * MEGABYTE


def served(stubs: Stubs) -> None:
    began = time.monotonic()
    assert stubs.embed(b"x").results[0].vector
    assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1  # SERVING
    assert time.monotonic() - began < 5


def resident() -> int:
    """Bytes of this process, server and clients, that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def odd(count: int) -> range:
    """The numbers of so many streams, as a client counts them."""
    return range(1, 2 * count, 2)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n" + bytes(100_000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS says hello
        bytes(range(256)) * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100_000,
    ],
)
def test_what_is_no_http_2_is_hung_up_on(running: Server, sent: bytes) -> None:
    host, _, port = running.address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), 5) as connection:
            try:
                connection.sendall(sent)
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass


def test_who_connects_and_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 1)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as other:
        host, _, port = other.address.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as connection:
            while connection.recv(1 << 16):  # the server's own greeting, then the end
                pass


def test_a_message_of_100_mb_is_refused_before_it_is_received(running: Server, stubs: Stubs) -> None:
    with Raw(running.address) as raw:
        prefix = struct.pack(">BI", 0, 100 * MEGABYTE)
        raw.send(*(begin(each, EMBED) + frame(DATA, 0, each, prefix + bytes(1_000)) for each in odd(100)))
        ended = raw.ended(100)
    assert len(ended) == 100
    assert all(b"grpc-status\x018" in each for each in ended.values())  # RESOURCE_EXHAUSTED


def test_slow_senders_take_no_place_for_long_and_health_answers_meanwhile(
    running: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "ARRIVAL_SECONDS", 1.5)
    began = time.monotonic()
    with ExitStack() as stack:
        # From two addresses, each of which has half of the calls.
        sources = ["127.0.0.2", "127.0.0.3"] * 4
        senders = [stack.enter_context(Raw(running.address, source=each)) for each in sources]
        prefix = struct.pack(">BI", 0, 60 * MEGABYTE)
        for raw in senders:
            raw.send(*(begin(each, EMBED) + frame(DATA, 0, each, prefix) for each in odd(LIMIT // 8)))
        until(lambda: running._fuse.count("calls") == LIMIT)
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"x")
        assert "1024 calls are open" in refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
        assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        for byte in range(5):  # byte by byte
            for raw in senders:
                raw.send(*(frame(DATA, 0, each, b"%d" % byte) for each in odd(LIMIT // 8)))
        for raw in senders:
            ended = raw.ended(LIMIT // 8)
            assert len(ended) == LIMIT // 8
            assert b"grpc-status\x014" in next(iter(ended.values()))  # DEADLINE_EXCEEDED
        assert time.monotonic() - began < 10


def test_few_messages_come_in_at_once_and_the_rest_keep_to_their_window(running: Server) -> None:
    prefix = struct.pack(">BI", 0, 60 * MEGABYTE)
    with Raw(running.address) as raw:
        raw.send(*(begin(each, EMBED) + frame(DATA, 0, each, prefix + bytes(100)) for each in odd(100)))
        until(lambda: running._fuse.count() == 100)
        raw.send(*(frame(DATA, 0, each, bytes(100)) for each in odd(100)))
        asked = {stream: payload for kind, _, stream, payload in raw.frames(1.0) if kind == WINDOW_UPDATE}
    asked.pop(0, None)  # of the connection
    assert 0 < len(asked) <= arrivals.MOST_ARRIVING


def test_slow_senders_keep_others_waiting_for_their_turn_only(
    running: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "TURN_SECONDS", 0.5)
    prefix = struct.pack(">BI", 0, 60 * MEGABYTE)
    with Raw(running.address) as raw:
        raw.send(*(begin(each, EMBED) + frame(DATA, 0, each, prefix) for each in odd(arrivals.MOST_ARRIVING)))
        until(lambda: running._fuse.count() == arrivals.MOST_ARRIVING)
        time.sleep(0.7)
        assert running._fuse.count() == arrivals.MOST_ARRIVING  # nobody waits
        began = time.monotonic()
        assert stubs.embed(b"x").results[0].vector
        assert time.monotonic() - began < 2
        assert len(raw.ended(1, 2.0)) == 1
        # As many as had to, once the call that came last has left too.
        until(lambda: running._fuse.count() == arrivals.MOST_ARRIVING - 1)


def test_who_sends_many_messages_slowly_keeps_only_himself_waiting(
    running: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "TURN_SECONDS", 0.5)
    prefix = struct.pack(">BI", 0, 60 * MEGABYTE)
    with Raw(running.address, source="127.0.0.2") as raw:
        raw.send(*(begin(each, EMBED) + frame(DATA, 0, each, prefix) for each in odd(700)))
        until(lambda: running._fuse.count() == 700)
        began = time.monotonic()
        assert stubs.embed(b"x").results[0].vector
        assert time.monotonic() - began < 5  # and not 700 / 28 turns
        assert running._fuse.count() > 500  # most wait still


def test_half_closed_streams_without_a_message_are_refused(running: Server) -> None:
    with Raw(running.address) as raw:
        raw.send(*(begin(each, EMBED, flags=5) for each in odd(50)))
        raw.send(
            *(begin(each, EMBED) + frame(DATA, END_STREAM, each, b"\0\0") for each in range(101, 201, 2))
        )
        ended = raw.ended(100)
    assert len(ended) == 100
    assert not any(b"grpc-status\x010" in each for each in ended.values())


def test_a_reset_in_the_middle_of_a_message_frees_its_place(running: Server) -> None:
    with Raw(running.address) as raw:
        prefix = struct.pack(">BI", 0, MEGABYTE)
        raw.send(*(begin(each, EMBED) + frame(DATA, 0, each, prefix + bytes(1_000)) for each in odd(50)))
        until(lambda: running._fuse.count("calls") == 50)
        raw.send(*(frame(RST_STREAM, 0, each, struct.pack(">I", 8)) for each in odd(50)))
        until(lambda: running._fuse.count("calls") == 0)


@pytest.mark.parametrize("flood", ["headers", "continuation", "reset", "ping", "settings", "window", "empty"])
def test_a_flood_of_frames_keeps_nobody_waiting(running: Server, stubs: Stubs, flood: str) -> None:
    many = 20_000
    match flood:
        case "headers":  # one call with a megabyte of them
            fields = b"".join(literal(f"name-{i}", "v" * 100) for i in range(100))
            parts = [frame(HEADERS, 0, 1, fields), *[frame(CONTINUATION, 0, 1, fields)] * 90]
        case "continuation":  # that never ends
            parts = [frame(HEADERS, 0, 1, literal("a", "b")), *[frame(CONTINUATION, 0, 1, b"")] * many]
        case "reset":  # CVE-2023-44487
            parts = [
                begin(each, EMBED) + frame(RST_STREAM, 0, each, struct.pack(">I", 8)) for each in odd(many)
            ]
        case "ping":
            parts = [frame(PING, 0, 0, bytes(8))] * many
        case "settings":
            parts = [frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))] * many
        case "window":
            parts = [frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))] * many
        case "empty":
            parts = [begin(1, EMBED), *[frame(DATA, 0, 1, b"")] * many]
    with Raw(running.address) as raw:
        raw.socket.settimeout(1.0)
        try:
            for start in range(0, len(parts), 1_000):
                raw.send(*parts[start : start + 1_000])
                served(stubs)
        except OSError:  # hung up on, or no more of it is taken in
            pass
        served(stubs)


def test_one_connection_takes_no_more_calls_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_STREAMS", 50)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as other, Raw(other.address) as raw:
        raw.send(*(begin(each, EMBED) for each in odd(150)))
        until(lambda: other._fuse.count() == 50)
        time.sleep(0.2)
        assert other._fuse.count() == 50


def test_thousands_of_idle_connections_take_little_memory(running: Server, stubs: Stubs) -> None:
    count = 2_000
    before = resident()
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(Raw(running.address))
        served(stubs)
        time.sleep(0.5)
        each = (resident() - before) / count
        served(stubs)
    assert each < 60_000


def test_watchers_use_up_no_place_of_a_call(running: Server, stubs: Stubs) -> None:
    with Raw(running.address) as raw:
        raw.send(*(begin(each, WATCH) + frame(DATA, 0, each, message(b"")) for each in odd(LIMIT)))
        share = int(fuse.MOST_WATCHERS * fuse.MOST_OF_ONE)
        ended = raw.ended(LIMIT - share)
        assert len(ended) == LIMIT - share
        assert b"grpc-status\x018" in next(iter(ended.values()))  # RESOURCE_EXHAUSTED
        until(lambda: running._fuse.count("watchers") == share)
        with Raw(running.address, source="127.0.0.2") as other:  # who has room left
            other.send(begin(1, WATCH) + frame(DATA, 0, 1, message(b"")))
            until(lambda: running._fuse.count("watchers") == share + 1)
        assert len(stubs.embed(*[b"x"] * 256).results) == 256
        served(stubs)


def test_who_never_reads_his_replies_is_hung_up_on_when_he_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(channel, "KEEPALIVE_PATIENCE", 1)
    no_window = struct.pack(">HI", 4, 0)
    request = message(retrieval_pb.EmbedRequest(images=[b"x"]).SerializeToString())
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as other, Raw(other.address, no_window) as raw:
        raw.send(*(begin(each, EMBED) + frame(DATA, END_STREAM, each, request) for each in odd(100)))
        until(lambda: other._fuse.count("calls") == 100)
        until(lambda: other._fuse.count("calls") == 0)
        assert other._admission.inputs == 0


def test_a_connection_is_ended_gently_after_a_while_where_there_are_several_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that keeps its connection would else be one worker's for ever (grpc#22036, grpc#22644)."""
    monkeypatch.setattr(channel, "SPREAD_SECONDS", 0.1)
    seen: set[str] = set()
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path), workers=2) as other,
        connected(other.address) as stubs,
    ):
        register = other._boundary._register
        noted = register._noted

        def seeing(call: Any, code: str, context: Any, *more: Any) -> Any:
            seen.add(context.peer())
            return noted(call, code, context, *more)

        monkeypatch.setattr(register, "_noted", seeing)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            stubs.embed(b"x")  # fails for none of it
    assert len(seen) > 3
