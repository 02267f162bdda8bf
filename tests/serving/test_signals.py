"""What signals tell the serve command, before it serves, while it does, and once it was told to stop."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.errors import BadArtifact, Unavailable
from serving.rpc.address import held_port
from serving.server.signals import Signals, live
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
from serving.engine import repository
def look(self):
    print("loading", flush=True)
    time.sleep(60)
repository.ModelRepository.look = look
sys.exit(crossbatch.main(["serve", "--model", "m", "--galleries", ".", "--port", sys.argv[1]]))
"""

# A process that logs a line, to a stream that takes the given time to write it, and ends at once.
ENDING = """
import logging, signal, sys, time
from serving.observability.logs import configure_logs
from serving.server.signals import Signals
class Slow:
    def isatty(self):
        return False
    def write(self, text):
        time.sleep(float(sys.argv[1]))
        sys.stderr.write(text)
    def flush(self):
        sys.stderr.flush()
configure_logs(stream=Slow())
logging.getLogger().warning("last words")
Signals().stop(signal.SIGTERM)
"""


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class FakeServer:
    """Notes what it is told; each reload ends as the next of `outcomes` says, the last with a stop."""

    address = "nowhere"

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.done: list[str] = []

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # before it is ready: not worth a reload
        time.sleep(0.02)
        self.done.append("started")

    def stop(self, grace: float) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.02)
        self.done.append(f"stopped within {grace:g}")

    def reload(self) -> Any:
        self.done.append("reload")
        outcome = self.outcomes.pop(0)
        os.kill(os.getpid(), signal.SIGHUP if self.outcomes else signal.SIGTERM)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_hangup_loads_anew_and_one_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer(BadArtifact("It is damaged."), ZeroDivisionError("a bug"), "a model")
    frozen: list[int] = []

    def serving() -> None:
        frozen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGHUP)

    live(server, Signals(), 3.0, serving=serving)
    os.kill(os.getpid(), signal.SIGHUP)  # nor does one end the process afterwards
    assert server.done == ["started", "reload", "reload", "reload", "stopped within 3"]
    assert [each.levelname for each in caplog.records if "stays as it is" in each.message] == ["ERROR"] * 2
    # No call waits while what was loaded is looked through for garbage.
    assert frozen[0] > 10_000
    gc.unfreeze()


def test_what_prevents_a_start_is_raised() -> None:
    class Failing(FakeServer):
        def start(self) -> None:
            raise BadArtifact("It is damaged.")

    with pytest.raises(BadArtifact):
        live(Failing(), Signals(), 3.0, serving=lambda: None)


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
            with pytest.raises(Unavailable, match="in use"), held_port(*place):
                pass
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
