"""A call while it passes through the server: who makes it, how long he waits, where its time goes."""

import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from serving.errors import Cancelled, CrossbatchError, DeadlineExceeded

__all__ = ["STAGES", "Call", "Stages", "current_call"]

EARLY_SECONDS = 0.01
"""gRPC's clock may find a deadline passed by so much before ours does."""
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
    ended: Callable[[], CrossbatchError] | None = None  # makes the error that tells why nobody waits any more
    waits_for: threading.Event | None = None  # set when the call ends, too

    def end(self, why: Callable[[], CrossbatchError]) -> None:
        """Let the call's next check fail; a thread that waits for it makes that check at once."""
        self.ended = self.ended or why
        if self.waits_for is not None:
            self.waits_for.set()

    def leave(self) -> None:
        """Note that the caller is gone; gRPC also says so at the end of a call that was answered."""
        late = self.deadline is not None and time.monotonic() > self.deadline - EARLY_SECONDS
        self.end(_late if late else _gone)

    def check(self) -> None:
        """Raise why nobody waits any more, if that is so.

        Raises:
            DeadlineExceeded: The deadline has passed.
            Cancelled: The caller left.
            Draining: The server has no more time for the call.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise _late()
        if self.ended is not None:
            raise self.ended()

    def wait(self, event: threading.Event) -> None:
        """Wait for an event, or until nobody waits for the call any more; raises then as `check` does."""
        self.waits_for = event
        self.check()
        if not event.wait(self.remaining(threading.TIMEOUT_MAX)):
            self.check()

    def remaining(self, longest: float) -> float:
        """Return the seconds that a wait may last: until the deadline, and `longest` at most."""
        return longest if self.deadline is None else max(0.0, min(longest, self.deadline - time.monotonic()))


def _late() -> CrossbatchError:
    return DeadlineExceeded("The deadline passed before the work was done; give the call more time.")


def _gone() -> CrossbatchError:
    return Cancelled("The caller left before the reply.")


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The call that this thread works for; for log lines, since all else gets its call as an argument."""
