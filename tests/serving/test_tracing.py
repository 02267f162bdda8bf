"""Spans of calls, as an OpenTelemetry collector receives them."""

import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import AnyHttpUrl

from serving.errors import BadSetting
from serving.gallery.directory import GalleryDirectory
from serving.observability.call import Call
from serving.observability.tracing import Tracer, tracer_of
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import connected, image, item

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Makes an exporter that keeps its spans, in place of the real one."""
    exporter = MagicMock(return_value=InMemorySpanExporter())
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", exporter)
    return exporter


def test_a_call_and_its_stages_reach_the_collector(tmp_path: Path, exporter: MagicMock) -> None:
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path), trace="http://localhost:4318") as server,
        connected(server.address) as stubs,
    ):
        stubs.create("shoes")
        stubs.upsert("shoes", item("k"))
        stubs.search("shoes", image(b"photo"))
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"bad", metadata=(("traceparent", PARENT), ("x-request-id", "mine")))
    exporter.assert_called_once_with("http://localhost:4318/v1/traces")
    spans = exporter.return_value.get_finished_spans()  # what was not sent yet went at the stop
    search: Any = next(each for each in spans if each.name == "crossbatch.v1.RetrievalService/Search")
    assert search.resource.attributes["service.name"] == "crossbatch"
    told = dict(search.attributes)
    assert len(told.pop("crossbatch.request_id")) == 16
    assert told == {
        "rpc.system": "grpc",
        "rpc.service": "crossbatch.v1.RetrievalService",
        "rpc.method": "Search",
        "rpc.grpc.status_code": 0,
        "crossbatch.inputs": 1,
    }
    assert search.kind is SpanKind.SERVER
    within = [each for each in spans if each.parent and each.parent.span_id == search.context.span_id]
    parts: dict[str, Any] = {each.name: each for each in within}
    assert set(parts) == {"decode", "queue", "encode", "gallery"}
    in_order = [parts[name] for name in ("queue", "decode", "encode", "gallery")]
    starts = [each.start_time for each in (search, *in_order)]
    assert starts == sorted(starts)
    assert all(part.start_time <= part.end_time <= search.end_time for part in in_order)

    failed: Any = next(each for each in spans if each.name == "crossbatch.v1.RetrievalService/Embed")
    assert f"00-{failed.context.trace_id:032x}-{failed.parent.span_id:016x}-01" == PARENT
    assert failed.attributes["crossbatch.request_id"] == "mine"
    assert failed.attributes["error.type"] == "BAD_IMAGE"
    assert failed.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert failed.status.is_unset  # the caller's fault is no error of the server


def test_environment_names_collector_and_service(
    exporter: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert tracer_of(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    tracer = tracer_of(None)
    assert tracer is not None
    record(tracer, "INTERNAL")
    tracer.close(5)
    exporter.assert_called_once_with(None)  # it finds the collector there by itself
    (span,) = exporter.return_value.get_finished_spans()
    assert span.resource.attributes["service.name"] == "shop"
    assert span.status.status_code is StatusCode.ERROR
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer_of(None) is None


def test_a_caller_that_samples_nothing_is_not_traced() -> None:
    collector = InMemorySpanExporter()
    tracer = Tracer(collector)
    unsampled = (("traceparent", f"{PARENT[:-2]}00"),)
    for metadata in (unsampled, (("traceparent", "no such thing"),)):
        record(tracer, metadata=metadata)
    tracer.close(5)
    assert len(collector.get_finished_spans()) == 1  # of the second call, whose parent cannot be read


def test_a_collector_that_is_away_slows_no_call_and_floods_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        tracer = tracer_of(AnyHttpUrl(f"http://127.0.0.1:{nobody.getsockname()[1]}"))
        assert tracer is not None
        record(tracer)
        began = time.monotonic()
        for _ in range(3_000):  # more than wait at most
            record(tracer)
        assert time.monotonic() - began < 5
        began = time.monotonic()
        tracer.close(0.3)
        assert time.monotonic() - began < 2
    assert len([each for each in caplog.records if each.levelname != "DEBUG"]) <= 2


def test_without_the_extra_the_flag_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BadSetting, match=r"--trace .* pip install 'crossbatch\[trace\]'"):
        tracer_of(AnyHttpUrl("http://localhost:4318"))


def record(tracer: Tracer, code: str = "OK", metadata: tuple[tuple[str, str], ...] = ()) -> None:
    name = "RetrievalService/Embed"
    call = Call(name, f"/crossbatch.v1.{name}", metadata=metadata)
    tracer.record(call, code)
