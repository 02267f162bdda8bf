"""Logs: JSON for machines, plain lines on a terminal, the request id in both."""

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from serving.gallery.directory import GalleryDirectory
from serving.observability.logs import configure_logs, dropped_lines, flush_logs, new_request_id, request_id
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import connected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    # `configure_logs` removes and closes what it finds, which here is pytest's.
    for handler in before:
        root.removeHandler(handler)
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_a_machine_reads_one_json_object_a_line() -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream)
    token = request_id.set("abc")
    logging.getLogger("serving.x").info("hello %s", "wörld\n", extra={"rpc": "Search", "odd": object})
    request_id.reset(token)
    logging.getLogger("serving.x").debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("serving.x").exception("failed")
    flush_logs()
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "hello wörld\n"
    assert (first["level"], first["logger"], first["request_id"], first["rpc"]) == (
        "INFO",
        "serving.x",
        "abc",
        "Search",
    )
    assert first["time"].endswith("Z")
    assert "request_id" not in second
    assert "ValueError: why" in second["traceback"]


def test_a_person_reads_plain_lines() -> None:
    stream = Terminal()
    configure_logs("INFO", stream)
    token = request_id.set("abc")
    logging.getLogger("serving.x").warning("careful", extra={"rpc": "Search"})
    request_id.reset(token)
    flush_logs()
    assert stream.getvalue().rstrip().endswith("warning careful  request_id=abc  rpc=Search")


def test_nothing_that_a_caller_names_looks_like_a_line_or_reaches_the_terminal() -> None:
    stream = Terminal()
    configure_logs("INFO", stream)
    forged = "birds\n12:00:00 info    all is well\x1b[2J\u202e"
    log = logging.getLogger("serving.x")
    log.warning("no gallery %s", forged, extra={"gallery": forged})
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("failed")
    flush_logs()
    first, second, *traceback = stream.getvalue().splitlines()
    assert first.count(r"birds\n12:00:00 info    all is well\x1b[2J\u202e") == 2
    assert second.endswith("failed")
    assert all(line.startswith("  ") for line in traceback)
    assert all(line.isprintable() for line in [first, second, *traceback])
    assert "ValueError: birds" in stream.getvalue()


@pytest.mark.parametrize("proposed", ["", "x" * 65, "line\nbreak", "ünïcode"])
def test_an_id_that_cannot_be_searched_for_is_replaced(proposed: str) -> None:
    made = new_request_id(proposed)
    assert made != proposed
    assert len(made) == 16
    assert new_request_id("mine") == "mine"


@pytest.fixture
def unread() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A pipe that is full, and the end of it that a log is written to."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as stream:
        yield reader, stream
        logging.getLogger().handlers.clear()
        os.close(reader)  # whoever is held up in a write ends with that


def test_a_full_pipe_stops_no_call(tmp_path: Path, unread: tuple[int, io.TextIOWrapper]) -> None:
    configure_logs("INFO", unread[1])
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server, connected(server.address) as stubs:
        for _ in range(50):
            stubs.embed(b"one", timeout=5)


def test_a_line_tells_which_worker_wrote_it_and_what_the_call_was(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream, worker=3)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server, connected(server.address) as stubs:
        stubs.embed(b"one", b"two", metadata=(("x-request-id", "mine"),))
    flush_logs()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    call = next(each for each in lines if each["message"] == "RetrievalService/Embed OK")
    assert (call["worker"], call["request_id"], call["rpc"], call["code"]) == (
        3,
        "mine",
        "RetrievalService/Embed",
        "OK",
    )
    assert call["inputs"] == 2
    assert 0 < call["milliseconds"] < 10_000


def test_the_line_of_a_call_that_failed_tells_why(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream)
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server,
        connected(server.address) as stubs,
        pytest.raises(grpc.RpcError) as failure,
    ):
        stubs.embed(b"bad")
    flush_logs()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    call = next(each for each in lines if each["message"] == "RetrievalService/Embed INVALID_ARGUMENT")
    assert call["reason"] == "BAD_IMAGE"
    assert call["error"] == failure.value.details()
    assert "127.0.0.1" in call["peer"]


def test_what_is_no_unicode_is_still_a_line() -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream)
    logging.getLogger("serving.x").info("file %s", "a\udcff")
    flush_logs()
    assert json.loads(stream.getvalue().replace("\\udcff", "?"))["message"] == "file a?"


def test_lines_past_the_bound_are_dropped_and_counted(
    unread: tuple[int, io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.logs.MOST_WAITING", 100)
    reader, stream = unread
    configure_logs("INFO", stream)
    log = logging.getLogger("serving.x")
    for i in range(300):
        log.info("line %d", i)
    lost = dropped_lines()
    assert 190 <= lost <= 200  # one is being written
    read = b""
    while read.count(b'"message"') < 300 - lost:
        read += os.read(reader, 65_536)
    flush_logs()
    assert dropped_lines() == lost
