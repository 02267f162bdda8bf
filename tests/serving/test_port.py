"""The port: whose it is before anything listens, and which sentence tells that it cannot be had."""

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.errors import BadSetting, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.rpc.address import check_address
from serving.server.port import Port
from serving.settings import Settings
from tests.serving.rpc_fakes import FakeEncoder, serving


def test_a_port_in_use_is_one_sentence(encoder: FakeEncoder, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with (
            pytest.raises(Unavailable, match=rf"Port {port} on 127.0.0.1 is in use.*--port"),
            serving(encoder, GalleryDirectory(tmp_path), port=port),
        ):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_plain_text_off_loopback_needs_leave(encoder: FakeEncoder, tmp_path: Path, host: str) -> None:
    with (
        pytest.raises(BadSetting, match="--insecure"),
        serving(encoder, GalleryDirectory(tmp_path), host=host),
    ):
        pass


def test_a_host_that_cannot_be_used_is_one_sentence(encoder: FakeEncoder, tmp_path: Path) -> None:
    galleries = GalleryDirectory(tmp_path)
    with (
        pytest.raises(BadSetting, match="not known"),
        serving(encoder, galleries, host="no-such-host.invalid"),
    ):
        pass
    for host in ("a" * 64 + ".invalid", "a..b", "a\0b", "\udcff", ".", ""):
        with pytest.raises(BadSetting, match="not known"):
            check_address(host, 0, insecure=False)
    with (
        pytest.raises(BadSetting, match="not an address of this machine"),
        serving(encoder, galleries, host="192.0.2.1", insecure=True),
    ):
        pass


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_is_shared_by_our_own_workers_only(tmp_path: Path, workers: int) -> None:
    """By default, and in silence, any two servers of gRPC share one (grpc#10755, grpc#19773, grpc#16920)."""
    held = Port(settings(0, workers))
    for others in (1, 2):  # while the first one loads its models, before anything listens
        with pytest.raises(Unavailable, match="in use"):
            Port(settings(held.number, others))
    with serving(
        FakeEncoder(), GalleryDirectory(tmp_path), port=held.number if workers > 1 else 0, workers=2
    ):
        if workers > 1:
            for others in (1, 2):
                with pytest.raises(Unavailable, match="in use"):
                    Port(settings(held.number, others))
    held.close()
    Port(settings(held.number, workers)).close()


def test_a_port_is_had_again_at_once_after_a_server_has_hung_up_on_its_clients() -> None:
    with socket.socket() as before, socket.socket() as client:
        before.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        before.bind(("127.0.0.1", 0))
        before.listen()
        client.connect(before.getsockname())
        before.accept()[0].close()  # the side that closes first keeps the connection, in TIME_WAIT
        assert client.recv(1) == b""
        port = before.getsockname()[1]
    for workers in (1, 2):
        Port(settings(port, workers)).close()


def test_a_server_of_others_that_shares_its_port_does_not_share_ours(
    encoder: FakeEncoder, tmp_path: Path
) -> None:
    with serving(encoder, GalleryDirectory(tmp_path)) as running:
        other = grpc.server(None)  # type: ignore[arg-type]  # by default it would
        with pytest.raises(RuntimeError, match="Failed to bind"):
            other.add_insecure_port(running.address)
        other.stop(None).wait()


def test_every_address_of_a_name_is_held() -> None:
    held = Port(settings(0, 1, host="localhost"))
    for family, _, _, _, place in socket.getaddrinfo("localhost", held.number, type=socket.SOCK_STREAM):
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
    held.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_who_asks_for_ipv4_is_not_reached_by_ipv6(tmp_path: Path, workers: int) -> None:
    """To gRPC 0.0.0.0 is [::]: a host whose firewall covers IPv4 alone would be open."""
    if not has_ipv6():
        pytest.skip("there is no IPv6 here")
    host = "0.0.0.0"
    held = Port(settings(0, 2, host=host, insecure=True)) if workers > 1 else None
    more: dict[str, Any] = {"port": held.number if held else 0, "workers": workers}
    with serving(FakeEncoder(), GalleryDirectory(tmp_path), host=host, insecure=True, **more) as running:
        port = int(running.address.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("::1", port), timeout=5)
    if held:
        held.close()
    Port(settings(port, workers, host="::", insecure=True)).close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def settings(port: int, workers: int, **more: Any) -> Settings:
    told = {"model": ["m"], "galleries": "g", "port": port, "workers": workers}
    return Settings.model_validate(told | more)
