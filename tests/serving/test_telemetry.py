"""Logs: JSON for machines, plain lines on a terminal, the request id in both."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from serving.telemetry import configure_logs, new_request_id, request_id


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
    assert stream.getvalue().rstrip().endswith("warning careful  rpc=Search  request_id=abc")


@pytest.mark.parametrize("proposed", ["", "x" * 65, "line\nbreak", "ünïcode"])
def test_an_id_that_cannot_be_searched_for_is_replaced(proposed: str) -> None:
    made = new_request_id(proposed)
    assert made != proposed
    assert len(made) == 16
    assert new_request_id("mine") == "mine"
