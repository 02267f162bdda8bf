"""Calls as OpenTelemetry sees them: a span each, with one a stage below it."""

import logging
import os
import threading
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import grpc

from serving.errors import BadSetting
from serving.observability.call import STAGES, Call
from serving.observability.logs import request_id

if TYPE_CHECKING:  # it comes with an extra
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracer", "tracer_of"]

PATH = "/v1/traces"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# What OpenTelemetry's conventions count as an error of the server; the others are the caller's.
FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class Tracer:
    """Makes the spans of each call when it has ended; OpenTelemetry sends them from a thread of its own."""

    def __init__(self, exporter: "SpanExporter") -> None:
        """Keep what sends the spans, of which 2,048 wait at most."""
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

    def record(
        self, call: Call, code: str, seconds: float, reason: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> None:
        """Make the spans of a call that has ended just now.

        Args:
            call: With all that was learned of it.
            code: Name of its status.
            seconds: How long it took.
            reason: Of its error; empty without one.
            metadata: What came with it; a `traceparent` in it is what the span belongs to.
        """
        from opentelemetry.context import Context
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
        carrier = {key: str(value) for key, value in metadata if key in ("traceparent", "tracestate")}
        span = self._tracer.start_span(
            call.method[1:],
            context=self._propagator.extract(carrier, context=Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - round(seconds * 1e9),
        )
        within = set_span_in_context(span)
        for stage in STAGES:
            if took := getattr(call.stages, stage):
                start = epoch + round(call.stages.starts[stage] * 1e9)
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


def tracer_of(url: str | None) -> Tracer | None:
    """Make the tracer that sends to a collector, by OTLP over HTTP; None when nothing names one.

    Args:
        url: Of the collector, its path `/v1/traces` when it names none; where None, OpenTelemetry's own
            environment variables decide, which also hold headers, certificates and sampling.

    Raises:
        BadSetting: if the URL is none, or the extra is not installed.
    """
    named = any(os.environ.get(each) for each in ENDPOINTS)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if url is None and (not named or disabled):
        return None
    endpoint = None if url is None else _checked(url)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        asked = "--trace" if url is not None else next(each for each in ENDPOINTS if os.environ.get(each))
        raise BadSetting(
            f"{asked} needs OpenTelemetry, which is not installed: pip install 'crossbatch[trace]'."
        ) from error
    # It has a line for each attempt to reach a collector that is away.
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_OnceAMinute())
    return Tracer(OTLPSpanExporter(endpoint))


class _OnceAMinute(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._last = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created - self._last < 60:
            return False
        self._last = record.created
        return True


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise BadSetting(f"--trace {url!r} is no URL of a collector; give one such as http://localhost:4318.")
    return url if parts.path.strip("/") else parts._replace(path=PATH).geturl()
