"""A Milvus as a process of its own that is started, stopped and killed: milvus-lite on a port."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.rpc.address import held_socket


def free_port() -> int:
    with held_socket("127.0.0.1", 0) as held:
        return int(held.getsockname()[1])


@contextmanager
def milvus_process(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Start it over a folder, which keeps what it holds; it is stopped at the end, unless it has ended."""
    words = ["--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "milvus_lite", "server", *words]) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            yield process
        finally:
            process.terminate()
