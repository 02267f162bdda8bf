"""The Envoy configuration of the examples, in front of a real server."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from serving.gallery.directory import GalleryDirectory
from tests.serving.authority import Authority
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs

REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
CONFIG = Path(__file__).resolve().parents[2] / "examples" / "envoy.yaml"


@contextmanager
def proxied(folder: Path, address: str, **changes: str) -> Iterator[Stubs]:
    """Envoy in front of a server, with its ports and files in place of those of the example."""
    authority = Authority()
    certificate, _ = authority.sign().write(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIG.read_text().replace("/etc/envoy/", f"{certificate.parent}/")
    text = text.replace("0.0.0.0, port_value: 8443", f"127.0.0.1, port_value: {port}")
    text = text.replace("port_value: 50051", f"port_value: {address.rpartition(':')[2]}")
    for old, new in changes.items():
        assert f"{old}: " in text
        text = text.replace(f"{old}: ", f"{old}: {new} # ")
    config = folder / "envoy.yaml"
    config.write_text(text)
    words = [str(Path(sys.executable).with_name("envoy")), "-c", str(config), "--disable-hot-restart"]
    words += ["--log-level", "error", "--concurrency", "1"]
    credentials = grpc.ssl_channel_credentials(authority.certificate)
    with subprocess.Popen(words) as process, grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        try:
            stubs = Stubs(channel)
            stubs.health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=20)
            yield stubs
        finally:
            process.terminate()


def test_calls_pass_and_a_slow_sender_does_not_reach_the_server(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    with (
        serving(encoder, GalleryDirectory(tmp_path / "g")) as server,
        proxied(tmp_path, server.address, request_timeout="1s") as stubs,
    ):
        assert stubs.embed(b"photo").results[0].vector
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"bad")
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answered = threading.Event()
        never = iter(lambda: answered.wait(20) and b"", b"")
        slow: Any = stubs.channel.stream_unary("/crossbatch.v1.RetrievalService/Embed")
        with pytest.raises(grpc.RpcError) as failure:
            slow(never, timeout=15)
        answered.set()
        assert failure.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(encoder.decoded) == 2
        reflection: Any = stubs.channel.unary_unary(f"/{REFLECTION}/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as failure:
            reflection(b"")
        assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
