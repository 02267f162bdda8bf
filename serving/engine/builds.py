"""Rebuilds of indexes: each in a thread of its own, which can be left, and which no stop waits for."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context

from serving.errors import DeadlineExceeded, Overloaded

__all__ = ["Build", "Builds"]

MOST_BUILDS = 2
"""Most rebuilds at once; each takes every core, and memory for all vectors of its gallery."""


class Build:
    """One rebuild: how far it is, and whether anybody waits for it still.

    Attributes:
        reached: Its stage, and how much of how much of that is done.
        changed: Set when that is something else; belongs to the event loop in which this was made.
    """

    def __init__(self, deadline: float | None) -> None:
        """Note the `time.monotonic()` until which somebody waits; None for ever."""
        self.reached = ("wait", 0, 0)
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._left = False

    def advance(self, stage: str, done: int, total: int) -> None:
        """Note how far it is; called by the thread that does it.

        Raises:
            DeadlineExceeded: if nobody waits for it any more; that ends the work.
        """
        if self._left or (self._deadline is not None and time.monotonic() >= self._deadline):
            raise DeadlineExceeded("The index was not made anew in the time that the call had.")
        if self.reached == (stage, done, total):
            return
        self.reached = (stage, done, total)
        if not self.changed.is_set():  # whoever waits clears it, and then looks
            with suppress(RuntimeError):  # the loop was closed while FAISS was at it
                self._loop.call_soon_threadsafe(self.changed.set)

    def leave(self) -> None:
        """Wait for it no longer; it ends at its next step."""
        self._left = True


class Builds:
    """Belongs to one event loop.

    The threads are daemons: a step of FAISS may take minutes and cannot be broken off, and what is made aside
    is thrown away when the process ends.
    """

    def __init__(self, most: int = MOST_BUILDS) -> None:
        """Start none yet.

        Args:
            most: Most at once; one that was left counts until it has ended.
        """
        self._most = most
        self._running = 0

    def start(self, name: str, function: Callable[[], None]) -> "asyncio.Future[None]":
        """Run a rebuild in a thread.

        Args:
            name: Of the gallery; ends the thread's name.
            function: What is done, which asks `Build.advance` now and then.

        Returns:
            What is done when it is, or has what it raised.

        Raises:
            Overloaded: if so many run already.
        """
        if self._running >= self._most:
            raise Overloaded(
                f"{self._running} indexes are being made, the most at once; try again later.", retry_after=5.0
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        context = copy_context()  # the request id of log lines

        def settle(error: BaseException | None) -> None:
            self._running -= 1
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()  # looked at: nobody may be left to do so

        def work() -> None:
            error: BaseException | None = None
            try:
                context.run(function)
            except BaseException as raised:  # the caller's to sort out
                error = raised
            with suppress(RuntimeError):  # the loop was closed while FAISS was at it
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=work, name=f"gallery-build {name}", daemon=True).start()
        self._running += 1
        return done
