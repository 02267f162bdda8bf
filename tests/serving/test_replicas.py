"""Servers behind one name, as a headless service of Kubernetes has it: clients spread calls and lose none."""

import socket
import socketserver
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from serving.client import Client, Item
from serving.errors import CrossbatchError, InvalidArgument, ReadOnly
from tests.serving.indexed import index, picture
from tests.serving.processes import Launched, launched
from tests.serving.rpc_fakes import until

ANSWER, NAME, INTERNET = b"\x84\0", b"\xc0\x0c", b"\0\x01"
"""Flags of an authoritative answer; a reference to the name that was asked for; both class IN and type A."""

PATIENCE = 20.0  # seconds


class Names(socketserver.ThreadingUDPServer):
    """A name server that knows one name, whose addresses change."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.hosts: list[str] = []


class Asked(socketserver.DatagramRequestHandler):
    server: Names

    def handle(self) -> None:
        asked = self.rfile.read()
        question = asked[12 : asked.index(b"\0", 12) + 5]
        hosts = self.server.hosts if question[-4:-2] == INTERNET else []  # and not IPv6 or a text
        self.wfile.write(asked[:2] + ANSWER + struct.pack(">4H", 1, len(hosts), 0, 0) + question)
        for host in hosts:
            lifetime = struct.pack(">IH", 0, 4)
            self.wfile.write(NAME + INTERNET + INTERNET + lifetime + socket.inet_aton(host))


@pytest.fixture
def names() -> Iterator[Names]:
    with Names() as names:
        threading.Thread(target=names.serve_forever, args=(0.05,)).start()
        yield names
        names.shutdown()


@contextmanager
def calling(client: Client, count: int = 4) -> Iterator[list[CrossbatchError]]:
    """Call without end from several threads; yields the errors that come of it."""
    errors: list[CrossbatchError] = []
    done = threading.Event()

    def call() -> None:
        while not done.wait(0.005):
            try:
                client.embed([picture(0)])
            except CrossbatchError as error:
                errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        done.set()
        for thread in threads:
            thread.join()


def answered(server: Launched) -> int:
    return len(server.said("RetrievalService/Embed OK"))


def test_calls_are_spread_and_none_fails_while_servers_come_and_go(model: Path, names: Names) -> None:
    with ExitStack() as stack:

        def start(host: str, port: str) -> Launched:
            words = ("--host", host, "--port", port, "--max-connection-age", "1", "--log-calls", "all")
            folder = model.with_name(f"galleries-{host}")
            return stack.enter_context(launched(model, folder, *words, "--threads", "1"))

        first = start("127.0.0.1", "0")
        port = first.address.rpartition(":")[2]
        second = start("127.0.0.2", port)
        names.hosts = ["127.0.0.1", "127.0.0.2"]
        client = stack.enter_context(Client(f"dns://127.0.0.1:{names.server_address[1]}/servers.test:{port}"))
        with calling(client) as errors:
            until(lambda: min(answered(first), answered(second)) > 50, PATIENCE)
            assert 0.5 < answered(first) / answered(second) < 2

            third = start("127.0.0.3", port)  # no connection breaks, and yet it gets its share
            names.hosts.append("127.0.0.3")
            until(lambda: answered(third) > 50, PATIENCE)

            names.hosts.remove("127.0.0.2")
            second.process.terminate()
            assert second.process.wait(20) == 0
            first.process.kill()
            before = answered(third)
            until(lambda: answered(third) > before + 50, PATIENCE)

            again = start("127.0.0.1", port)
            until(lambda: answered(again) > 50, PATIENCE)
        assert errors == []


def test_addresses_in_a_row_are_servers_too(model: Path) -> None:
    with ExitStack() as stack:
        words = ("--log-calls", "all", "--threads", "1")
        pair = [stack.enter_context(launched(model, model.with_name(name), *words)) for name in ("a", "b")]
        client = stack.enter_context(Client("ipv4:" + ",".join(each.address for each in pair)))
        until(lambda: client.embed([picture(0)]).any() and min(map(answered, pair)) > 5, PATIENCE)


@pytest.fixture
def read_only(model: Path, data: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with the gallery `shop`, mounted as a volume that is read-only."""
    folder = tmp_path / "galleries"
    index(model, data, folder / "shop", thumbnails=True)
    mounted = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a folder here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_galleries_of_a_read_only_volume_are_served(model: Path, data: Path, read_only: Path) -> None:
    photo = min(data.rglob("*.jpg"))
    words = ("--workers", "2", "--metrics-port", "0")
    with launched(model, read_only, *words) as server, Client(server.address) as client:
        assert client.search("shop", images=[photo], k=1)[0][0].key == photo.relative_to(data).as_posix()
        assert len(list(client.items("shop", thumbnails=True))) == 20
        for write in (
            lambda: client.upsert("shop", [Item("new", image=photo)]),
            lambda: client.create("new"),
            lambda: list(client.build_index("shop")),
        ):
            with pytest.raises(ReadOnly):
                write()
        assert not [each for each in server.records() if each["level"] == "ERROR"]


def test_a_key_travels_in_plain_text_only_where_all_addresses_are_of_this_machine() -> None:
    Client("ipv4:127.0.0.1:1,127.0.0.2:1", api_key="s3cret").close()
    for address in ("ipv4:127.0.0.1:1,10.0.0.1:1", "ipv6:[::1]:1,[2001:db8::1]:1", "dns:///localhost.evil:1"):
        with pytest.raises(InvalidArgument, match="plain text"):
            Client(address, api_key="s3cret")
