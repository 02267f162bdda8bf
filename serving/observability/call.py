"""A call while it passes through the server: who makes it, how long he waits, where its time goes."""

import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from serving.errors import Cancelled, CrossbatchError, DeadlineExceeded

__all__ = ["STAGES", "Call", "Stages", "current_call", "gone"]

EARLY_SECONDS = 0.01  # gRPC's clock may find a deadline passed by so much before ours does
STAGES = ("decode", "queue", "encode", "gallery")


class Stages(dict[str, tuple[float, float]]):
    """When the slowest input of a call came to each stage, by time.monotonic(), and its seconds there.

    A thread that does not know yet that the call has ended may still add to it.
    """

    def spent(self, stage: str, began: float, seconds: float) -> None:
        """Note how long one input was in a stage; the slowest one counts."""
        if seconds >= self.seconds(stage):
            self[stage] = began, seconds

    def seconds(self, stage: str) -> float:
        """Return how long the slowest input was in a stage; 0 where none came to it."""
        return self.get(stage, (0.0, 0.0))[1]


@dataclass(slots=True, eq=False)
class Call:
    """Made when a call comes in; its fields fill up until it ends."""

    rpc: str  # short name, such as RetrievalService/Search
    method: str = ""  # full name, as gRPC has it: /crossbatch.v1.RetrievalService/Search
    peer: str = ""  # where it came from, as gRPC writes it
    client: str = ""  # name of the API key; empty where none is asked for
    request_id: str = ""
    metadata: Iterable[tuple[str, str | bytes]] = ()
    deadline: float | None = None  # the time.monotonic() after which nobody waits for the reply
    writes: bool = False  # it needs the role write, and so has a line in the audit log
    request: Any = None  # its message, once that is read
    bytes: int = 0  # of its message, as admitted
    inputs: int = 0  # images, queries or items that were admitted
    admitted: float = 0.0  # the time.monotonic() at which they were
    stages: Stages = field(default_factory=Stages)
    began: float = field(default_factory=time.monotonic)
    news: "SimpleQueue[Callable[[], CrossbatchError] | None]" = field(default_factory=SimpleQueue)
    """For who waits for the call's work: None when it is done, or what makes the error that ends the call."""

    def check(self) -> None:
        """Raise why nobody waits any more, if that is so: DeadlineExceeded, Cancelled or Draining."""
        ended = not self.news.empty()
        early = EARLY_SECONDS if ended else 0.0
        if self.deadline is not None and time.monotonic() >= self.deadline - early:
            raise DeadlineExceeded("The deadline passed before the work was done; give the call more time.")
        if ended:
            why = self.news.get()
            self.news.put(why)
            raise (why or gone)()

    def wait(self) -> None:
        """Wait until the work is done, or nobody waits for the call any more; raises then as `check` does."""
        while True:
            try:
                why = self.news.get(timeout=self.remaining(threading.TIMEOUT_MAX))
            except Empty:
                self.check()
                continue
            if why is None:
                return
            self.news.put(why)
            self.check()

    def remaining(self, longest: float) -> float:
        """Return the seconds that a wait may last: until the deadline, and `longest` at most."""
        return longest if self.deadline is None else max(0.0, min(longest, self.deadline - time.monotonic()))


def gone() -> CrossbatchError:
    """Make the error of a call whose caller is gone, as gRPC says at the end of each call."""
    return Cancelled("The caller left before the reply.")


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The call that this thread works for; for log lines, since all else gets its call as an argument."""
