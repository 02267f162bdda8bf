"""How long calls stay: each until its last byte has gone out, and gRPC has let go of it."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

__all__ = ["Stays"]


class Stays:
    """Does what is due when a call is gone. Belongs to one event loop."""

    def __init__(self) -> None:
        """Begin with no call."""
        # In the order in which it was asked for.
        self._due: dict[asyncio.Task[Any], list[Callable[[], object]]] = {}
        self._kept: set[asyncio.Task[Any]] = set()

    def begin(self, task: "asyncio.Task[Any]", then: Callable[[], object]) -> None:
        """Note that a call is open, and do that when it has gone, or the client has."""
        self._due[task] = [then]
        task.add_done_callback(self._ended)

    def when_gone(self, then: Callable[[], object]) -> None:
        """Do that when the call that the running task is has gone; at once if it was never noted."""
        due = self._due.get(cast("asyncio.Task[Any]", asyncio.current_task()))
        if due is None:
            then()
        else:
            due.append(then)

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Let an open call stay until `let_go`, though its task may end before."""
        self._kept.add(task)

    def let_go(self, task: "asyncio.Task[Any]") -> None:
        """Do what is due: the call is gone."""
        self._kept.discard(task)
        for each in self._due.pop(task, ()):
            each()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # gRPC has logged what there is to it, and asyncio would once more
        if task not in self._kept:
            self.let_go(task)
