"""What signals tell the serve command, before it serves, while it does, and once it was told to stop."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.errors import BadArtifact, Unavailable
from serving.rpc.address import check_address
from serving.server import worker
from serving.server.process import live
from serving.server.signals import Signals, ignore_hangups
from tests.serving.processes import ROOT, launched
from tests.tiny_model import write_tiny_model

# Ctrl-C while a module is imported.
INTERRUPTED = """
import sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
import crossbatch
sys.exit(crossbatch.main(["serve", "--model", "m", "--galleries", "."]))
"""

# A server whose model takes a minute to load.
LOADING = """
import sys, time
import crossbatch
from serving.engine import library
def look(self):
    print("loading", flush=True)
    time.sleep(60)
library.Library.look = look
sys.exit(crossbatch.main(["serve", "--model", "m", "--galleries", ".", "--port", sys.argv[1]]))
"""

# A process that logs a line, to a stream that takes the given time to write it, and ends at once.
ENDING = """
import asyncio, logging, signal, sys, time
from serving.observability import logs as telemetry
from serving.server.signals import Signals
write = telemetry._Writer._write
def slowly(self, line):
    time.sleep(float(sys.argv[1]))
    write(self, line)
telemetry._Writer._write = slowly
async def end():
    logging.getLogger().warning("last words")
    Signals().stop(signal.SIGTERM)
telemetry.configure_logs()
asyncio.run(end())
"""


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class FakeServer:
    """Counts what it is told; each reload ends as the next of `outcomes` says."""

    def __init__(self, *outcomes: Any) -> None:
        self.address = ""
        self.failed = asyncio.Event()
        self.outcomes = list(outcomes)
        self.done: list[str] = []

    async def start(self) -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # before it is ready: not worth a reload
        await asyncio.sleep(0.02)
        self.done.append("started")

    async def stop(self, grace: float) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.02)
        self.done.append(f"stopped within {grace:g}")

    async def reload(self) -> Any:
        self.done.append("reload")
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_hangup_loads_anew_and_one_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer("a model", BadArtifact("It is damaged."), ZeroDivisionError("a bug"))
    heard: list[str] = []

    def reloaded(failure: str) -> None:
        heard.append(failure)
        os.kill(os.getpid(), signal.SIGHUP if len(heard) < 3 else signal.SIGTERM)

    async def process() -> None:
        serving = lambda: os.kill(os.getpid(), signal.SIGHUP)  # noqa: E731
        await live(server, Signals(), 3.0, serving=serving, reloaded=reloaded)

    ignore_hangups()
    asyncio.run(process())
    os.kill(os.getpid(), signal.SIGHUP)  # nor does one end the process when the loop is closed
    assert server.done == ["started", "reload", "reload", "reload", "stopped within 3"]
    assert heard == ["", "It is damaged.", "a bug"]
    assert [each.levelname for each in caplog.records if "stays as it is" in each.message] == ["ERROR"] * 2


def test_a_worker_that_can_embed_no_more_makes_room_for_another() -> None:
    server = FakeServer()

    async def process() -> None:
        signals = Signals(once=True)
        failing = asyncio.create_task(worker._stop_when_failed(server, signals))
        await live(server, signals, 3.0, serving=server.failed.set)
        await failing

    asyncio.run(process())
    assert server.done == ["started", "stopped within 3"]


@pytest.mark.parametrize("name", ["pydantic", "numpy", "serving.server.server"])
def test_ctrl_c_while_the_command_is_imported_is_one_word_and_no_traceback(name: str) -> None:
    line = [sys.executable, "-c", INTERRUPTED.format(name=name)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_until_the_models_are_loaded_the_port_is_ours_and_closed_and_sigterm_ends_at_once(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = free.getsockname()
    line = [sys.executable, "-c", LOADING, str(place[1])]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(place, 5)
            with pytest.raises(Unavailable, match="in use"):
                check_address(*place, insecure=False)
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(2) == 128 + signal.SIGTERM
            assert process.stdout.read() == ""
        finally:
            process.kill()


def test_ctrl_c_ends_the_server_while_a_call_is_in_progress(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.onnx")
    with (
        launched(tmp_path / "tiny.onnx", tmp_path / "g") as started,
        grpc.insecure_channel(started.address) as channel,
    ):
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        told = iter(watch(b"", timeout=30))
        next(told)
        started.process.send_signal(signal.SIGINT)
        next(told)  # NOT_SERVING
        assert started.process.wait(5) == 0


@pytest.mark.parametrize(("seconds", "lines"), [(0.05, 1), (10, 0)])
def test_a_process_that_ends_at_once_writes_its_last_lines_unless_nobody_takes_them(
    seconds: float, lines: int
) -> None:
    line = [sys.executable, "-c", ENDING, str(seconds)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=8, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
    assert done.stderr.count("last words") == lines
