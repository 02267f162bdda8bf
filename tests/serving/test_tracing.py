"""Spans of calls, as an OpenTelemetry collector receives them."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving.errors import BadSetting
from serving.gallery.directory import GalleryDirectory
from serving.observability.call import Call
from serving.observability.tracing import Tracer, tracer_of
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import connected, image, item

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Received(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Receiver(ThreadingHTTPServer):
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Received)
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) or 0 for each in span.attributes}


def test_a_call_and_its_stages_reach_the_collector(tmp_path: Path) -> None:
    with receiving() as receiver:
        with (
            serving(FakeEncoder(), GalleryDirectory(tmp_path), trace=receiver.url) as server,
            connected(server.address) as stubs,
        ):
            stubs.create("shoes")
            stubs.upsert("shoes", item("k"))
            stubs.search("shoes", image(b"photo"))
            with pytest.raises(grpc.RpcError):
                stubs.embed(b"bad", metadata=(("traceparent", PARENT), ("x-request-id", "mine")))
        # What was not sent yet went at the stop.
        spans = receiver.spans()
    assert set(receiver.paths) == {"/v1/traces"}
    service = {
        each.key: each.value.string_value
        for each in receiver.requests[0].resource_spans[0].resource.attributes
    }
    assert service["service.name"] == "crossbatch"
    search = next(each for each in spans if each.name == "crossbatch.v1.RetrievalService/Search")
    told = attributes(search)
    assert told["rpc.system"] == "grpc"
    assert told["rpc.service"] == "crossbatch.v1.RetrievalService"
    assert told["rpc.method"] == "Search"
    assert told["rpc.grpc.status_code"] == 0
    assert told["crossbatch.inputs"] == 1
    assert len(told["crossbatch.request_id"]) == 16
    assert search.kind == 2  # of a server
    parts = {each.name: each for each in spans if each.parent_span_id == search.span_id}
    assert set(parts) == {"decode", "queue", "encode", "gallery"}
    in_order = [parts[name] for name in ("queue", "decode", "encode", "gallery")]
    for part in in_order:
        assert search.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano
        assert part.end_time_unix_nano <= search.end_time_unix_nano
    starts = [part.start_time_unix_nano for part in in_order]
    assert starts == sorted(starts)

    failed = next(each for each in spans if each.name == "crossbatch.v1.RetrievalService/Embed")
    assert failed.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert failed.parent_span_id.hex() == "b7ad6b7169203331"
    assert attributes(failed)["crossbatch.request_id"] == "mine"
    assert attributes(failed)["error.type"] == "BAD_IMAGE"
    assert attributes(failed)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert failed.status.code == 0  # the caller's fault is no error of the server


def test_the_environment_names_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
        with (
            serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server,
            connected(server.address) as stubs,
        ):
            stubs.embed(b"one")
        assert receiver.paths == ["/v1/traces"]
        assert attributes(receiver.requests[0].resource_spans[0].resource)["service.name"] == "shop"
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        assert tracer_of(None) is None


def test_nothing_is_traced_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert tracer_of(None) is None


def test_a_caller_that_samples_nothing_is_not_traced() -> None:
    with receiving() as receiver:
        tracer = tracer_of(receiver.url)
        assert tracer is not None
        unsampled = (("traceparent", f"{PARENT[:-2]}00"),)
        for metadata in (unsampled, (("traceparent", "no such thing"),)):
            record(tracer, metadata=metadata)
        tracer.close(5)
        assert len(receiver.spans()) == 1  # of the second call, whose parent cannot be read


def test_a_collector_that_is_away_slows_no_call_and_floods_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        tracer = tracer_of(f"http://127.0.0.1:{nobody.getsockname()[1]}")
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
        tracer_of("http://localhost:4318")


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://host/x", "http://", "http://host:99999", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="--trace"):
        tracer_of(url)


def record(tracer: Tracer, metadata: tuple[tuple[str, str], ...] = ()) -> None:
    name = "RetrievalService/Embed"
    call = Call(name, f"/crossbatch.v1.{name}", metadata=metadata)
    tracer.record(call, "OK")
