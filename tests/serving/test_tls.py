"""TLS with certificates made on the spot, what a server without them will not do, and Envoy before one."""

import socket
import ssl
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
from pydantic import ValidationError

import crossbatch
from serving.errors import BadSetting
from serving.gallery.directory import GalleryDirectory
from serving.rpc.address import check_host
from serving.rpc.keys import add_key
from serving.server import command
from serving.settings import Settings
from tests.serving.authority import Authority, Pair, encrypted
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@contextmanager
def secured(folder: Path, pair: Pair, **more: Any) -> Iterator[str]:
    """A server that speaks TLS; gives its address."""
    certificate, key = pair.write(folder)
    given = {"tls_certificate": certificate, "tls_key": key} | more
    with serving(FakeEncoder(), GalleryDirectory(folder / "g"), **given) as server:
        yield server.address


@contextmanager
def trusting(address: str, authority: Authority, client: Pair | None = None) -> Iterator[Stubs]:
    credentials = grpc.ssl_channel_credentials(
        authority.certificate, client.key if client else None, client.certificate if client else None
    )
    # A channel of its own each time: gRPC shares connections between channels of equal options.
    with grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Stubs(channel)


def unreachable(stubs: Stubs) -> str:
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"x", timeout=5)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    return str(failure.value.details())


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.decode())


def shown_by(address: str) -> bytes:
    """The certificate (DER) that a server shows to a new connection."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection((host, int(port)), timeout=5)
    with context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


def test_only_a_client_that_trusts_the_authority_is_answered(tmp_path: Path, authority: Authority) -> None:
    with secured(tmp_path, authority.sign()) as address:
        with trusting(address, authority) as stubs:
            assert stubs.embed(b"x").results[0].vector
        with trusting(address, Authority("another")) as stubs:
            assert "CERTIFICATE_VERIFY_FAILED" in unreachable(stubs)
        with grpc.insecure_channel(address) as channel:
            unreachable(Stubs(channel))


def test_mutual_tls_lets_in_whom_the_authority_has_signed(tmp_path: Path, authority: Authority) -> None:
    clients = Authority("clients")
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(clients.certificate)
    with secured(tmp_path, authority.sign(), tls_client_ca=trusted) as address:
        with trusting(address, authority, clients.sign("shop")) as stubs:
            assert stubs.embed(b"x").results[0].vector
        for stranger in (None, authority.sign("shop"), clients.sign("shop", days=1, since=3)):
            with trusting(address, authority, stranger) as stubs:
                unreachable(stubs)


def test_new_certificates_serve_new_connections_and_old_ones_go_on(
    tmp_path: Path, authority: Authority
) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    with secured(tmp_path, first) as address, trusting(address, authority) as stubs:
        stubs.embed(b"x")
        assert shown_by(address) == der(first)
        second.write(tmp_path)
        assert shown_by(address) == der(second)
        stubs.embed(b"x")
        with trusting(address, authority) as others:
            assert others.embed(b"x").results[0].vector


def test_files_that_cannot_be_used_leave_the_certificate_as_it_was(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    with secured(tmp_path, first) as address:
        for data in (second.key[:40], None):  # half-written, and removed
            caplog.clear()
            (tmp_path / "tls.key").unlink() if data is None else (tmp_path / "tls.key").write_bytes(data)
            for _ in range(2):
                assert shown_by(address) == der(first)
            assert caplog.text.count("stays in use") == 1
        second.write(tmp_path)
        assert shown_by(address) == der(second)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (None, "cannot be read"),
        ({"key": Authority().sign().key}, "is not that of the certificate"),
        ({"key": b"no key"}, "are no certificate and key"),
        ({"crt": b""}, "are no certificate and key"),
        ("encrypted", "is encrypted"),
    ],
)
def test_bad_files_at_the_start_are_one_sentence(
    tmp_path: Path,
    authority: Authority,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changed: Any,
    told: str,
) -> None:
    monkeypatch.setattr(command, "configure_logs", lambda *_, **__: None)  # those of the tests stay
    if changed is not None:
        pair = authority.sign()
        (encrypted(pair) if changed == "encrypted" else pair).write(tmp_path)
    if isinstance(changed, dict):
        for suffix, data in changed.items():
            (tmp_path / f"tls.{suffix}").write_bytes(data)
    words = ["serve", "--model", "model.onnx", "--galleries", str(tmp_path), "--port", "0"]
    words += ["--tls-certificate", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key")]
    assert crossbatch.main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("crossbatch serve: ")
    assert told in error
    assert str(tmp_path) in error


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tls_key": "k"}, "--tls-key was given without --tls-certificate"),
        ({"tls_certificate": "c"}, "--tls-certificate was given without --tls-key"),
        ({"tls_client_ca": "a"}, "--tls-client-ca needs"),
        ({"max_in_flight_per_client": 300}, "give --keys"),
        ({"max_in_flight_per_client": 8, "keys": "k"}, "at least 256"),
    ],
)
def test_settings_that_go_together_are_asked_for_together(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Settings.model_validate({"model": ["m"], "galleries": "g"} | given)


def test_the_server_is_secure_by_default(tmp_path: Path, authority: Authority) -> None:
    """Off loopback nothing is plain text that was not asked to be, keys least of all."""
    settings = Settings.model_validate({"model": ["m"], "galleries": "g"})
    assert settings.host == "127.0.0.1"
    assert not settings.insecure
    file = tmp_path / "keys.json"
    add_key(file, "a", "read")
    galleries = GalleryDirectory(tmp_path / "g")
    for more in (dict[str, Any](), {"keys": file}):
        with (
            pytest.raises(BadSetting, match="--tls-certificate and --tls-key, add --insecure"),
            serving(FakeEncoder(), galleries, host="0.0.0.0", **more),
        ):
            pass
    check_host("0.0.0.0", insecure=False, encrypted=True)


def test_a_server_that_anybody_can_write_to_says_so(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "a", "read")
    with secured(tmp_path, authority.sign(), keys=file):
        assert "may read and write" not in caplog.text
    with secured(tmp_path, authority.sign()):
        assert "may read and write" in caplog.text


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
