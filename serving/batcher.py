"""Gathers single items into batches for workers; knows neither what an item is nor what is computed."""

import asyncio
import copy
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    """A bounded queue in front of one or several worker threads.

    A batch starts as soon as a worker is free, unless there is room in it for an item that is said to be on
    its way: then it waits for that, until the oldest item has waited `max_wait` seconds. What waits is shared
    among the workers that are free; while they compute, the next batch gathers. Flows take turns, an item
    each, so that one with many items holds up none with few; within a flow, items keep their order. Every
    submitted item ends with exactly one outcome. An item that was cancelled or whose deadline has passed is
    dropped before its batch starts. Should the batcher itself fail, every item that waits fails with it, and
    every later one at once. Belongs to the event loop in which `start` was awaited.

    Attributes:
        max_batch: Most items in one batch; may be changed at any time.
        lanes: Workers that compute at once; may be changed until the start.
    """

    def __init__(
        self,
        compute: Callable[[list[Item]], Sequence[Result]],
        *,
        max_batch: int,
        max_wait: float,
        capacity: int,
        begin: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the limits.

        Args:
            compute: Runs in a worker thread; gives one result an item, in order.
            max_batch: Most items in one batch.
            max_wait: Longest time in seconds that an item waits for one that is on its way.
            capacity: Most items that wait; one more is refused.
            begin: Called in each worker thread before anything else.
            failed: Called once, in the event loop, should the batcher itself fail.

        Raises:
            ValueError: if a limit makes no sense.
        """
        if max_batch < 1 or capacity < 1 or max_wait < 0:
            raise ValueError(f"max_batch={max_batch}, capacity={capacity}, max_wait={max_wait} cannot batch")
        self._compute = compute
        self.max_batch = max_batch
        self.lanes = 1
        self._max_wait = max_wait
        self._capacity = capacity
        self._begin = begin
        self._failed = failed
        self._flows: OrderedDict[Hashable, deque[_Entry[Item, Result]]] = (
            OrderedDict()
        )  # that whose turn it is first
        self._waiting = 0
        self._coming = 0
        self._running: dict[asyncio.Task[None], list[_Entry[Item, Result]]] = {}
        self._changed = asyncio.Event()
        self._workers: ThreadPoolExecutor | None = None
        self._stopping = False
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to form batches in the running event loop.

        Raises:
            RuntimeError: if it was started before.
        """
        if self._loop_task is not None:
            raise RuntimeError("a batcher is started once")
        self._workers = ThreadPoolExecutor(self.lanes, "batcher", initializer=self._begin)
        self._loop_task = asyncio.create_task(self._run(), name="batcher")
        self._loop_task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Refuse new items, finish those that wait, and end the workers."""
        self._stopping = True
        self._changed.set()
        if self._loop_task is not None:
            await asyncio.wait([self._loop_task])
        while self._running:
            await asyncio.wait(list(self._running))
        if self._workers is not None:
            await asyncio.to_thread(self._workers.shutdown)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Say while the block runs that an item is on its way, for which a batch may wait a little."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1
            self._changed.set()

    def submit(
        self, item: Item, deadline: float | None = None, *, flow: Hashable = None
    ) -> "asyncio.Future[Computed[Result]]":
        """Put an item at the end of its flow's queue.

        Args:
            item: What `compute` is to see.
            deadline: The `time.monotonic()` after which nobody wants the result.
            flow: Whom the item belongs to; each flow gets its turn.

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
        if self._waiting >= self._capacity:
            self._sweep()
        if self._waiting >= self._capacity:
            raise Overloaded(
                f"{self._capacity} items wait for the model, which is the most; try again later."
            )
        future: asyncio.Future[Computed[Result]] = asyncio.get_running_loop().create_future()
        self._flows.setdefault(flow, deque()).append(_Entry(item, deadline, time.monotonic(), future))
        self._waiting += 1
        self._changed.set()
        return future

    def __len__(self) -> int:
        return self._waiting

    async def _run(self) -> None:
        while await self._gather():
            batch = self._next_batch()
            if batch:
                task = asyncio.create_task(self._answer(batch), name="batch")
                self._running[task] = batch
                task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        del self._running[task]
        self._changed.set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Leave nobody waiting for a batcher that runs no more."""
        error = None if task.cancelled() else task.exception()
        if error is None and self._stopping and not task.cancelled():
            return
        logger.critical("the batcher has failed, and no image can be embedded any more", exc_info=error)
        for entries in (*self._running.values(), *self._flows.values()):
            for entry in entries:
                if not entry.future.done():
                    entry.future.set_exception(_failure())
        self._flows.clear()
        self._waiting = 0
        self._failed()

    async def _gather(self) -> bool:
        """Wait until a batch is due; False when there will be none any more."""
        while not self._waiting or len(self._running) >= self.lanes:
            if self._stopping and not self._waiting:
                return False
            self._changed.clear()
            await self._changed.wait()
        due = min(entries[0].submitted for entries in self._flows.values()) + self._max_wait
        while self._coming and self._waiting < self.max_batch and not self._stopping:
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
        """Take a worker's share of the items that somebody still waits for, one of each flow in turn."""
        batch: list[_Entry[Item, Result]] = []
        now = time.monotonic()
        share = min(self.max_batch, math.ceil(self._waiting / (self.lanes - len(self._running))))
        while self._flows and len(batch) < share:
            flow, entries = self._flows.popitem(last=False)
            entry = entries.popleft()
            self._waiting -= 1
            if entries:
                self._flows[flow] = entries
            if entry.future.done():
                continue
            if entry.deadline is not None and entry.deadline <= now:
                late = now - entry.submitted
                entry.future.set_exception(
                    DeadlineExceeded(
                        f"The deadline passed after {late:.3f} s in the queue, before the model ran."
                    )
                )
            else:
                batch.append(entry)
        return batch

    def _sweep(self) -> None:
        """Free the places of items that nobody waits for."""
        for flow, entries in list(self._flows.items()):
            kept = deque(entry for entry in entries if not entry.future.done())
            self._waiting -= len(entries) - len(kept)
            if kept:
                self._flows[flow] = kept
            else:
                del self._flows[flow]

    async def _answer(self, batch: list[_Entry[Item, Result]]) -> None:
        started = time.monotonic()
        try:
            results = list(
                await asyncio.get_running_loop().run_in_executor(
                    self._workers, self._compute, [entry.item for entry in batch]
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
