"""Threads with a bounded queue, for work that must not hold up the event loop."""

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from serving.engine.priority import step_back
from serving.errors import DeadlineExceeded, Draining, Overloaded

__all__ = ["Threads", "Workers", "check_time"]

P = ParamSpec("P")
T = TypeVar("T")

# Set for each job: tells whether anybody waits for it still.
_caller_left: ContextVar[Callable[[], bool]] = ContextVar("caller_left", default=lambda: False)

# Jobs that are handed to each thread; the second one spares it a wait for the event loop between two.
_HANDED = 2


def check_time(deadline: float | None, what: str) -> None:
    """Give up work that nobody waits for.

    Args:
        deadline: The `time.monotonic()` until which somebody waits; None for ever.
        what: What is not done when it is too late, as "the images were decoded".

    Raises:
        DeadlineExceeded: if it has passed, or the caller of the `Workers` job that this is part of has left.
    """
    if _caller_left.get()():
        raise DeadlineExceeded(f"The caller left before {what}.")
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceeded(f"The deadline passed before {what}.")


class Workers:
    """Belongs to one event loop.

    A job whose caller leaves while it waits gives up its place at once, with all that it holds; the one or
    two that each thread has been handed are dropped when it comes to them. One that runs ends at its next
    `check_time`, so that a stop does not wait for work whose callers have been cancelled.
    """

    def __init__(
        self, name: str, threads: int, *, most: int, what: str, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Make the threads as they are needed.

        Args:
            name: Begins the threads' names.
            threads: Most threads.
            most: Most jobs that wait or run.
            what: What a job does, as "the images were decoded".
            begin: Called in each thread before anything else.
        """
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, name, initializer=begin)
        self._most = most
        self._what = what
        self._handed = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def __len__(self) -> int:
        return self._handed + len(self._waiting)

    async def run(
        self, deadline: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function in a thread, unless by the time there is one its caller has left or is late.

        Raises:
            Overloaded: if the queue is full.
            DeadlineExceeded: if the deadline passed before a thread was free.
        """
        if len(self) >= self._most:
            raise Overloaded(f"{len(self)} jobs wait until {self._what}, the most; try again later.")
        left = False
        context = copy_context()  # the request id of log lines
        context.run(_caller_left.set, lambda: left)

        def work() -> T:
            context.run(check_time, deadline, self._what)
            return context.run(function, *args, **kwargs)

        try:
            check_time(deadline, self._what)
            await self._turn()
            return await self._done(work)
        finally:
            left = True

    def close(self) -> None:
        """Finish what runs and end the threads; blocks."""
        self._executor.shutdown(wait=True)

    def _done(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Hand a job to a thread; the future may be cancelled, which the job does not notice."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def end(outcome: Callable[[], None]) -> None:
            self._pass_on()
            if not ended.done():
                outcome()

        def job() -> None:
            # One call into the loop is all that a job costs it; `wrap_future` takes several.
            try:
                outcome = partial(ended.set_result, work())
            except BaseException as error:
                outcome = partial(ended.set_exception, error)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, outcome)

        try:
            self._executor.submit(job)
        except RuntimeError as error:  # it has been closed
            self._pass_on()
            raise Draining("The server is stopping and takes no new work; try another one.") from error
        return ended

    async def _turn(self) -> None:
        """Wait until a thread can be handed a job, first come first served."""
        if self._handed < _HANDED * self.threads:
            self._handed += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(turn, None)
            else:  # its turn had come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Let the next one have its turn."""
        while self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._handed -= 1


class Threads:
    """The threads that all models share."""

    def __init__(self, decode: int, *, most: int) -> None:
        """Make them as they are needed.

        Args:
            decode: Threads that decode.
            most: Most images that wait or are decoded.
        """
        self.decode = Workers("decode", decode, most=most, what="the image was decoded", begin=step_back)
        self.window = 2 * decode
        """Most images of one call that wait or are decoded, so that one with many keeps no other waiting."""
        self.explain = Workers("explain", 1, most=most, what="the images were explained", begin=step_back)
        self._loading: threading.Thread | None = None

    async def load(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what loads or tries a model; the threads that this makes for its runs step back as well.

        In a daemon, since none of it can be broken off, and a stop must not wait for what nobody waits for.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[T] = loop.create_future()

        def settle(outcome: Callable[[], None]) -> None:
            if not loaded.done():
                outcome()

        def work() -> None:
            step_back()
            try:
                outcome = partial(loaded.set_result, function(*args, **kwargs))
            except BaseException as error:
                outcome = partial(loaded.set_exception, error)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle, outcome)

        thread = threading.Thread(target=work, name="load", daemon=True)
        thread.start()
        self._loading = thread
        return await loaded

    def close(self) -> None:
        """Finish what runs and end the threads, but one that loads; blocks."""
        self.decode.close()
        self.explain.close()
        if self._loading is not None and self._loading.is_alive():
            atexit.register(_end_before, self._loading)


def _end_before(thread: threading.Thread) -> None:
    """End the process while an engine is at work; Python would abort it (status 134) were it to finalize."""
    if thread.is_alive():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
