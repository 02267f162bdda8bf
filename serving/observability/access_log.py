"""What is noted of every call: metrics, a trace, a log line; and of every write a line in the audit log."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from serving.gallery.disk import disk_error
from serving.observability.call import Call
from serving.observability.logs import timestamp
from serving.observability.metrics import Metrics
from serving.observability.tracing import Tracer

__all__ = ["MOST_LINES", "AccessLog", "AuditLog", "told_peer"]

logger = logging.getLogger(__name__)
audit_logger = logging.getLogger("crossbatch.audit")
audit_logger.setLevel(logging.INFO)  # whatever the level of the other logs

MOST_LINES = 10
"""Most log lines a second on calls of one kind that went well, or that were refused for one reason; with the
next such call, one tells of the rest."""
_LONGEST_NAME = 200  # characters; what a request calls a gallery has any length


class AuditLog:
    """Writes a line for each write that has ended, well or not, to the log and, if asked to, to a file.

    The line is handed to the file system before the write is acknowledged, so that none is lost when the
    server is killed. A file that cannot be written fails no call; at first it is a CrossbatchError.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Find out whether the file can be written that lines are added to."""
        self._path = path and path.absolute()
        self._lost = 0
        try:
            if self._path:
                _append(self._path, "")
        except OSError as error:
            raise disk_error(error, f"the file {path}") from error

    def record(self, call: Call, code: str, seconds: float) -> None:
        """Note a write that has ended."""
        told: dict[str, Any] = {"client": call.client, "peer": told_peer(call.peer), "rpc": call.rpc}
        told |= {**_target(call.request), "code": code, "seconds": round(seconds, 6)}
        audit_logger.info("%s by %s: %s", call.rpc, call.client or "a caller without a key", code, extra=told)
        if self._path is None:
            return
        line = json.dumps({"time": timestamp(time.time()), **told, "request_id": call.request_id})
        try:
            # What a full disk left of a line gets its end first.
            _append(self._path, f"\n{line}\n" if self._lost else f"{line}\n")
        except OSError as error:
            if not self._lost:
                what = "%s cannot be written (%s); calls go on, with their lines in the log"
                logger.error(what, self._path, error)
            self._lost += 1
        else:
            if self._lost:
                logger.warning("%s is written again; it lacks %d lines", self._path, self._lost)
            self._lost = 0


def _append(path: Path, text: str) -> None:
    """Add to a file, which logrotate may have renamed, by one write, so that processes can share it."""
    data = text.encode()
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb", buffering=0) as file:
        written = file.write(data)
    if written < len(data):
        raise OSError(f"{written} of {len(data)} bytes had room")


def _target(request: Any) -> dict[str, Any]:
    """What a request is about: names and numbers, never what it holds."""
    inputs = getattr(request, "items", getattr(request, "keys", None))
    name = getattr(request, "gallery", "") or getattr(request, "name", "")
    target = {"gallery": name[:_LONGEST_NAME] or None, "count": None if inputs is None else len(inputs)}
    if other := getattr(request, "other", ""):
        target["other"] = other[:_LONGEST_NAME]
    return target


class AccessLog:
    """Notes calls that have ended; serves any thread."""

    def __init__(
        self, metrics: Metrics, audit: AuditLog, tracer: Tracer | None = None, *, every: bool = False
    ) -> None:
        """Keep who takes note, and whether each call that went well has a line."""
        self.metrics = metrics
        self._audit = audit
        self._tracer = tracer
        self._every = every
        self._alike: dict[str, tuple[int, int]] = {}  # by what is told: the second, and how many in it
        self._lock = threading.Lock()

    def ended(
        self, call: Call, code: str, *, reason: str = "", error: str = "", refused: bool = False
    ) -> None:
        """Note that a call has ended with a status of this name, and why it failed, as the caller is told.

        Of many that went well, or were refused before their message, alike, not each has a log line.
        """
        seconds = time.monotonic() - call.began
        self.metrics.ended(call, code, seconds, reason=reason)
        if self._tracer is not None:
            self._tracer.record(call, code, reason)
        if call.writes:
            self._audit.record(call, code, seconds)
        if refused and not self._has_line(f"were refused: {code} {reason}"):
            return
        if code == "OK" and not self._every and not self._has_line(f"were answered: {call.rpc} {code}"):
            return
        told = {"rpc": call.rpc, "code": code, "milliseconds": round(seconds * 1e3, 3), "inputs": call.inputs}
        if call.client:
            told["client"] = call.client
        if reason:
            told |= {"reason": reason, "error": error, "peer": told_peer(call.peer)}
        logger.info("%s %s", call.rpc, code, extra=told)

    def _has_line(self, what: str) -> bool:
        """Count a call of a kind; tell whether it is among the first of them in this second."""
        now = int(time.monotonic())
        with self._lock:
            second, seen = self._alike.get(what, (now, 0))
            if second != now and seen > MOST_LINES:
                logger.info("%d more calls %s", seen - MOST_LINES, what, extra={"calls": seen - MOST_LINES})
            self._alike[what] = (now, seen + 1 if second == now else 1)
            return second != now or seen < MOST_LINES


def told_peer(peer: str) -> str:
    """Write where a call came from as people do: gRPC has `ipv6:%5B::1%5D:50412` for `[::1]:50412`."""
    return unquote(peer.partition(":")[2])
