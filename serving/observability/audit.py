"""A line for each write: who did what to which gallery, and what came of it."""

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.gallery.disk import disk_error
from serving.observability.call import Call
from serving.observability.logs import request_id

__all__ = ["AuditLog"]

logger = logging.getLogger("crossbatch.audit")
logger.setLevel(logging.INFO)  # whatever the level of the other logs

_LONGEST_NAME = 200  # characters; what a request calls a gallery has any length


class AuditLog:
    """Writes a line for each write that has ended, well or not, to the log and, if asked to, to a file.

    A write is acknowledged after its line was handed to the file system, so that a server that is killed
    leaves no acknowledged write without its line. A file that cannot be written fails no call.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Find out whether the file can be written that lines are added to, beside the log.

        Raises:
            CrossbatchError: if it cannot.
        """
        self._path = None if path is None else path.absolute()
        self._lost = 0
        if self._path is not None:
            try:
                _append(self._path, b"")
            except OSError as error:
                raise disk_error(error, f"the file {path}") from error

    def record(self, call: Call, code: str, seconds: float, peer: str) -> None:
        """Note a write that has ended."""
        told = {
            "client": call.client,
            "peer": peer,
            "rpc": call.rpc,
            **_target(call.request),
            "code": code,
            "seconds": round(seconds, 6),
        }
        logger.info("%s by %s: %s", call.rpc, call.client or "a caller without a key", code, extra=told)
        if self._path is not None:
            stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            line = json.dumps({"time": stamp, **told, "request_id": request_id.get()})
            self._add(self._path, f"{line}\n".encode())

    def _add(self, path: Path, line: bytes) -> None:
        try:
            # What a full disk left of a line gets its end first.
            _append(path, b"\n" + line if self._lost else line)
        except OSError as error:
            if not self._lost:
                logger.error(
                    "%s cannot be written (%s); calls go on, with their lines in the log", path, error
                )
            self._lost += 1
        else:
            if self._lost:
                logger.warning("%s is written again; it lacks %d lines", path, self._lost)
            self._lost = 0


def _append(path: Path, data: bytes) -> None:
    """Add to a file by one write, which several processes tear not; logrotate may have renamed it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if written < len(data):
        raise OSError(f"{written} of {len(data)} bytes had room")


def _target(request: Any) -> dict[str, Any]:
    """What a request is about: names and numbers, never what it holds."""
    inputs = getattr(request, "items", getattr(request, "keys", None))
    target: dict[str, Any] = {
        "gallery": _shortened(getattr(request, "gallery", "") or getattr(request, "name", "")),
        "count": None if inputs is None else len(inputs),
    }
    if other := getattr(request, "other", ""):
        target["other"] = _shortened(other)
    return target


def _shortened(name: str) -> str | None:
    return name[:_LONGEST_NAME] or None
