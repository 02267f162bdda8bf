"""What is noted of every call that ends: metrics, a trace, its audit line, its log line."""

import asyncio
import logging
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias

import grpc.aio

from serving.observability.audit import Audit
from serving.observability.call import Call
from serving.observability.metrics import Metrics
from serving.observability.tracing import Tracer
from serving.rpc.access import identity
from serving.rpc.address import told_peer
from serving.rpc.ending import Ending
from serving.rpc.roles import is_write

__all__ = ["MOST_LINES", "Register"]

logger = logging.getLogger(__name__)

MOST_LINES = 10
"""Most log lines a second on calls refused for the same reason; one more tells how many there were."""
SECOND = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Register:
    """Knows which calls are in progress. Belongs to one event loop."""

    def __init__(self, audit: Audit, metrics: Metrics, tracer: Tracer | None = None) -> None:
        """Keep who takes note of calls.

        Args:
            audit: Notes who wrote what.
            metrics: Counts calls.
            tracer: Takes note of each call with all its parts.
        """
        self._audit = audit
        self._metrics = metrics
        self._tracer = tracer
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._refused: dict[tuple[str, str], int] = {}  # in this second, by code and reason
        self.given_up = False
        """Whether the server has no more time for those in progress."""

    def entered(self, call: Call) -> None:
        """Note that a call is in progress."""
        self._calls += 1
        self._idle.clear()
        self._metrics.began(call)

    def left(
        self, call: Call, code: str, context: Context, *, ending: Ending | None = None, request: Any = None
    ) -> Future[None] | None:
        """Note that it has ended.

        Args:
            call: It.
            code: Of its status.
            context: Its own.
            ending: What it failed with.
            request: Its message, where that was read.

        Returns:
            What is done when its audit line is in the file; None where nothing is to be waited for.
        """
        self._calls -= 1
        if not self._calls:
            self._idle.set()
        noted = self._noted(call, code, context, "" if ending is None else ending.reason, request)
        self._log(call, code, call.inputs, ending)
        return noted

    def refused(self, call: Call, ending: Ending, context: Context) -> Future[None] | None:
        """Note that a call was turned away at once; of many alike not each has a log line.

        Returns:
            As for `left`.
        """
        code, reason = ending.name, ending.reason
        self._metrics.began(call)
        noted = self._noted(call, code, context, reason, None)
        seen = self._refused.get((code, reason), 0)
        self._refused[code, reason] = seen + 1
        if not seen:
            asyncio.get_running_loop().call_later(SECOND, self._sum_up, code, reason)
        if seen < MOST_LINES:
            self._log(call, code, 0, ending)
        return noted

    async def until_noted(self, noted: Future[None]) -> None:
        """Wait until an audit line is in its file, but not for ever."""
        _, late = await asyncio.wait([asyncio.wrap_future(noted)], timeout=Audit.LONGEST_WAIT)
        if late:
            self._audit.complain()

    async def wait_idle(self, longest: float) -> bool:
        """Wait until no call is in progress, for `longest` seconds at most; tell whether none is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), longest)
        return self._idle.is_set()

    def _noted(
        self, call: Call, code: str, context: Context, reason: str, request: Any
    ) -> Future[None] | None:
        took = time.monotonic() - call.began
        late = False
        if code == "CANCELLED":
            left = context.time_remaining()
            late = left is not None and left <= 0
        self._metrics.ended(call, code, took, reason=reason, late=late)
        if self._tracer is not None:
            metadata = list(context.invocation_metadata() or ())
            self._tracer.record(call, code=code, seconds=took, reason=reason, metadata=metadata)
        if not is_write(call.rpc):
            return None
        return self._audit.record(call.rpc, request, code, peer=call.peer, seconds=took)

    def _log(self, call: Call, code: str, inputs: int, ending: Ending | None) -> None:
        took = time.monotonic() - call.began
        told = {"rpc": call.rpc, "code": code, "milliseconds": round(took * 1e3, 3), "inputs": inputs}
        if client := identity.get().name:
            told["client"] = client
        if ending is not None:
            told |= {"reason": ending.reason, "error": ending.message, "peer": told_peer(call.peer)}
        logger.info("%s %s", call.rpc, code, extra=told)

    def _sum_up(self, code: str, reason: str) -> None:
        calls = self._refused.pop((code, reason))
        if calls > MOST_LINES:
            more = calls - MOST_LINES
            told = {"code": code, "reason": reason, "calls": more}
            logger.info("%d more calls were refused: %s %s", more, code, reason, extra=told)
