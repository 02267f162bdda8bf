"""What is noted of every call: metrics, a trace, its audit line, its log line."""

import logging
import threading
import time
from urllib.parse import unquote

import grpc

from serving.observability.audit import AuditLog
from serving.observability.call import Call
from serving.observability.metrics import Metrics
from serving.observability.tracing import Tracer

__all__ = ["MOST_LINES", "AccessLog", "told_peer"]

logger = logging.getLogger(__name__)

MOST_LINES = 10
"""Most log lines a second on calls refused for the same reason; one more tells how many there were."""


class AccessLog:
    """Notes calls; serves any thread."""

    def __init__(self, metrics: Metrics, audit: AuditLog, tracer: Tracer | None = None) -> None:
        """Keep who takes note."""
        self._metrics = metrics
        self._audit = audit
        self._tracer = tracer
        self._refused: dict[str, tuple[int, int]] = {}  # by reason: the second, and how many in it
        self._lock = threading.Lock()

    def began(self, call: Call) -> None:
        """Note that a call has come in."""
        self._metrics.began(call)

    def ended(
        self,
        call: Call,
        code: str,
        context: grpc.ServicerContext,
        *,
        reason: str = "",
        error: str = "",
        refused: bool = False,
    ) -> None:
        """Note that it has ended.

        Args:
            call: It.
            code: Name of its status.
            context: Its own.
            reason: Of its error, as the caller reads it.
            error: What the caller is told.
            refused: Whether it was turned away before its message; of many alike not each has a log line.
        """
        seconds = time.monotonic() - call.began
        self._metrics.ended(call, code, seconds, reason=reason)
        if self._tracer is not None:
            self._tracer.record(call, code, seconds, reason, context.invocation_metadata() or ())
        peer = told_peer(call.peer)
        if call.writes:
            self._audit.record(call, code, seconds, peer)
        if refused and not self._has_line(code, reason):
            return
        told = {"rpc": call.rpc, "code": code, "milliseconds": round(seconds * 1e3, 3), "inputs": call.inputs}
        if call.client:
            told["client"] = call.client
        if reason:
            told |= {"reason": reason, "error": error, "peer": peer}
        logger.info("%s %s", call.rpc, code, extra=told)

    def _has_line(self, code: str, reason: str) -> bool:
        """Count a refusal; tell whether it is among the first of its kind in this second."""
        now = int(time.monotonic())
        with self._lock:
            second, seen = self._refused.get(reason, (now, 0))
            if second != now and seen > MOST_LINES:
                told = {"code": code, "reason": reason, "calls": seen - MOST_LINES}
                logger.info("%d more calls were refused: %s %s", seen - MOST_LINES, code, reason, extra=told)
            self._refused[reason] = (now, seen + 1 if second == now else 1)
            return second != now or seen < MOST_LINES


def told_peer(peer: str) -> str:
    """Write where a call came from as people do: gRPC has `ipv6:%5B::1%5D:50412` for `[::1]:50412`."""
    kind, _, place = peer.partition(":")
    return unquote(place) if kind in ("ipv4", "ipv6") else peer
