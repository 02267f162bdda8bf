"""Servers of Milvus on this machine: a whole one, and milvus-lite within this process."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PORTS = (
    "data_coord_port", "data_node_port", "etcd_port", "index_coord_port", "index_node_port",
    "proxy_internal_port", "proxy_port", "query_coord_port", "query_node_port", "root_coord_port",
)  # fmt: skip
TOKEN = "root:Milvus"  # of the user that a new server has
QUICK = {  # milliseconds; a server of few collections need not spare its processor
    "proxy.timeTickInterval": 20,
    "queryCoord.checkInterval": 50,
    "queryCoord.distPullInterval": 50,
    "common.session.ttl": 2,  # seconds
}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def bound(port: int) -> socket.socket | None:
    """A socket of a port, though a server that was stopped a moment ago had it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
    except OSError:
        made.close()
        return None
    return made


class MilvusServer:
    """A whole Milvus in a folder, with credentials; it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        import milvus

        *ports, peer = free_ports(len(PORTS) + 1)
        named = dict(zip(PORTS, ports, strict=True))
        config = milvus.MilvusServerConfig(data_dir=str(folder), **named)
        config.try_bind_port = bound
        config.set("authorization_enabled", True)
        for name, value in QUICK.items():
            config.set(name, value)
        self._etcd = folder.with_name(f"{folder.name}-etcd.yaml")  # or its second port is one for all
        url, peer_url = f"http://127.0.0.1:{named['etcd_port']}", f"http://127.0.0.1:{peer}"
        self._etcd.write_text(
            f"name: default\ndata-dir: {folder}/data/etcd.data\n"
            f"listen-client-urls: {url}\nadvertise-client-urls: {url}\n"
            f"listen-peer-urls: {peer_url}\ninitial-advertise-peer-urls: {peer_url}\n"
            f"initial-cluster: default={peer_url}\n"
        )
        self._server = milvus.MilvusServer(config)
        self.address = f"milvus://127.0.0.1:{named['proxy_port']}"

    def start(self) -> None:
        """Start it; returns when it answers."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ETCD_CONFIG_PATH", str(self._etcd))
            self._server.start()

    def stop(self) -> None:
        """Stop it; what has not ended after a second is killed."""
        self._server.stop()


@contextmanager
def milvus_server(folder: Path) -> Iterator[MilvusServer]:
    """Start a server; skips the test where that cannot be done, but fails it where CI is set."""
    try:
        server = MilvusServer(folder)
        server.start()
    except Exception as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Milvus server can be started here: {type(error).__name__}: {error}")
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def milvus_lite(folder: Path) -> Iterator[str]:
    """Serve a folder by milvus-lite; yields its address."""
    from milvus_lite.adapter.grpc.server import start_server_in_thread

    server, database, port = start_server_in_thread(data_dir=str(folder), host="127.0.0.1", port=0)
    try:
        yield f"milvus://127.0.0.1:{port}"
    finally:
        server.stop(grace=0)
        database.close()
