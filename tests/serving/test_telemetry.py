"""Logs: JSON for machines, plain lines on a terminal, the request id in both."""

import importlib
import io
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from serving.gallery.directory import GalleryDirectory
from serving.observability.logs import configure_logs, dropped_lines, new_request_id, request_id
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
    logging.getLogger().handlers[0].flush()
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


@pytest.mark.parametrize(("level", "told"), [("INFO", 2), ("DEBUG", 3)])
def test_what_grpc_says_of_callers_that_hung_up_is_for_debugging(level: str, told: int) -> None:
    stream = io.StringIO()
    configure_logs(level, stream)
    grpc_logger = logging.getLogger("grpc._cython.cygrpc")
    cygrpc = importlib.import_module(grpc_logger.name)  # mypy knows nothing of it
    left = cygrpc.ExecuteBatchError('Failed "execute_batch": ()')
    wrong = cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8")
    for error in (left, wrong, ValueError("a bug")):
        try:
            raise error
        except Exception:
            grpc_logger.exception("raised by servicer method")
    logging.getLogger().handlers[0].flush()
    lines = stream.getvalue().splitlines()
    assert len(lines) == told
    assert "grpc_call_start_batch" in lines[-2]
    assert "ValueError: a bug" in lines[-1]


def test_a_person_reads_plain_lines() -> None:
    stream = Terminal()
    configure_logs("INFO", stream)
    token = request_id.set("abc")
    logging.getLogger("serving.x").warning("careful", extra={"rpc": "Search"})
    request_id.reset(token)
    logging.getLogger().handlers[0].flush()
    assert stream.getvalue().rstrip().endswith("warning careful  rpc=Search  request_id=abc")


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
    logging.getLogger().handlers[0].flush()
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
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
        logging.getLogger().handlers.clear()
        os.close(reader)  # whoever is held up in a write ends with that


def test_a_full_pipe_stops_no_call(tmp_path: Path, unread: tuple[int, io.TextIOWrapper]) -> None:
    configure_logs("INFO", unread[1])
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server, connected(server.address) as stubs:
        for _ in range(50):
            stubs.embed(b"one", timeout=5)


def test_lines_past_the_bound_are_dropped_and_counted(
    unread: tuple[int, io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.logs.MOST_BYTES_WAITING", 10_000)
    reader, stream = unread
    configure_logs("INFO", stream)
    before = dropped_lines()
    log = logging.getLogger("serving.x")
    began = time.monotonic()
    for i in range(200):
        log.info("line %d %s", i, "y" * 100)
    assert time.monotonic() - began < 2
    lost = dropped_lines() - before
    assert 100 < lost < 200
    read = b""
    while b"were lost" not in read:
        read += os.read(reader, 65_536)
    lines = [json.loads(line) for line in read.lstrip(b"x").splitlines() if line.endswith(b"}")]
    messages = [each["message"] for each in lines]
    assert f"{lost} log lines were lost, since nobody read them fast enough" in messages
    assert len([each for each in messages if each.startswith("line ")]) == 200 - lost
    log.info("after")
    logging.getLogger().handlers[0].flush()
    while b"after" not in read:
        read += os.read(reader, 65_536)
    assert dropped_lines() - before == lost


def test_a_reader_that_is_gone_stops_no_line() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        configure_logs("INFO", stream)
        for _ in range(3):
            logging.getLogger("serving.x").info("nobody hears")
        began = time.monotonic()
        logging.getLogger().handlers[0].flush()
        assert time.monotonic() - began < 1
        logging.getLogger().handlers.clear()


def test_a_line_tells_which_worker_wrote_it_and_what_the_call_was(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream, worker=3)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server, connected(server.address) as stubs:
        stubs.embed(b"one", b"two", metadata=(("x-request-id", "mine"),))
    logging.getLogger().handlers[0].flush()
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
    logging.getLogger().handlers[0].flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    call = next(each for each in lines if each["message"] == "RetrievalService/Embed INVALID_ARGUMENT")
    assert call["reason"] == "BAD_IMAGE"
    assert call["error"] == failure.value.details()
    assert "127.0.0.1" in call["peer"]


def test_what_is_no_unicode_is_still_a_line() -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream)
    logging.getLogger("serving.x").info("file %s", "a\udcff")
    logging.getLogger().handlers[0].flush()
    assert json.loads(stream.getvalue().replace("\\udcff", "?"))["message"] == "file a?"


def test_lines_in_quick_succession_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.observability.logs.GATHER_SECONDS", 0.2)
    writes: list[str] = []

    class Counting(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    configure_logs("INFO", Counting())
    for _ in range(5):
        logging.getLogger("serving.x").info("hello")
        time.sleep(0.01)  # in which a thread that waits would take the line
    logging.getLogger().handlers[0].flush()
    assert [text.count("\n") for text in writes if text] == [5]
