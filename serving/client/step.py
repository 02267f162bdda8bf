"""What an operation of the client asks for, step by step, whoever carries the steps out.

An operation is a generator, a plan: it yields steps, is sent what came of each, and returns its result. It
neither waits nor knows whether threads or an event loop do; `driver` and `async_driver` carry the steps out.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

__all__ = ["Begin", "Call", "Finish", "Give", "Identify", "Open", "Pause", "Plan", "Receive", "Step", "Take"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Make a call; its request tells which. Gives the reply, or raises an error of our tree.

    `idempotent` is whether a call that may have been carried out can be made again without harm; `timeout` in
    seconds and `retries` are the client's when None.
    """

    request: Any
    idempotent: bool = True
    timeout: float | None = None
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Make a call whose replies are a stream, and wait for the first; gives what `Receive` takes."""

    call: Call


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next reply of a stream; gives None at its end."""

    stream: Any


@dataclass(frozen=True, slots=True)
class Take:
    """Take the next value of what the caller handed in; gives None at its end.

    `waits` is whether that may last: files are read, or the caller's own code runs.
    """

    source: Iterator[Any]
    waits: bool = True


@dataclass(frozen=True, slots=True)
class Begin:
    """Start another plan beside this one; gives what `Finish` takes."""

    plan: "Plan[Any]"


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait for a plan that was begun; gives its result, or raises its error."""

    begun: Any


@dataclass(frozen=True, slots=True)
class Identify:
    """Tell the request id that all calls of the operation carry."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Give:
    """Hand one value of several to the caller, and go on when he asks for the next."""

    value: Any


Step: TypeAlias = Call | Open | Receive | Take | Begin | Finish | Identify | Pause | Give
Plan: TypeAlias = Generator[Step, Any, T]
