"""Calls as OpenTelemetry sees them: a span each, with one a stage below it."""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc

from serving.errors import BadSetting
from serving.observability.call import STAGES, Call, Stages
from serving.observability.logs import request_id

if TYPE_CHECKING:  # it comes with an extra
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracer"]

logger = logging.getLogger(__name__)

PATH = "/v1/traces"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# What OpenTelemetry's conventions count as an error of the server; the others are the caller's.
FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class Tracer:
    """Makes the spans of each call when it has ended, and sends them from a thread of its own.

    A collector that is slow or away costs spans, which are dropped once 2,048 wait, and one log line a
    minute; no call waits for it.
    """

    def __init__(self, exporter: "SpanExporter") -> None:
        """Start the thread.

        Args:
            exporter: What sends the spans.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {"service.version": version("crossbatch")}
        if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            attributes["service.name"] = os.environ.get("OTEL_SERVICE_NAME", "crossbatch")
        self._exporter = exporter
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("crossbatch", attributes["service.version"])
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def of(cls, url: str | None) -> "Tracer | None":
        """Make the one that sends to a collector, by OTLP over HTTP.

        Args:
            url: Of the collector, its path `/v1/traces` when it names none; where None, OpenTelemetry's
                own environment variables decide, which also hold headers, certificates and sampling.

        Returns:
            None when neither names a collector.

        Raises:
            BadSetting: if the URL is none, or the extra is not installed.
        """
        named = any(os.environ.get(each) for each in ENDPOINTS)
        disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if url is None and (not named or disabled):
            return None
        endpoint = None if url is None else _checked(url)
        try:
            from serving.observability.collector import Collector
        except ImportError as error:
            asked = "--trace" if url is not None else next(each for each in ENDPOINTS if os.environ.get(each))
            raise BadSetting(
                f"{asked} needs OpenTelemetry, which is not installed: pip install 'crossbatch[trace]'."
            ) from error
        return cls(Collector(endpoint))

    def record(
        self,
        call: Call,
        *,
        code: str,
        seconds: float,
        reason: str,
        metadata: Sequence[tuple[str, Any]],
    ) -> None:
        """Make the spans of a call that has ended just now; never fails.

        Args:
            call: With all that was learned of it.
            code: Name of its status.
            seconds: How long it took.
            reason: Of its error; empty without one.
            metadata: What came with it; a `traceparent` in it is what the span belongs to.
        """
        try:
            self._record(call, code, seconds, reason, metadata)
        except Exception:  # what is only watched must not fail for it
            logger.debug("a call could not be traced", exc_info=True)

    def _record(
        self, call: Call, code: str, seconds: float, reason: str, metadata: Sequence[tuple[str, Any]]
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        service, _, name = call.method[1:].rpartition("/")
        end = time.time_ns()
        epoch = end - time.monotonic_ns()  # from the one clock to the other
        attributes: dict[str, str | int] = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "rpc.grpc.status_code": getattr(grpc.StatusCode, code).value[0],
            "crossbatch.request_id": request_id.get(),
            "crossbatch.inputs": call.inputs,
        }
        if reason:
            attributes["error.type"] = reason
        span = self._tracer.start_span(
            call.method[1:],
            context=self._parent(metadata),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - round(seconds * 1e9),
        )
        if span.is_recording() and call.stages is not None:
            within = set_span_in_context(span)
            for stage, began, took in _parts(call.stages):
                start = epoch + round(began * 1e9)
                part = self._tracer.start_span(stage, context=within, start_time=start)
                part.end(start + round(took * 1e9))
        if code in FAULTS:
            span.set_status(Status(StatusCode.ERROR, reason or code))
        span.end(end)

    def close(self, seconds: float) -> None:
        """Send what there is, for so many seconds at most; blocks."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(seconds)
        if sending.is_alive():
            self._exporter.shutdown()  # breaks off its attempts

    def _parent(self, metadata: Sequence[tuple[str, Any]]) -> "Context":
        from opentelemetry.context import Context

        carrier: Mapping[str, str] = {
            key: value for key, value in metadata if key in ("traceparent", "tracestate")
        }
        return self._propagator.extract(carrier, context=Context())


def _parts(stages: Stages) -> list[tuple[str, float, float]]:
    """Each stage that the call came to, the `time.monotonic()` it began at, and its seconds."""
    parts = []
    began = stages.began
    for stage in STAGES:
        took = getattr(stages, stage)
        if took:
            began = stages.starts.get(stage, began)
            parts.append((stage, began, took))
            began += took
    return parts


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise BadSetting(f"--trace {url!r} is no URL of a collector; give one such as http://localhost:4318.")
    return url if parts.path.strip("/") else parts._replace(path=PATH).geturl()
