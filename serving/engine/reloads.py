"""Reloads that many may ask for: one runs, one waits, and all who ask meanwhile share the one that waits."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from serving.errors import CrossbatchError, Draining

__all__ = ["Reloads"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reloads(Generic[T]):
    """Belongs to one event loop. What was begun is carried through though all who asked for it leave."""

    def __init__(self, reload: Callable[[], Awaitable[T]]) -> None:
        """Keep what loads anew; nothing runs yet."""
        self._reload = reload
        self._running: asyncio.Task[T] | None = None
        self._waiting: asyncio.Task[T] | None = None
        self._callers: Counter[asyncio.Task[T]] = Counter()
        self._closed = False

    async def ask(self) -> T:
        """Load anew what is there now; all who ask before that has begun share what comes of it.

        Raises:
            Draining: if the server is stopping.
            CrossbatchError: if it failed, the same for all of them.
        """
        if self._closed:
            raise _draining()
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._run(self._running), name="reload")
            self._waiting.add_done_callback(self._ended)
        task = self._waiting
        self._callers[task] += 1
        try:
            await asyncio.wait([task])  # which leaves it alone when the caller leaves
        finally:
            self._callers[task] -= 1
            if not self._callers[task]:
                del self._callers[task]
        if task.cancelled():
            raise _draining()
        return task.result()

    def close(self) -> None:
        """Begin none any more; who asks, or waits for one to begin, is told that the server stops."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def end(self) -> None:
        """Close, and break off the one that runs."""
        self.close()
        if tasks := [task for task in (self._running, self._waiting) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, before: "asyncio.Task[T] | None") -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._waiting = self._waiting, None
        return await self._reload()

    def _ended(self, task: "asyncio.Task[T]") -> None:
        if self._running is task:
            self._running = None
        if self._waiting is task:  # cancelled before it began
            self._waiting = None
        error = None if task.cancelled() else task.exception()
        if error is None or self._callers[task]:  # they tell what it is
            return
        if isinstance(error, CrossbatchError):
            logger.error("nothing was loaded anew, everything stays as it is: %s", error)
        else:
            logger.error("nothing was loaded anew, everything stays as it is", exc_info=error)


def _draining() -> Draining:
    return Draining("The server is stopping and loads nothing any more; try another one.")
