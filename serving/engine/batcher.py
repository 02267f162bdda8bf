"""Gathers single items into batches for workers; knows neither what an item is nor what is computed."""

import asyncio
import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from serving.engine.fair_queue import Entry, FairQueue
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


_Batch: TypeAlias = list[Entry[Item, Computed[Result]]]


class Batcher(Generic[Item, Result]):
    """A bounded queue in front of one or several worker threads.

    A batch starts as soon as a worker is free, unless there is room in it for an item that is said to be on
    its way: then it waits for that, until the oldest item has waited `max_wait` seconds. What waits is shared
    among the workers that are free; while they compute, the next batch gathers, and the worker that ends
    first takes it by itself. Flows take turns, an item each, so that one with many items holds up none with
    few; within a flow, items keep their order. Every submitted item ends with exactly one outcome. An item
    that was cancelled or whose deadline has passed is dropped before its batch starts. Should the batcher
    itself fail, every item that waits fails with it, and every later one at once. Belongs to the event loop
    in which `start` was awaited.

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
        self._waiting = FairQueue[Item, Computed[Result]]()
        self._busy = 0
        self._guard = threading.Lock()  # of the number of busy workers, and of what is taken for one more
        self._coming = 0
        self._running: list[_Batch[Item, Result]] = []
        self._broken: Exception | None = None
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
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
        self._loop = asyncio.get_running_loop()
        self._workers = ThreadPoolExecutor(self.lanes, "batcher", initializer=self._begin)
        self._loop_task = asyncio.create_task(self._run(), name="batcher")
        self._loop_task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Refuse new items, finish those that wait, and end the workers."""
        self._stopping = True
        self._changed.set()
        if self._loop_task is not None:
            await asyncio.wait([self._loop_task])
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
        if len(self._waiting) >= self._capacity:
            self._waiting.sweep()
        if len(self._waiting) >= self._capacity:
            raise Overloaded(
                f"{self._capacity} items wait for the model, which is the most; try again later."
            )
        future: asyncio.Future[Computed[Result]] = self._loop.create_future()
        self._waiting.put(Entry(item, deadline, time.monotonic(), future), flow)
        self._changed.set()
        return future

    def __len__(self) -> int:
        return len(self._waiting)

    async def _run(self) -> None:
        """Start a batch whenever a worker that has nothing to do could have one."""
        while await self._gather():
            if self._broken is not None:
                raise self._broken
            batch, late = self._take()
            _refuse(late)
            if batch and self._workers is not None:
                self._running.append(batch)
                self._workers.submit(self._work, batch)

    async def _gather(self) -> bool:
        """Wait until a batch is due; False when there will be none any more."""
        while not len(self._waiting) or self._busy >= self.lanes:
            if self._stopping and not len(self._waiting) and not self._running:
                return False
            self._changed.clear()
            await self._changed.wait()
        while (left := self._left()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        return True

    def _left(self) -> float:
        """Tell how many seconds the next batch may wait for what is on its way."""
        if not self._coming or self._stopping or len(self._waiting) >= self.max_batch:
            return 0.0
        return self._waiting.oldest() + self._max_wait - time.monotonic()

    def _work(self, batch: "_Batch[Item, Result]") -> None:
        """Compute batch after batch, in a worker, as long as the next one is due at once.

        A worker that asked the event loop for each would do nothing until the loop has time for it.
        """
        while batch:
            started = time.monotonic()
            outcome: Sequence[Result] | Exception
            try:
                outcome = self._compute([entry.item for entry in batch])
                if len(outcome) != len(batch):
                    raise RuntimeError(
                        f"{len(batch)} items went into a batch and {len(outcome)} results came out"
                    )
            except BaseException as error:  # whatever it is, the worker goes on
                outcome = _told(error)
            took = time.monotonic() - started
            with self._guard:
                self._busy -= 1
            done, batch = batch, []
            late: _Batch[Item, Result] = []
            try:
                if self._left() <= 0:
                    batch, late = self._take()
            except Exception as error:
                self._broken = error
            settle = partial(self._settle, done, outcome, started, took, batch, late)
            with suppress(RuntimeError):  # the event loop was closed meanwhile
                self._loop.call_soon_threadsafe(settle)

    def _settle(
        self,
        batch: "_Batch[Item, Result]",
        outcome: Sequence[Result] | Exception,
        started: float,
        took: float,
        following: "_Batch[Item, Result]",
        late: "_Batch[Item, Result]",
    ) -> None:
        """Tell those who wait for a batch what became of it, and note which one its worker is at now."""
        self._running.remove(batch)
        if following:
            self._running.append(following)
        self._changed.set()
        _refuse(late)
        for number, entry in enumerate(batch):
            if entry.future.done():
                continue
            if isinstance(outcome, Exception):
                entry.future.set_exception(_copy_of(outcome))
            else:
                entry.future.set_result(Computed(outcome[number], started - entry.submitted, took))

    def _take(self) -> "tuple[_Batch[Item, Result], _Batch[Item, Result]]":
        """Take for a worker its share of what waits.

        Returns:
            The batch, empty where all workers are busy or nothing waits, and the items that came too late.
        """
        with self._guard:
            free = self.lanes - self._busy
            if not free:
                return [], []
            batch, late = self._waiting.take(min(self.max_batch, math.ceil(len(self._waiting) / free)))
            self._busy += bool(batch)
        return batch, late

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Leave nobody waiting for a batcher that runs no more."""
        error = None if task.cancelled() else task.exception()
        if error is None and self._stopping and not task.cancelled():
            return
        logger.critical("the batcher has failed, and no image can be embedded any more", exc_info=error)
        for entries in (*self._running, self._waiting.clear()):
            for entry in entries:
                if not entry.future.done():
                    entry.future.set_exception(_failure())
        self._failed()


def _refuse(late: "_Batch[Item, Result]") -> None:
    now = time.monotonic()
    for entry in late:
        if not entry.future.done():
            waited = now - entry.submitted
            entry.future.set_exception(
                DeadlineExceeded(
                    f"The deadline passed after {waited:.3f} s in the queue, before the model ran."
                )
            )


def _failure() -> Unavailable:
    return Unavailable("The server can embed no image any more; its log tells why. Start it again.")


def _told(error: BaseException) -> Exception:
    """What a future can be told of an error: no StopIteration, and nothing that ends more than a call."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"a batch ended with {error!r}")


def _copy_of(error: Exception) -> Exception:
    """One exception for each waiter: a shared one would gather the traceback of every task that raises it."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error
    twin.__cause__ = error
    return twin
