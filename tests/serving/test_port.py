"""The port: whose it is before anything listens, and which sentence tells that it cannot be had."""

import socket
from pathlib import Path
from typing import Any

import pytest

from serving.errors import BadSetting, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.rpc.address import barred_ipv6, check_host, held_port
from tests.serving.rpc_fakes import FakeEncoder, serving

HERE = "127.0.0.1"


def taken(port: int, *, shared: bool = False) -> bool:
    try:
        with held_port(HERE, port, shared=shared) as number:
            return number != port
    except Unavailable as error:
        return f"Port {port} on {HERE} is in use" in str(error)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_plain_text_off_loopback_needs_leave(host: str) -> None:
    with pytest.raises(BadSetting, match="--insecure"):
        check_host(host, insecure=False)
    check_host(host, insecure=True)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid", "a\0b", "\udcff", ""])
def test_a_host_that_nobody_knows_is_one_sentence(host: str) -> None:
    with pytest.raises(BadSetting, match="not known"):
        check_host(host, insecure=False)


def test_a_host_of_another_machine_is_one_sentence() -> None:
    with pytest.raises(BadSetting, match="not an address of this machine"), held_port("192.0.2.1", 0):
        pass


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_is_shared_by_our_own_workers_only(shared: bool) -> None:
    """By default, and in silence, any two servers of gRPC share one (grpc#10755, grpc#19773, grpc#16920)."""
    with held_port(HERE, 0, shared=shared) as port:
        assert taken(port)  # while the first one loads its models, before anything listens
        assert taken(port, shared=True)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port), timeout=5)
        if shared:
            with socket.socket() as worker:
                worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                worker.bind((HERE, port))
                worker.listen()
                assert taken(port, shared=True)
    assert not taken(port)


def test_a_port_that_others_share_is_not_ours() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HERE, 0))
        other.listen()
        assert taken(other.getsockname()[1], shared=True)


def test_a_port_can_be_had_again_at_once_after_a_server_has_hung_up_on_its_clients() -> None:
    with socket.socket() as before, socket.socket() as client:
        before.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        before.bind((HERE, 0))
        before.listen()
        client.connect(before.getsockname())
        before.accept()[0].close()  # the side that closes first keeps the connection, in TIME_WAIT
        assert client.recv(1) == b""
        port = before.getsockname()[1]
    assert not taken(port)
    assert not taken(port, shared=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_who_asks_for_ipv4_is_not_reached_by_ipv6(tmp_path: Path, workers: int) -> None:
    """To gRPC 0.0.0.0 is [::]: a host whose firewall covers IPv4 alone would be open."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    host = "0.0.0.0"
    settings: dict[str, Any] = {"host": host, "insecure": True, "workers": workers}
    with held_port(host, 0, shared=True) as free:
        port = free if workers > 1 else 0
        with (
            barred_ipv6(host, free),
            serving(FakeEncoder(), GalleryDirectory(tmp_path), **settings, port=port) as running,
        ):
            number = int(running.address.rpartition(":")[2])
            socket.create_connection((HERE, number), timeout=5).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("::1", number), timeout=5)
    with held_port("::", number):
        pass
