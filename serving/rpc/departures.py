"""How replies go out: each within its time, or its call is reset, and whoever has left has only cancelled."""

import asyncio
import logging
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import grpc.aio

from serving.rpc.resets import hang_up, owners
from serving.rpc.stays import Stays

__all__ = ["CHECK_SECONDS", "DEPARTURE_SECONDS", "Departures"]

logger = logging.getLogger(__name__)

DEPARTURE_SECONDS = 60.0
"""Longest time that a reply, or one of a stream, may take to go out: as a message may to come in."""
CHECK_SECONDS = 5.0
"""The same for health checks and the like, whose replies are short."""
HANG_UP_SECONDS = 60.0
"""After that long in which a connection took not even the end of a call, it is hung up on.
TCP itself gives up one that takes no byte for 20 s, but not one that takes some now and then."""
SPARED = 2
"""Calls that gRPC may hold for no fault of a connection: the newest of a process, until another comes in, and
its first. For so few none is hung up on."""
LOOK_SECONDS = 0.1  # between two looks at how long each has taken


class _Reset(NamedTuple):
    """A call that was reset, of which gRPC still holds the reply."""

    since: float
    peer: str
    gone: "weakref.ref[asyncio.Future[Any]]"


class Departures:
    """Gives each reply a time to leave in, since a client may answer pings and still read nothing.

    One that takes longer is reset, which frees the reply and leaves the other calls of its connection alone,
    those of other clients of a proxy among them. Only where connections take nothing whatever, so that gRPC
    can write no reset either and keeps more than a few replies, are they hung up on. Until gRPC has let go of
    a reply its call keeps its place, and its bytes count. Belongs to one event loop.
    """

    def __init__(self, seconds: float, stays: Stays) -> None:
        """Set how long each may take.

        Args:
            seconds: Of a reply.
            stays: Of the calls that they belong to.
        """
        self.seconds = seconds
        self._stays = stays
        # In the order in which they began, since every one may take the same time.
        self._began: dict[asyncio.Task[Any], tuple[float, str]] = {}
        self._resets: dict[asyncio.Task[Any], _Reset] = {}
        # One timer for all: one for each would cost more than all the rest here.
        self._timer: asyncio.TimerHandle | None = None
        self._hanging_up: set[asyncio.Future[None]] = set()

    def begin(self, peer: str) -> None:
        """Note that the reply of the call that the running task is leaves; until the task ends.

        Args:
            peer: Where the call came from, as gRPC writes it.
        """
        self._stays.when_gone(partial(self._began.pop, self._note(peer), None))

    @contextmanager
    def sending(self, peer: str) -> Iterator[None]:
        """Note that one reply of a stream, or a status, leaves while the block runs.

        Raises:
            CancelledError: if the client left meanwhile, of which gRPC may tell by an error of its own first.
        """
        task = self._note(peer)
        try:
            yield
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None
        finally:
            self._began.pop(task, None)

    def _note(self, peer: str) -> "asyncio.Task[Any]":
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._began[task] = (time.monotonic(), peer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        return task

    def _look(self) -> None:
        """Give up what took too long."""
        now = time.monotonic()
        late: dict[asyncio.Task[Any], str] = {}
        for task, (began, peer) in self._began.items():
            if now - began < self.seconds:
                break
            late[task] = peer
        if late:
            self._reset(late, now)
        held = [each.peer for each in self._resets.values() if now - each.since >= HANG_UP_SECONDS]
        loop = asyncio.get_running_loop()
        if len(held) > SPARED:
            stuck = set(held)
            logger.warning("hung up on %d connections that took nothing, such as %s", len(stuck), min(stuck))
            for task, each in self._resets.items():
                if each.peer in stuck:  # it is tried again, should that not do
                    self._resets[task] = each._replace(since=now)
            done = loop.run_in_executor(None, hang_up, stuck)
            self._hanging_up.add(done)
            done.add_done_callback(self._hanging_up.discard)
        again = self._began or self._resets
        self._timer = loop.call_later(LOOK_SECONDS, self._look) if again else None

    def _reset(self, late: "dict[asyncio.Task[Any], str]", now: float) -> None:
        peers: list[str] = []
        loop = asyncio.get_running_loop()
        holding = owners(set(late))
        for task, peer in late.items():
            del self._began[task]
            # What the task waits for gRPC keeps until it has let go of the reply, whatever the task does.
            waited_for = getattr(task, "_fut_waiter", None)
            if waited_for is None or waited_for.done():  # it goes at this moment
                continue
            peers.append(peer)
            self._stays.keep(task)
            self._resets[task] = _Reset(now, peer, weakref.ref(waited_for, partial(self._freed, loop, task)))
            del waited_for
            task.cancel()
            if task in holding:
                holding[task].cancel()
        if peers:
            logger.warning(
                "reset %d calls whose replies were not taken in %g s, such as one of %s",
                len(peers), self.seconds, peers[0],
            )  # fmt: skip

    def _freed(self, loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]", _: object) -> None:
        """Called by whatever thread drops the last reference, at any line if it is the garbage collector."""
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(self._let_go, task)

    def _let_go(self, task: "asyncio.Task[Any]") -> None:
        if self._resets.pop(task, None) is not None:
            self._stays.let_go(task)
