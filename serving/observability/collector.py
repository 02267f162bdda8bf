"""The way of spans to an OpenTelemetry collector; needs the extra `trace`."""

import logging
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

__all__ = ["Collector"]

logger = logging.getLogger(__name__)

COMPLAINT_SECONDS = 60.0


class Collector(SpanExporter):
    """Says once a minute at most that spans are lost, where OpenTelemetry would at each attempt."""

    def __init__(self, endpoint: str | None) -> None:
        """Keep where spans go.

        Args:
            endpoint: URL with its path; None for what the environment names.
        """
        # Each refused attempt, each batch given up and each span too many has its own line there.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint)
        self._lost = 0
        self._complained = float("-inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans; blocks until they are taken, or given up after 10 seconds."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            if time.monotonic() - self._complained >= COMPLAINT_SECONDS:
                self._complained = time.monotonic()
                logger.warning("the collector does not take traces; %d spans are lost so far", self._lost)
        return result

    def shutdown(self) -> None:
        """Give up what is being tried."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: nothing is kept here."""
        return True
