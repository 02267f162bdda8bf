"""Threads with a bounded queue, for work that must not hold up the event loop."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import ParamSpec, TypeVar

from serving.errors import DeadlineExceeded, Overloaded

__all__ = ["Workers", "check_time"]

P = ParamSpec("P")
T = TypeVar("T")

# Set for each job: tells whether anybody waits for it still.
_caller_left: ContextVar[Callable[[], bool]] = ContextVar("caller_left", default=lambda: False)


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

    A job whose caller has left stays in the queue until a thread comes by and drops it. It counts until then,
    which is why a flood of calls that are given up cannot fill the memory. One that runs ends at its next
    `check_time`, so that a stop does not wait for work whose callers have been cancelled.
    """

    def __init__(self, name: str, threads: int, *, most: int, what: str) -> None:
        """Make the threads as they are needed.

        Args:
            name: Begins the threads' names.
            threads: Most threads.
            most: Most jobs that wait or run.
            what: What a job does, as "the images were decoded".
        """
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = most
        self._what = what
        self._jobs = 0

    async def run(
        self, deadline: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function in a thread, unless by the time there is one its caller has left or is late.

        Raises:
            Overloaded: if the queue is full.
            DeadlineExceeded: if the deadline passed before a thread was free.
        """
        if self._jobs >= self._most:
            raise Overloaded(f"{self._jobs} jobs wait until {self._what}, the most; try again later.")
        left = False
        context = copy_context()  # the request id of log lines
        context.run(_caller_left.set, lambda: left)

        def job() -> T:
            context.run(check_time, deadline, self._what)
            return context.run(function, *args, **kwargs)

        running = asyncio.wrap_future(self._executor.submit(job))
        self._jobs += 1
        running.add_done_callback(self._finished)
        try:
            return await asyncio.shield(running)
        finally:
            left = True

    def close(self) -> None:
        """Finish what runs and end the threads; blocks."""
        self._executor.shutdown(wait=True)

    def _finished(self, job: "asyncio.Future[T]") -> None:
        self._jobs -= 1
