"""The serve command as a process: its start, its signals, its drained stop, and `kill -9` amid writing."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest

from serving.client import Client, Item
from serving.errors import BadArtifact, CrossbatchError, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.rpc.address import held_port
from serving.server import command as serve
from serving.server.signals import Signals, live
from tests.serving.authority import Authority
from tests.serving.processes import ROOT, Launched, command, launched
from tests.tiny_model import DIMENSION, write_tiny_model

KILLS = 3
HUNG_UP = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT}

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

WITHOUT_FAISS = "import sys; sys.modules['faiss'] = None; import crossbatch; sys.exit(crossbatch.main())"


def run(*line: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, *line]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in HUNG_UP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a model and a certificate with its authority."""
    folder = tmp_path_factory.mktemp("served")
    write_tiny_model(folder / "tiny.onnx")
    authority = Authority()
    authority.sign().write(folder)
    (folder / "ca.crt").write_bytes(authority.certificate)
    return folder


@pytest.fixture
def started(folder: Path) -> Iterator[Launched]:
    words = ["--tls-certificate", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"), "--json"]
    with launched(folder / "tiny.onnx", folder / "g", *words) as started:
        yield started


def test_ctrl_c_drains_a_server_whose_log_holds_our_lines_alone(started: Launched, folder: Path) -> None:
    host, _, port = started.address.rpartition(":")
    for _ in range(8):
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(100)
    credentials = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
    with grpc.secure_channel(started.address, credentials) as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        told = iter(watch(b"", timeout=30))
        next(told)
        started.process.send_signal(signal.SIGINT)
        next(told)  # NOT_SERVING
        out, _ = started.process.communicate(timeout=15)
    assert started.process.returncode == 0
    result = json.loads(out)  # what follows the first line
    assert result["address"] == started.address
    assert result["seconds"] >= 0
    for text in ("serving on", "draining", "stopped"):  # each line is JSON
        assert started.said(text)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("port", "is in use"),
        ("model", "bad.onnx"),
        ("model of a worker", "bad.onnx"),
        ("no FAISS", "install crossbatch[cpu]"),
    ],
)
def test_what_prevents_a_start_is_one_sentence(folder: Path, tmp_path: Path, fault: str, says: str) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    with held_port("127.0.0.1", 0) as taken:
        words = {"port": ["--port", str(taken)], "model of a worker": ["--workers", "2"]}.get(fault, [])
        line = command(bad if "model" in fault else folder / "tiny.onnx", tmp_path / "g", *words)[1:]
        if fault == "no FAISS":
            line[:2] = ["-c", WITHOUT_FAISS]
        done = run(*line)
    assert (done.returncode, done.stdout) == (2, "")
    *logged, sentence = done.stderr.splitlines()
    assert all(each.startswith("{") for each in logged)
    assert sentence.startswith("crossbatch serve: ")
    assert says in sentence


def test_a_folder_of_galleries_that_is_not_there_is_told_before_models_are_loaded(tmp_path: Path) -> None:
    place = tmp_path / "shop"
    directory = GalleryDirectory(place / "galleries")
    directory.create("birds", model_name="tiny", fingerprint="a" * 64, dimension=4)
    for given, says in (
        ("galeries", f"--galleries {place}/galeries is not there; did you mean {place}/galleries? If not, "),
        ("no/other", f"--galleries {place}/no/other is not there, nor is {place}/no; make it first: "),
        ("galleries/birds", "birds is a gallery itself; give the folder that it is in, "),
    ):
        told = {"model": ["m"], "galleries": place / given}
        with pytest.raises(CrossbatchError) as failure:
            serve.run(serve.Settings.model_validate(told))
        assert says in str(failure.value)
    assert [each.name for each in place.iterdir()] == ["galleries"]


def tell(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.02)


def test_a_hangup_loads_anew_and_one_that_fails_changes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_end = MagicMock()
    monkeypatch.setattr("atexit.register", at_the_end)
    outcomes = [None, ZeroDivisionError("a bug"), BadArtifact("It is damaged.")]

    def reload() -> None:
        outcome = outcomes.pop()
        tell(signal.SIGHUP if outcomes else signal.SIGTERM)
        if outcome:
            raise outcome

    server = MagicMock(is_loading=True)
    server.start.side_effect = lambda: tell(signal.SIGHUP)  # before it serves: not worth a reload
    server.reload.side_effect = reload
    server.stop.side_effect = lambda grace: tell(signal.SIGHUP)
    frozen: list[int] = []

    def serving() -> None:
        frozen.append(gc.get_freeze_count())
        tell(signal.SIGHUP)

    live(server, Signals(), 3.0, serving=serving)
    tell(signal.SIGHUP)  # nor does one end the process afterwards
    assert [name for name, *_ in server.method_calls] == ["start", "reload", "reload", "reload", "stop"]
    server.stop.assert_called_once_with(3.0)
    assert [each.levelname for each in caplog.records if "stays as it is" in each.message] == ["ERROR"] * 2
    (end,) = at_the_end.call_args.args  # a load cannot be broken off, and Python would abort
    monkeypatch.setattr("os._exit", at_the_end)
    end()
    at_the_end.assert_called_with(0)
    # No call waits while what was loaded is looked through for garbage.
    assert frozen[0] > 10_000
    gc.unfreeze()


@pytest.mark.parametrize("name", ["pydantic", "serving.server.server"])
def test_ctrl_c_while_the_command_is_imported_is_one_word_and_no_traceback(name: str) -> None:
    done = run("-c", INTERRUPTED.format(name=name))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_until_the_models_are_loaded_the_port_is_ours_and_closed_and_sigterm_ends_at_once() -> None:
    with held_port("127.0.0.1", 0) as port:
        pass
    line = [sys.executable, "-c", LOADING, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 5)
            with pytest.raises(Unavailable, match="in use"), held_port("127.0.0.1", port):
                pass
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(2) == 128 + signal.SIGTERM
            assert process.stdout.read() == ""
        finally:
            process.kill()


def write_until_killed(
    address: str, batches: list[set[str]], acknowledged: set[str], begun: threading.Event
) -> None:
    """Store one batch after the other; those that were acknowledged are remembered."""
    vector = np.eye(DIMENSION, dtype=np.float32)[0]
    with Client(address, retries=0, timeout=5) as client, suppress(CrossbatchError):
        while True:
            batches.append({f"{len(batches)}-{i}" for i in range(1 + len(batches) % 5)})
            client.upsert("birds", [Item(key, vector=vector) for key in batches[-1]])
            acknowledged |= batches[-1]
            begun.set()


def test_kill_9_loses_nothing_acknowledged_and_leaves_no_half_of_a_call(folder: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    acknowledged: set[str] = set()
    batches: list[set[str]] = []
    for kill in range(KILLS + 1):
        with launched(folder / "tiny.onnx", tmp_path / "galleries", "--log-level", "ERROR") as server:
            with Client(server.address) as client:
                if not kill:
                    client.create("birds")
                stored = {item.key for item in client.items("birds")}
            assert stored >= acknowledged
            assert all(batch <= stored or not batch & stored for batch in batches)
            if kill < KILLS:
                begun = threading.Event()
                told = (server.address, batches, acknowledged, begun)
                writer = threading.Thread(target=write_until_killed, args=told)
                writer.start()
                assert begun.wait(10)
                time.sleep(float(random.uniform(0, 0.1)))
                server.process.kill()
                writer.join(10)
                assert not writer.is_alive()
    assert len(acknowledged) > KILLS
