"""Gathers single items into batches for one worker; knows neither what an item is nor what is computed."""

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from serving.errors import DeadlineExceeded, Draining, Overloaded, Unavailable

__all__ = ["Batcher", "Computed"]

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Computed(Generic[Result]):
    """What became of one item, and the seconds it spent on the way."""

    result: Result
    waited: float
    computed: float


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item, Result]):
    item: Item
    deadline: float | None
    submitted: float
    future: "asyncio.Future[Computed[Result]]"


class Batcher(Generic[Item, Result]):
    """A bounded first-in-first-out queue in front of one worker thread.

    A batch starts when `max_batch` items wait or the oldest has waited `max_wait` seconds, whichever is
    first; while a batch is computed, the next one gathers. Every submitted item ends with exactly one
    outcome. An item that was cancelled or whose deadline has passed is dropped before its batch starts.
    Should the batcher itself fail, every item that waits fails with it, and every later one at once. Belongs
    to the event loop in which `start` was awaited.
    """

    def __init__(
        self,
        compute: Callable[[list[Item]], Sequence[Result]],
        *,
        max_batch: int,
        max_wait: float,
        capacity: int,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the limits.

        Args:
            compute: Runs in the worker thread; gives one result an item, in order.
            max_batch: Most items in one batch.
            max_wait: Longest time in seconds that an item waits for company.
            capacity: Most items that wait; one more is refused.
            failed: Called once, in the event loop, should the batcher itself fail.

        Raises:
            ValueError: if a limit makes no sense.
        """
        if max_batch < 1 or capacity < 1 or max_wait < 0:
            raise ValueError(f"max_batch={max_batch}, capacity={capacity}, max_wait={max_wait} cannot batch")
        self._compute = compute
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._capacity = capacity
        self._failed = failed
        self._queue: deque[_Entry[Item, Result]] = deque()
        self._batch: list[_Entry[Item, Result]] = []
        self._changed = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batcher")
        self._stopping = False
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to form batches in the running event loop.

        Raises:
            RuntimeError: if it was started before.
        """
        if self._loop_task is not None:
            raise RuntimeError("a batcher is started once")
        self._loop_task = asyncio.create_task(self._run(), name="batcher")
        self._loop_task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Refuse new items, finish those that wait, and end the worker."""
        self._stopping = True
        self._changed.set()
        if self._loop_task is not None:
            await asyncio.wait([self._loop_task])
        await asyncio.to_thread(self._worker.shutdown)

    def submit(self, item: Item, deadline: float | None = None) -> "asyncio.Future[Computed[Result]]":
        """Put an item at the end of the queue.

        Args:
            item: What `compute` is to see.
            deadline: The `time.monotonic()` after which nobody wants the result.

        Returns:
            A future of the item's outcome; cancel it to withdraw the item.

        Raises:
            Draining: if the batcher is stopping.
            Unavailable: if it has failed.
            Overloaded: if the queue is full.
        """
        if self._stopping or self._loop_task is None:
            raise Draining("The server is stopping and takes no new work; try another one.")
        if self._loop_task.done():
            raise _failure()
        if len(self._queue) >= self._capacity:
            self._queue = deque(entry for entry in self._queue if not entry.future.done())
        if len(self._queue) >= self._capacity:
            raise Overloaded(
                f"{self._capacity} items wait for the model, which is the most; try again later."
            )
        future: asyncio.Future[Computed[Result]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Entry(item, deadline, time.monotonic(), future))
        self._changed.set()
        return future

    def __len__(self) -> int:
        return len(self._queue)

    async def _run(self) -> None:
        while await self._gather():
            self._batch = self._next_batch()
            if self._batch:
                await self._answer(self._batch)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Leave nobody waiting for a batcher that runs no more."""
        error = None if task.cancelled() else task.exception()
        if error is None and self._stopping and not task.cancelled():
            return
        logger.critical("the batcher has failed, and no image can be embedded any more", exc_info=error)
        for entry in (*self._batch, *self._queue):
            if not entry.future.done():
                entry.future.set_exception(_failure())
        self._queue.clear()
        self._failed()

    async def _gather(self) -> bool:
        """Wait until a batch is due; False when there will be none any more."""
        while not self._queue:
            if self._stopping:
                return False
            self._changed.clear()
            await self._changed.wait()
        due = self._queue[0].submitted + self._max_wait
        while len(self._queue) < self._max_batch and not self._stopping:
            left = due - time.monotonic()
            if left <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        return True

    def _next_batch(self) -> list[_Entry[Item, Result]]:
        """Take up to `max_batch` items that somebody still waits for."""
        batch: list[_Entry[Item, Result]] = []
        now = time.monotonic()
        while self._queue and len(batch) < self._max_batch:
            entry = self._queue.popleft()
            if entry.future.done():
                continue
            if entry.deadline is not None and entry.deadline <= now:
                late = now - entry.submitted
                entry.future.set_exception(
                    DeadlineExceeded(
                        f"The deadline passed after {late:.3f} s in the queue, before the model ran."
                    )
                )
                continue
            batch.append(entry)
        return batch

    async def _answer(self, batch: list[_Entry[Item, Result]]) -> None:
        started = time.monotonic()
        try:
            results = list(
                await asyncio.get_running_loop().run_in_executor(
                    self._worker, self._compute, [entry.item for entry in batch]
                )
            )
            if len(results) != len(batch):
                raise RuntimeError(
                    f"{len(batch)} items went into a batch and {len(results)} results came out"
                )
        except Exception as error:
            for entry in batch:
                if not entry.future.done():
                    entry.future.set_exception(_copy_of(error))
            return
        took = time.monotonic() - started
        for entry, result in zip(batch, results, strict=True):
            if not entry.future.done():
                entry.future.set_result(Computed(result, started - entry.submitted, took))


def _failure() -> Unavailable:
    return Unavailable("The server can embed no image any more; its log tells why. Start it again.")


def _copy_of(error: Exception) -> Exception:
    """One exception for each waiter: a shared one would gather the traceback of every task that raises it."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error
    twin.__cause__ = error
    return twin
