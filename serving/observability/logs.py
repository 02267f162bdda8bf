"""Logs with a request id: JSON lines for machines, plain lines on a terminal; no call waits for a reader."""

import json
import logging
import os
import queue
import random
import sys
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any, TextIO

__all__ = [
    "JsonFormatter",
    "TerminalFormatter",
    "configure_logs",
    "dropped_lines",
    "flush_logs",
    "new_request_id",
    "request_id",
]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the call that the running task works for; empty outside of a call."""

MOST_BYTES_WAITING = 4 * 2**20
GATHER_SECONDS = 0.01  # in which lines come together that are written at once
FLUSH_SECONDS = 2.0  # at the end of the process

_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}
_FIRST_EXTRA = len(vars(logging.makeLogRecord({})))  # `extra` comes after what each record has
_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


def new_request_id(proposed: str = "") -> str:
    """Choose the id of a call.

    Args:
        proposed: What the caller sent; taken when it is short and printable, so that it can be searched for.

    Returns:
        An id of at most 64 characters.
    """
    if 0 < len(proposed) <= 64 and proposed.isascii() and proposed.isprintable():
        return proposed
    return f"{random.getrandbits(64):016x}"


def configure_logs(level: str = "INFO", stream: TextIO | None = None, *, worker: int | None = None) -> None:
    """Send the logs of the process to a stream, in the form that suits it.

    Args:
        level: The least severe level that is written.
        stream: Standard error when not given.
        worker: The number of this process among its like, which each line then tells.

    Raises:
        ValueError: if the level is not one that `logging` knows.
    """
    stream = sys.stderr if stream is None else stream
    handler = _Writer(stream)
    handler.setFormatter(TerminalFormatter() if stream.isatty() else JsonFormatter())
    handler.addFilter(_tells_something)
    handler.addFilter(_add_request_id)
    if worker is not None:
        handler.addFilter(partial(_add_worker, worker))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Its loader tells at INFO of each build of itself that it does not find.
    logging.getLogger("faiss").setLevel(logging.WARNING)


def flush_logs(seconds: float) -> None:
    """Wait until the lines that were logged are written, for so many seconds at most."""
    for each in logging.getLogger().handlers:
        if isinstance(each, _Writer):
            each.flush(seconds)


def dropped_lines() -> int:
    """Tell how many lines the process has lost since its reader was too slow."""
    return sum(each.dropped for each in logging.getLogger().handlers if isinstance(each, _Writer))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request id, and whatever `extra` holds."""

    def __init__(self) -> None:
        super().__init__()
        self._second = (-1, "")  # writing it out costs as much as all the rest

    def format(self, record: logging.LogRecord) -> str:
        """Write one record.

        Returns:
            A line without its end.
        """
        second, written = self._second
        if second != int(record.created):
            second = int(record.created)
            written = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second, written
        fields: dict[str, Any] = {
            "time": f"{written}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if getattr(record, "request_id", ""):
            fields["request_id"] = record.request_id  # type: ignore[attr-defined]
        fields |= _extras(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _encode(fields)


class TerminalFormatter(logging.Formatter):
    """Time, level and message for a person, then the fields as `name=value`.

    What cannot be printed is escaped, and a traceback stands inwards: no name that a caller has chosen looks
    like a line of its own, or tells the terminal what to do.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Write one record.

        Returns:
            A line without its end, and the traceback below it when there is one.
        """
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = _extras(record)
        if getattr(record, "request_id", ""):
            fields["request_id"] = record.request_id  # type: ignore[attr-defined]
        tail = "".join(f"  {name}={value}" for name, value in fields.items())
        line = f"{clock} {record.levelname.lower():7} {_printable(f'{record.getMessage()}{tail}')}"
        if not record.exc_info:
            return line
        below = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"  {_printable(each)}" for each in below)])


class _Writer(logging.Handler):
    """Hands lines to a thread that writes them, so that a pipe nobody reads stops no call.

    So many bytes wait at most; lines beyond are dropped and counted, and their number is logged when the
    reader is back.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._lines = queue.SimpleQueue[bytes | threading.Event | None]()
        self._accepted = 0  # bytes, of whoever logs
        self._written = 0  # bytes, of the thread
        self._told = 0  # of the dropped ones, which the log knows
        try:
            self._file: int | None = stream.fileno()
        except (OSError, ValueError):  # it is in memory
            self._file = None
        self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; the caller, `Handler.handle`, lets one in at a time."""
        try:
            line = self._bytes_of(record)
        except Exception:
            self.handleError(record)
            return
        if self._accepted - self._written + len(line) > MOST_BYTES_WAITING:
            self.dropped += 1
            return
        self._accepted += len(line)
        self._lines.put(line)

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all that was taken is written, for so long at most."""
        if self._thread.is_alive():
            done = threading.Event()
            self._lines.put(done)
            done.wait(seconds)

    def close(self) -> None:
        """Write what there is, and end the thread unless it is held up."""
        self.flush()
        self._lines.put(None)
        super().close()

    def _bytes_of(self, record: logging.LogRecord) -> bytes:
        # A file's name in a message may hold what is no Unicode.
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _write_all(self) -> None:
        going_on = True
        while going_on:
            taken = [self._lines.get()]
            if isinstance(taken[0], bytes):
                # Woken for each line it would take the interpreter from the calls as often.
                time.sleep(GATHER_SECONDS)
            with suppress(queue.Empty):  # one write for all that wait
                while True:
                    taken.append(self._lines.get_nowait())
            text = b"".join(each for each in taken if isinstance(each, bytes))
            self._write(text)
            self._written += len(text)
            if self.dropped > self._told:
                lost, self._told = self.dropped - self._told, self.dropped
                self._write(self._bytes_of(_loss(lost)))
            for each in taken:
                if isinstance(each, threading.Event):
                    each.set()
            going_on = None not in taken

    def _write(self, line: bytes) -> None:
        with suppress(OSError, ValueError):  # nobody is there to read it, nor to be told
            if self._file is None:
                self._stream.write(line.decode())
                return
            # Past Python's buffer: its lock, held by a thread that is held up, would break the exit.
            while line:
                line = line[os.write(self._file, line) :]


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _loss(lines: int) -> logging.LogRecord:
    message = "%d log lines were lost, since nobody read them fast enough"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (lines,), None)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    items = islice(vars(record).items(), _FIRST_EXTRA, None)
    return {name: value for name, value in items if name not in _ORDINARY}


def _tells_something(record: logging.LogRecord) -> bool:
    """Leave out what gRPC says of each reply whose caller hung up: a peer writes thousands at a stroke.

    They are no fault of the server. DEBUG shows them.
    """
    if record.name != "grpc._cython.cygrpc" or logging.getLogger().isEnabledFor(logging.DEBUG):
        return True
    error = record.exc_info[1] if record.exc_info else None
    # With other texts it tells that gRPC was used in a wrong way, which is a fault of the server.
    return type(error).__name__ != "ExecuteBatchError" or 'Failed "execute_batch"' not in str(error)


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True


def _add_worker(worker: int, record: logging.LogRecord) -> bool:
    record.worker = worker
    return True
