"""Logs: JSON for machines, plain lines on a terminal, the request id in both."""

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.observability.call import Call, current_call
from serving.observability.logs import configure_logs, dropped_lines, flush_logs
from tests.serving.stubs import Stubs

log = logging.getLogger("serving.x")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers[:] = []  # `configure_logs` closes what it finds, which here is pytest's
    yield
    root.handlers[:] = before
    root.setLevel(level)


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    flush_logs()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_machine_reads_one_json_object_a_line() -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream)
    token = current_call.set(Call("", request_id="abc"))
    log.info("hello %s", "wörld\n", extra={"rpc": "Search", "odd": object})
    current_call.reset(token)
    log.debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    log.info("file %s", "a\udcff")
    first, second, third = written(stream)
    assert first["message"] == "hello wörld\n"
    told = (first["level"], first["logger"], first["request_id"], first["rpc"])
    assert told == ("INFO", "serving.x", "abc", "Search")
    assert first["time"].endswith("Z")
    assert "request_id" not in second
    assert "ValueError: why" in second["traceback"]
    assert third["message"] == "file a\udcff"  # what is no Unicode is still a line


def test_a_person_reads_plain_lines_and_no_name_of_a_caller_looks_like_one() -> None:
    stream = Terminal()
    configure_logs("INFO", stream)
    token = current_call.set(Call("", request_id="abc"))
    log.warning("careful", extra={"rpc": "Search"})
    current_call.reset(token)
    forged = "birds\n12:00:00 info    all is well\x1b[2J\u202e"
    log.warning("no gallery %s", forged, extra={"gallery": forged})
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("failed")
    flush_logs()
    plain, first, second, *traceback = stream.getvalue().splitlines()
    assert plain.endswith("warning careful  request_id=abc  rpc=Search")
    assert first.count(r"birds\n12:00:00 info    all is well\x1b[2J\u202e") == 2
    assert second.endswith("failed")
    assert all(line.startswith("  ") for line in traceback)
    assert all(line.isprintable() for line in [first, second, *traceback])


@pytest.fixture
def unread() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A pipe that is full: its two ends, of which a log is written to the second."""
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


def test_a_full_pipe_stops_nobody_and_lines_past_the_bound_are_dropped_and_counted(
    unread: tuple[int, io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.logs.MOST_WAITING", 100)
    reader, stream = unread
    configure_logs("INFO", stream)
    for i in range(300):
        log.info("line %d", i)
    lost = dropped_lines()
    assert 190 <= lost <= 200  # one is being written
    read = b""
    while read.count(b'"message"') < 300 - lost:
        read += os.read(reader, 65_536)
    flush_logs()
    assert dropped_lines() == lost


def test_a_line_tells_what_a_call_was_and_why_it_failed(stubs: Stubs) -> None:
    stream = io.StringIO()
    configure_logs("INFO", stream, worker=3)
    stubs.embed(b"one", b"two", metadata=(("x-request-id", "mine"),))
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"bad")
    good, bad = (each for each in written(stream) if each.get("rpc") == "RetrievalService/Embed")
    page = (Path(__file__).parents[2] / "docs/monitoring.md").read_text(encoding="utf-8")
    shown = json.loads(page.partition("```json\n")[2].partition("\n```")[0])
    assert good.keys() | {"client"} == shown.keys()  # which only a call with a key has
    assert (good["message"], good["code"]) == ("RetrievalService/Embed OK", "OK")
    assert (good["worker"], good["request_id"], good["inputs"]) == (3, "mine", 2)
    assert 0 < good["milliseconds"] < 10_000
    assert (bad["code"], bad["reason"]) == ("INVALID_ARGUMENT", "BAD_IMAGE")
    assert bad["error"] == failure.value.details()
    assert "127.0.0.1" in bad["peer"]
