"""Logs with a request id: JSON lines for machines, plain lines on a terminal."""

import json
import logging
import sys
import time
import uuid
from contextvars import ContextVar
from typing import Any, TextIO

__all__ = ["JsonFormatter", "TerminalFormatter", "configure_logs", "new_request_id", "request_id"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the call that the running task works for; empty outside of a call."""

_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


def new_request_id(proposed: str = "") -> str:
    """Choose the id of a call.

    Args:
        proposed: What the caller sent; taken when it is short and printable, so that it can be searched for.

    Returns:
        An id of at most 64 characters.
    """
    if 0 < len(proposed) <= 64 and proposed.isascii() and proposed.isprintable():
        return proposed
    return uuid.uuid4().hex[:16]


def configure_logs(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send the logs of the process to a stream, in the form that suits it.

    Args:
        level: The least severe level that is written.
        stream: Standard error when not given.

    Raises:
        ValueError: if the level is not one that `logging` knows.
    """
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TerminalFormatter() if stream.isatty() else JsonFormatter())
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Its loader tells at INFO of each build of itself that it does not find.
    logging.getLogger("faiss").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request id, and whatever `extra` holds."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record.

        Returns:
            A line without its end.
        """
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if getattr(record, "request_id", ""):
            fields["request_id"] = record.request_id  # type: ignore[attr-defined]
        fields |= _extras(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class TerminalFormatter(logging.Formatter):
    """Time, level and message for a person, then the fields as `name=value`."""

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
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _ORDINARY}


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True
