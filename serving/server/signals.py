"""A process that serves, from start to drained stop, and the signals that tell it to stop or to load anew."""

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from serving.cores import in_daemon
from serving.errors import CrossbatchError
from serving.observability.logs import flush_logs

if TYPE_CHECKING:
    from serving.server.server import Server
    from serving.server.supervisor import Supervisor

__all__ = ["Signals", "live", "reload_safely"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # between two looks at whether a signal has come
LAST_LINES_SECONDS = 0.2  # for the log of a process that ends at once


class Signals:
    """Listens to SIGTERM, SIGINT and SIGHUP of a process.

    Told to stop before it serves, or for the second time, the process ends at once with the status of one
    that the signal ended. Nothing is lost by that: what a gallery acknowledged is on disk.
    """

    def __init__(self, *, once: bool = False) -> None:
        """Listen from now on; `once` passes over a second signal to stop."""
        self._once = once
        self.serving = False
        self.stopping = False
        self._told: SimpleQueue[str] = SimpleQueue()  # its `put` is safe in a signal handler
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.stop(number))
        signal.signal(signal.SIGHUP, lambda *_: self._told.put("reload") if self.serving else None)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop, as if told by the signal of that number."""
        if not self.serving or (self.stopping and not self._once):
            self.end(number)
        self.stopping = True
        self._told.put("stop")

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the process at once, as if by the signal of that number."""
        flush_logs(LAST_LINES_SECONDS)
        os._exit(128 + number)

    def wait(self) -> str:
        """Wait until told to `stop` or to `reload`."""
        while True:
            with suppress(Empty):  # a signal just before Python begins to wait does not end the wait
                return self._told.get(timeout=LOOK_SECONDS)


def live(
    server: "Server | Supervisor",
    signals: Signals,
    grace: float,
    *,
    serving: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> float:
    """Serve until told to stop, then give running calls `grace` seconds; return how many seconds it served.

    `serving` is called when it serves, and `stopping` before it stops.

    Only in the main thread.
    """
    _keep_little()
    # Beside this thread, which would hear no signal while an engine loads a model.
    in_daemon(server.start).result()
    # What is there now stays, and looking through it for garbage takes tens of milliseconds each time, for
    # which every call waits.
    gc.collect()
    gc.freeze()
    signals.serving = True
    began = time.monotonic()
    serving()
    while signals.wait() == "reload":
        in_daemon(lambda: reload_safely(server))
    logger.info("draining for up to %g s", grace)
    stopping()
    server.stop(grace)
    if server.is_loading:
        atexit.register(_end_well)
    return time.monotonic() - began


def reload_safely(server: "Server | Supervisor") -> None:
    """Load anew; what fails is logged."""
    try:
        server.reload()
    except Exception as error:  # a bug that a reload shows must not end a server that answers
        bug = not isinstance(error, CrossbatchError)
        logger.error("nothing was loaded anew, everything stays as it is: %s", error, exc_info=bug)


def _end_well() -> None:
    """End the process while an engine is at work; Python would abort it (status 134) were it to finalize."""
    flush_logs()
    sys.stdout.flush()
    os._exit(0)


def _keep_little() -> None:
    """Tell glibc to keep little of what is freed: after many reloads of 16 MB, 240 MB instead of 350."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if option is not None:
        # M_ARENA_MAX: pools that threads allocate from. M_MMAP_THRESHOLD: bytes from which on a piece is the
        # system's again once it is free. M_TRIM_THRESHOLD: most bytes that a pool keeps at its end.
        for number, value in ((-8, 2), (-3, 4 << 20), (-1, 16 << 20)):
            option(number, value)
