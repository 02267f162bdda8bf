"""A process that serves, from start to drained stop, and the signals that tell it to stop or to load anew."""

import ctypes
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
from typing import Any, Protocol

from serving.errors import CrossbatchError
from serving.observability.logs import flush_logs

__all__ = ["Serves", "Signals", "ignore_hangups", "live", "reload_safely"]

logger = logging.getLogger(__name__)

LAST_LINES_SECONDS = 0.2  # for the log of a process that ends at once


class Serves(Protocol):
    """A server, or a supervisor of several."""

    @property
    def address(self) -> str:
        """Where it answers, as `host:port`."""

    def start(self) -> None:
        """Load everything and answer."""

    def stop(self, grace: float) -> None:
        """Finish what runs, within that many seconds, and end."""

    def reload(self) -> Any:
        """Load models and galleries anew, without dropping a call."""


def ignore_hangups() -> None:
    """Let no SIGHUP end the process, which it does by default; for the time until there are `Signals`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Signals:
    """Listens to SIGTERM, SIGINT and SIGHUP of a process.

    Told to stop before it is ready, or for the second time, the process ends at once with the status of a
    process that the signal ended. Nothing is lost by that: what a gallery acknowledged is on disk.
    """

    def __init__(self, *, once: bool = False) -> None:
        """Listen from now on.

        Args:
            once: Whether to pass over a second signal to stop, as a worker does: systemd tells it, too.
        """
        self._once = once
        self.ready = False
        self.stopping = False
        self._told: SimpleQueue[bool] = SimpleQueue()  # True: stop; its `put` is safe in a signal handler
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)
        signal.signal(signal.SIGHUP, self._hung_up)

    def stop(self, number: int) -> None:
        """Stop, as if told by the signal of that number."""
        if not self.ready or (self.stopping and not self._once):
            self.end(number)
        self.stopping = True
        self._told.put(True)

    def end(self, number: int) -> None:
        """End the process at once, as if by the signal of that number."""
        flush_logs(LAST_LINES_SECONDS)
        os._exit(128 + number)

    def wait(self) -> bool:
        """Wait for the next one; tell whether it says to stop, or else to load anew."""
        return self._told.get()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.stop(number)

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        if self.ready:
            self._told.put(False)


def live(server: Serves, signals: Signals, grace: float, *, serving: Callable[[], None]) -> None:
    """Serve until told to stop; only in the main thread.

    Args:
        server: What to start and stop.
        signals: Of this process.
        grace: Seconds that running calls have once it is told to stop.
        serving: Called when it answers.
    """
    _keep_little()
    started: Future[None] = Future()

    def start() -> None:
        try:
            server.start()
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)

    # Beside this thread, which would hear no signal while an engine loads a model.
    threading.Thread(target=start, name="start", daemon=True).start()
    started.result()
    # What is there now stays, and looking through it for garbage takes tens of milliseconds each time, for
    # which every call waits.
    gc.collect()
    gc.freeze()
    signals.ready = True
    serving()
    while not signals.wait():
        threading.Thread(target=reload_safely, args=(server,), name="reload", daemon=True).start()
    logger.info("draining for up to %g s", grace)
    server.stop(grace)


def reload_safely(server: Serves) -> None:
    """Load anew; what fails is logged."""
    try:
        server.reload()
    except CrossbatchError as error:
        logger.error("nothing was loaded anew, everything stays as it is: %s", error)
    except Exception:  # a bug that a reload shows must not end a server that answers
        logger.exception("nothing was loaded anew, everything stays as it is")


def _keep_little() -> None:
    """Tell glibc's allocator to keep little of what is freed.

    By default each new thread may begin a pool of its own, up to eight for each core: a server with a model
    of 16 MB that is loaded anew again and again holds about 350 MB without this, and 240 MB with it.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if option is not None:
        # M_ARENA_MAX: pools that threads allocate from. M_MMAP_THRESHOLD: bytes from which on a piece is the
        # system's again once it is free. M_TRIM_THRESHOLD: most bytes that a pool keeps at its end.
        for number, value in ((-8, 2), (-3, 4 << 20), (-1, 16 << 20)):
            option(number, value)
