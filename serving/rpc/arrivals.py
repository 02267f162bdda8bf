"""How messages come in: so many at once, each within its time."""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import grpc.aio

from serving.errors import CrossbatchError, DeadlineExceeded, InvalidArgument, Overloaded

__all__ = ["ARRIVAL_SECONDS", "MOST_ARRIVING", "MOST_QUESTIONS", "TURN_SECONDS", "Arrivals"]

ARRIVAL_SECONDS = 60.0
"""Longest time that a message may take to come in: 64 MiB at 9 Mbit/s."""
TURN_SECONDS = 5.0
"""That long a message may come in while others wait for their turn."""
MOST_ARRIVING = 28
"""Most messages of calls at once that come in. How long each is, nobody knows before it is whole."""
MOST_QUESTIONS = 4
"""Most messages of health checks and the like at once, which are short, or sent to do harm."""
LOOK_SECONDS = 0.1  # between two looks at how long each has taken
RETRY_SECONDS = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Arrivals:
    """Lets so many messages come in at once; the others wait with the start of theirs in gRPC's window.

    A message that is not asked for keeps to that window, so a short one is there when its turn comes, however
    slow its sender. Those that take long keep others waiting for a while only, and who sends many keeps only
    himself waiting: of those that wait each holder has one let in in turn. Belongs to one event loop.
    """

    def __init__(self, most: int) -> None:
        """Set the limit.

        Args:
            most: Most messages at once that come in.
        """
        self._most = most
        self._taken = 0
        # Of each holder those that wait for their turn, the holder whose turn is next first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        # Both in the order in which they began, since every one may take the same time.
        self._began: dict[asyncio.Task[Any], float] = {}
        self._reading: dict[asyncio.Task[Any], tuple[float, str]] = {}
        self._given_up: dict[asyncio.Task[Any], CrossbatchError] = {}
        # One timer for all: one for each would cost more than all the rest here.
        self._timer: asyncio.TimerHandle | None = None

    async def message(self, context: Context, holder: str) -> Any:
        """Receive the one message of the call that the running task is.

        Args:
            context: Of the call.
            holder: Who sends it, as the `Fuse` counts him.

        Raises:
            DeadlineExceeded: if it took too long to come in.
            Overloaded: if it took long while others waited.
            InvalidArgument: if the call ended without it.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._began[task] = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        try:
            message = await self._read(task, context, holder)
        except asyncio.CancelledError:
            error = self._given_up.get(task)
            if error is None or task.uncancel():
                raise
            raise error from None
        finally:
            del self._began[task]
            self._given_up.pop(task, None)
        if message is grpc.aio.EOF:
            # Cancelled meanwhile if gRPC itself has ended the call, of a message too long, and says so.
            await asyncio.sleep(LOOK_SECONDS)
            raise InvalidArgument("The call ended without a message.")
        return message

    def give_up(self, error: Callable[[], CrossbatchError]) -> None:
        """End all that come in or wait with such an error."""
        for task in self._began:
            self._end(task, error())

    async def _read(self, task: "asyncio.Task[Any]", context: Context, holder: str) -> Any:
        await self._turn(holder)
        self._reading[task] = (time.monotonic(), holder)
        try:
            return await context.read()
        finally:
            del self._reading[task]
            self._pass_on()

    async def _turn(self, holder: str) -> None:
        """Wait until one more message of a holder may come in."""
        if self._taken < self._most:  # then nobody waits
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self._pass_on()
            elif (turns := self._waiting.get(holder)) is not None and turn in turns:
                turns.remove(turn)
                if not turns:
                    del self._waiting[holder]
            raise

    def _pass_on(self) -> None:
        """Let the next one have its turn, of the holder who had none for longest."""
        while self._waiting:
            holder, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[holder] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._taken -= 1

    def _look(self) -> None:
        """Give up what took too long."""
        now = time.monotonic()
        for task, began in self._began.items():
            if now - began < ARRIVAL_SECONDS:
                break
            late = f"The message took more than {ARRIVAL_SECONDS:g} s to come in."
            self._end(task, DeadlineExceeded(late))
        for task, began in self._giving_way():
            if now - began < TURN_SECONDS:
                break
            slow = f"The message took more than {TURN_SECONDS:g} s to come in while others wait"
            self._end(task, Overloaded(f"{slow}; try again later.", retry_after=RETRY_SECONDS))
        again = bool(self._began)
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look) if again else None

    def _giving_way(self) -> "list[tuple[asyncio.Task[Any], float]]":
        """Those that others wait for, the oldest first: none of who has less than his part of the turns."""
        waiting = sum(map(len, self._waiting.values()))
        if not waiting:
            return []
        held = Counter(holder for _, holder in self._reading.values())
        part = max(1, self._most // len({*held, *self._waiting}))
        return [(task, began) for task, (began, holder) in self._reading.items() if held[holder] >= part][
            :waiting
        ]

    def _end(self, task: "asyncio.Task[Any]", error: CrossbatchError) -> None:
        if task not in self._given_up:
            self._given_up[task] = error
            task.cancel()
