"""Logs with a request id: JSON lines for machines, plain lines on a terminal; no call waits for a reader."""

import json
import logging
import sys
import time
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Queue
from typing import Any, TextIO

from serving.observability.call import current_call

__all__ = ["configure_logs", "dropped_lines", "flush_logs", "timestamp"]

MOST_WAITING = 20_000
"""Most lines that wait for a reader; further ones are dropped and counted."""
FLUSH_SECONDS = 2.0
GATHER_SECONDS = 0.05

_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


class _Lines(QueueHandler):
    """Hands each record to the thread that writes; drops it when too many wait."""

    def __init__(self, worker: int | None) -> None:
        self.waiting = Queue[logging.LogRecord](MOST_WAITING)
        super().__init__(self.waiting)
        self.dropped = 0
        self._worker = worker

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if (call := current_call.get()) is not None:
            record.request_id = call.request_id
        if self._worker is not None:
            record.worker = self._worker
        return record

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        self.dropped += 1  # the queue is full


class _Writer(QueueListener):
    """Sleeps while lines gather: to wake for each one costs a busy server more than to write it."""

    queue: Queue[Any]

    def dequeue(self, block: bool) -> logging.LogRecord:
        if block and self.queue.empty():
            time.sleep(GATHER_SECONDS)
        return super().dequeue(block)


def configure_logs(level: str = "INFO", stream: TextIO | None = None, *, worker: int | None = None) -> None:
    """Send the logs of the process to a stream, standard error by default, in the form that suits it.

    Each line tells the number of this process among its like, the `worker`, where it has one.
    """
    stream = sys.stderr if stream is None else stream
    written = logging.StreamHandler(stream)
    written.setFormatter(_TerminalFormatter() if stream.isatty() else _JsonFormatter())
    lines = _Lines(worker)
    logging.basicConfig(level=level, handlers=[lines], force=True)
    _Writer(lines.queue, written).start()
    # Its loader tells at INFO of each build of itself that it does not find.
    logging.getLogger("faiss").setLevel(logging.WARNING)


def flush_logs(seconds: float = FLUSH_SECONDS) -> None:
    """Wait until the lines that were logged are written, for so many seconds at most."""
    until = time.monotonic() + seconds
    for lines in _handlers():
        while lines.waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)


def dropped_lines() -> int:
    """Tell how many lines the process has lost since its reader was too slow."""
    return sum(lines.dropped for lines in _handlers())


def _handlers() -> list[_Lines]:
    return [each for each in logging.getLogger().handlers if isinstance(each, _Lines)]


def timestamp(seconds: float) -> str:
    """Write a time, in seconds since 1970, as machines read it: 2026-03-01T12:00:00.123Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request id, and whatever `extra` holds."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        # A file's name in a message may hold what is no Unicode.
        return json.dumps(fields, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()


class _TerminalFormatter(logging.Formatter):
    """Time, level and message, then the fields as `name=value`; what cannot be printed is escaped.

    So no name that a caller chose looks like a line of its own, or tells the terminal what to do.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        tail = "".join(f"  {name}={value}" for name, value in _fields(record).items())
        lines = [f"{clock} {record.levelname.lower():7} {_printable(f'{record.getMessage()}{tail}')}"]
        if record.exc_info:
            lines += [f"  {_printable(each)}" for each in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a line tells beside its message: the request id first, then what came as `extra`."""
    extras = {name: value for name, value in vars(record).items() if name not in _ORDINARY}
    call = getattr(record, "request_id", "")
    return {"request_id": call, **extras} if call else extras
