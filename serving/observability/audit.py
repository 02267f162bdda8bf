"""A line for each write: who did what to which gallery, and what came of it."""

import json
import logging
import threading
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from serving.observability.lines import Lines
from serving.observability.logs import request_id
from serving.rpc.access import identity
from serving.rpc.address import told_peer
from serving.rpc.roles import is_write

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
        self._room = threading.BoundedSemaphore(_MOST_WAITING)
        self._waiting: SimpleQueue[tuple[str, Future[None]] | None] = SimpleQueue()
        self._complained = False
        # A thread, since a disk may hang; one, so that lines keep their order. The process ends without it if
        # need be, which it would not without one of a pool.
        self._writer = threading.Thread(target=self._write, name="audit", daemon=True)
        if self._file is not None:
            self._writer.start()

    def record(
        self, rpc: str, request: Any, code: str, *, peer: str, seconds: float = 0.0
    ) -> Future[None] | None:
        """Note a write that has ended, well or not; other calls are passed over.

        Args:
            rpc: Service and method, such as `GalleryService/UpsertItems`.
            request: Its message; None if it was not read, since the caller was refused or it could not be.
            code: Name of the status that it ended with.
            peer: Where it came from, as gRPC writes it.
            seconds: How long it took.

        Returns:
            What is done when the line is in the file; None where nothing is to be waited for.
        """
        if not is_write(rpc):
            return None
        told = {
            "client": identity.get().name,
            "peer": told_peer(peer),
            "rpc": rpc,
            **_target(request),
            "code": code,
            "seconds": round(seconds, 6),
        }
        logger.info("%s by %s: %s", rpc, told["client"] or "a caller without a key", code, extra=told)
        if self._file is None:
            return None
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": stamp, **told, "request_id": request_id.get()})
        if not self._room.acquire(blocking=False):
            logger.error("%d lines wait for %s; this one is in the log only", _MOST_WAITING, self._file)
            return None
        written = Future[None]()
        self._waiting.put((line, written))
        return written

    def complain(self) -> None:
        """Say in the log, once until a line is written again, that the file takes too long."""
        if not self._complained:
            self._complained = True
            logger.error(
                "%s took more than %g s to take a line; calls go on, with their lines in the log",
                self._file,
                self.LONGEST_WAIT,
            )

    def close(self) -> None:
        """Write what waits, for `LONGEST_WAIT` at most, and close the file."""
        if self._file is None:
            return
        self._waiting.put(None)
        self._writer.join(self.LONGEST_WAIT)
        if self._writer.is_alive():
            # The end, which waits too, stands for the line that is being written.
            lost = self._waiting.qsize()
            logger.error(
                "%s takes no more lines; it lacks the last %d, which are in the log", self._file, lost
            )
        else:
            self._file.close()

    def _write(self) -> None:
        while (waiting := self._waiting.get()) is not None and self._file is not None:
            line, written = waiting
            wanted = written.set_running_or_notify_cancel()
            try:
                self._file.add(line)
            finally:
                self._room.release()
                self._complained = False
                if wanted:
                    written.set_result(None)


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
