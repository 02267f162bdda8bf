"""Items that wait, of which each flow has one taken in turn; knows nothing of what becomes of them."""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Entry", "FairQueue"]

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(slots=True, eq=False)
class Entry(Generic[Item, Outcome]):
    """One item, and who waits for its outcome."""

    item: Item
    deadline: float | None
    """The `time.monotonic()` after which nobody wants the outcome."""
    submitted: float
    future: "asyncio.Future[Outcome]"


class FairQueue(Generic[Item, Outcome]):
    """A flow with many items holds up none with few; within a flow, items keep their order.

    May be used by several threads at once.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._flows: OrderedDict[Hashable, deque[Entry[Item, Outcome]]] = OrderedDict()  # the next one first
        self._count = 0
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def put(self, entry: Entry[Item, Outcome], flow: Hashable) -> None:
        """Put an entry at the end of its flow."""
        with self._guard:
            self._flows.setdefault(flow, deque()).append(entry)
            self._count += 1

    def take(self, most: int) -> tuple[list[Entry[Item, Outcome]], list[Entry[Item, Outcome]]]:
        """Take entries that somebody still waits for, one of each flow in turn.

        Args:
            most: How many.

        Returns:
            Those, and beside them the ones whose deadline has passed.
        """
        taken: list[Entry[Item, Outcome]] = []
        late: list[Entry[Item, Outcome]] = []
        now = time.monotonic()
        with self._guard:
            while self._flows and len(taken) < most:
                flow, entries = self._flows.popitem(last=False)
                entry = entries.popleft()
                self._count -= 1
                if entries:
                    self._flows[flow] = entries
                if not entry.future.done():
                    is_late = entry.deadline is not None and entry.deadline <= now
                    (late if is_late else taken).append(entry)
        return taken, late

    def oldest(self) -> float:
        """Tell when the entry that waits longest was submitted; infinity where none waits."""
        with self._guard:
            return min((entries[0].submitted for entries in self._flows.values()), default=float("inf"))

    def sweep(self) -> None:
        """Free the places of entries that nobody waits for."""
        with self._guard:
            for flow, entries in list(self._flows.items()):
                kept = deque(entry for entry in entries if not entry.future.done())
                self._count -= len(entries) - len(kept)
                if kept:
                    self._flows[flow] = kept
                else:
                    del self._flows[flow]

    def clear(self) -> list[Entry[Item, Outcome]]:
        """Take all entries at once."""
        with self._guard:
            entries = [entry for flow in self._flows.values() for entry in flow]
            self._flows.clear()
            self._count = 0
        return entries
