"""A line for each write: who did what to which gallery, and what came of it."""

import json
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.rpc.gate.access import identity
from serving.rpc.gate.lines import Lines
from serving.rpc.gate.roles import is_write
from serving.telemetry import request_id

__all__ = ["Audit"]

logger = logging.getLogger("crossbatch.audit")
logger.setLevel(logging.INFO)  # whatever the level of the other logs

_LONGEST_NAME = 200  # characters; what a request calls a gallery has any length
_MOST_WAITING = 10_000  # lines


class Audit:
    """Writes a line for each write that has ended, well or not, to the log and, if asked to, to a file.

    What holds: a write is acknowledged after its line was handed to the file system, so that a server that is
    killed leaves no acknowledged write without its line (a power cut can: lines are not synced). A file that
    cannot be written, or takes longer than `LONGEST_WAIT`, fails no call: the line is in the log.
    """

    LONGEST_WAIT = 1.0  # seconds

    def __init__(self, path: Path | None = None) -> None:
        """Open the file.

        Args:
            path: Of the file that lines are added to, beside the log.

        Raises:
            CrossbatchError: if it cannot be written.
        """
        self._file = None if path is None else Lines(path)
        # A thread, since a disk may hang; one, so that lines keep their order.
        self._writer = None if path is None else ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._room = threading.BoundedSemaphore(_MOST_WAITING)

    def record(
        self, rpc: str, request: Any, code: str, *, peer: str, seconds: float = 0.0
    ) -> Future[None] | None:
        """Note a write that has ended, well or not; other calls are passed over.

        Args:
            rpc: Service and method, such as `GalleryService/UpsertItems`.
            request: Its message; None if it was not read, since the caller was refused or it could not be.
            code: Name of the status that it ended with.
            peer: Where it came from.
            seconds: How long it took.

        Returns:
            What is done when the line is in the file; None where nothing is to be waited for.
        """
        if not is_write(rpc):
            return None
        told = {
            "client": identity.get().name,
            "peer": peer,
            "rpc": rpc,
            **_target(request),
            "code": code,
            "seconds": round(seconds, 6),
        }
        logger.info("%s by %s: %s", rpc, told["client"] or "a caller without a key", code, extra=told)
        if self._file is None or self._writer is None:
            return None
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": stamp, **told, "request_id": request_id.get()})
        if not self._room.acquire(blocking=False):
            logger.error("%d lines wait for %s; this one is in the log only", _MOST_WAITING, self._file)
            return None
        written = self._writer.submit(self._file.add, line)
        written.add_done_callback(lambda _: self._room.release())
        return written

    def close(self) -> None:
        """Write what waits, and close the file."""
        if self._writer is not None and self._file is not None:
            self._writer.shutdown()
            self._file.close()


def _target(request: Any) -> dict[str, Any]:
    """What a request is about: names and numbers, never what it holds."""
    gallery = getattr(request, "gallery", "") or getattr(request, "name", "")
    inputs = getattr(request, "items", getattr(request, "keys", None))
    target: dict[str, Any] = {
        "gallery": _shortened(gallery),
        "count": None if inputs is None else len(inputs),
    }
    if other := getattr(request, "other", ""):
        target["other"] = _shortened(other)
    return target


def _shortened(name: str) -> str | None:
    return name[:_LONGEST_NAME] or None
