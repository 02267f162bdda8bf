"""Calls as OpenTelemetry sees them: a span each, with one a stage below it."""

import logging
import os
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from google.rpc.code_pb2 import Code
from pydantic import AnyHttpUrl

from serving.errors import BadSetting
from serving.observability.call import Call

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
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ours = Resource.create({"service.name": "crossbatch", "service.version": version("crossbatch")})
        named = OTELResourceDetector().detect()  # by OpenTelemetry's own environment variables
        self._trace, self._nothing = trace, context.Context()
        self._exporter = exporter
        self._provider = TracerProvider(resource=ours.merge(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("crossbatch", version("crossbatch"))
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: Call, code: str, reason: str = "") -> None:
        """Make the spans of a call that has ended just now, below the `traceparent` that it brought."""
        service, _, name = call.method[1:].rpartition("/")
        epoch = time.time_ns() - time.monotonic_ns()  # from the one clock to the other
        attributes: dict[str, str | int] = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "rpc.grpc.status_code": Code.Value(code),
            "crossbatch.request_id": call.request_id,
            "crossbatch.inputs": call.inputs,
        }
        if reason:
            attributes["error.type"] = reason
        carrier = {key: str(value) for key, value in call.metadata if key in ("traceparent", "tracestate")}
        span = self._tracer.start_span(
            call.method[1:],
            context=self._propagator.extract(carrier, context=self._nothing),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=epoch + round(call.began * 1e9),
        )
        within = self._trace.set_span_in_context(span)
        for stage, (began, took) in call.stages.copy().items():
            start = epoch + round(began * 1e9)
            part = self._tracer.start_span(stage, context=within, start_time=start)
            part.end(start + round(took * 1e9))
        if code in FAULTS:
            span.set_status(self._trace.StatusCode.ERROR, reason or code)
        span.end(epoch + time.monotonic_ns())

    def close(self, seconds: float) -> None:
        """Send what there is, for so many seconds at most; blocks."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(seconds)
        if sending.is_alive():
            self._exporter.shutdown()  # breaks off its attempts


def tracer_of(url: AnyHttpUrl | None) -> Tracer | None:
    """Make the tracer that sends to a collector, by OTLP over HTTP.

    Without a URL OpenTelemetry's own environment variables decide; where they name no collector, None.
    """
    named = [each for each in ENDPOINTS if os.environ.get(each)]
    if url is None and (not named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"):
        return None
    endpoint = None if url is None else str(url)
    if url is not None and url.path == "/":
        endpoint = urlsplit(str(url))._replace(path=PATH).geturl()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        asked = "--trace" if url is not None else named[0]
        what = f"{asked} needs OpenTelemetry, which is not installed: pip install 'crossbatch[trace]'."
        raise BadSetting(what) from error
    last = float("-inf")

    def is_due(record: logging.LogRecord) -> bool:
        """Let a line a minute pass; there is one for each attempt to reach a collector that is away."""
        nonlocal last
        due = record.created - last >= 60.0
        last = record.created if due else last
        return due

    logging.getLogger(OTLPSpanExporter.__module__).addFilter(is_due)
    return Tracer(OTLPSpanExporter(endpoint))
