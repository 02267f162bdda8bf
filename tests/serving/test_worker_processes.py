"""Several processes on one port: no fork with engines, replaced when they die, spread, told together."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import model_service_pb2 as model_pb
from protos import model_service_pb2_grpc
from serving.client.client import Client
from serving.engine.plan import Kind, Plan, read_plans, written_plans
from serving.errors import BadImage, CrossbatchError, Unavailable
from serving.settings import Settings
from tests.serving.processes import ROOT, Launched, command, launched
from tests.serving.rpc_fakes import until
from tests.serving.test_process import picture_of
from tests.tiny_model import DIMENSION, SIZE, tiny_graph, write_tiny_model

WORDS = ("--workers", "2", "--threads", "1", "--decode-threads", "1", "--metrics-port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Launched]:
    with launched(model, model.with_name("g"), *WORDS) as pair:
        yield pair


def embed(address: str, times: int = 1, **options: float) -> None:
    with Client(address, **options) as client:  # type: ignore[arg-type]
        for _ in range(times):
            client.embed([picture_of(0)])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Callers:
    """Clients that call without end, each on a connection of its own, and never try again."""

    def __init__(self, address: str, count: int = 4) -> None:
        self.failures: list[CrossbatchError] = []
        self.answered = 0
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(address,), daemon=True) for _ in range(count)
        ]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        until(lambda: self.answered > 10)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(10)

    def _call(self, address: str) -> None:
        while not self._done.is_set():
            try:
                with Client(address, retries=0) as client:
                    client.embed([picture_of(1)])
                self.answered += 1
            except CrossbatchError as error:
                self.failures.append(error)


def test_the_metrics_of_all_workers_are_read_in_one_place(pair: Launched) -> None:
    embed(pair.address, 3)
    address = pair.said("metrics on")[0]["address"]
    until(lambda: metrics(address).count("crossbatch_worker_threads{") == 2)
    assert 'crossbatch_images_embedded_total{model="tiny"} ' in metrics(address)
    assert len(pair.said("metrics on")) == 1  # the supervisor's


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_no_engine_is_forked(pair: Launched) -> None:
    own = Path(f"/proc/{pair.process.pid}/maps").read_text()
    assert [name for name in ("onnxruntime", "faiss", "sqlite3", "cygrpc") if name in own] == []
    assert len(pair.workers()) == 2
    for pid in pair.workers():
        words = Path(f"/proc/{pid}/cmdline").read_text()
        assert "serving.server.worker" in words
        assert "tiny.onnx" not in words  # what a worker is told stands on no command line
        assert "onnxruntime" in Path(f"/proc/{pid}/maps").read_text()


def test_new_connections_go_to_every_worker_and_each_line_of_the_log_tells_which(pair: Launched) -> None:
    def answering() -> set[int]:
        embed(pair.address)
        return {each["worker"] for each in pair.said("Embed OK")}

    until(lambda: answering() == {1, 2})


def test_a_hangup_reaches_all_workers_one_after_the_other_and_drops_no_call(pair: Launched) -> None:
    with Callers(pair.address, 2) as callers:
        pair.process.send_signal(signal.SIGHUP)
        until(lambda: pair.said("loaded anew", workers=2))
    assert callers.failures == []
    # Each process has a thread that writes its lines, so a worker's may come after the supervisor's.
    first, second = (until(partial(pair.said, "loaded anew", worker=each)) for each in (1, 2))
    assert (len(first), len(second)) == (1, 1)
    assert first[0]["time"] < second[0]["time"] <= pair.said("loaded anew", workers=2)[0]["time"]


def test_a_worker_that_cannot_load_anew_says_why_and_those_after_it_are_not_told(
    pair: Launched, model: Path
) -> None:
    good = model.read_bytes()
    before = len(pair.said("loaded anew"))
    model.with_suffix(".new").write_bytes(b"no model")
    model.with_suffix(".new").replace(model)
    pair.process.send_signal(signal.SIGHUP)
    (record,) = until(lambda: _supervisors(pair))
    assert "Worker 1: " in record["message"]
    assert str(model) in record["message"]
    model.with_suffix(".new").write_bytes(good)
    model.with_suffix(".new").replace(model)
    assert len(pair.said("loaded anew")) - before == 2  # the refusals of the worker and of its supervisor
    assert pair.said("nothing was loaded anew", worker=2) == []
    embed(pair.address, times=3)


def _supervisors(pair: Launched) -> list[dict[str, Any]]:
    return [each for each in pair.said("nothing was loaded anew") if "worker" not in each]


def test_a_call_that_loads_models_anew_reaches_the_workers_that_did_not_take_it(pair: Launched) -> None:
    def loads() -> list[int]:
        return [len(pair.said("loaded anew", worker=number)) for number in (1, 2)]

    before = loads()
    with grpc.insecure_channel(pair.address) as channel:
        model_service_pb2_grpc.ModelServiceStub(channel).ReloadModels(
            model_pb.ReloadModelsRequest(), timeout=10
        )
    until(lambda: pair.said("loaded anew", workers=1))
    until(lambda: min(now - then for now, then in zip(loads(), before, strict=True)) > 0)
    assert loads() == [each + 1 for each in before]


def test_workers_take_messages_past_the_4_mib_that_grpc_takes_by_itself(pair: Launched) -> None:
    with Client(pair.address) as client:
        (answer,) = client.embed([bytes(6_000_000)], on_error="return")
    assert isinstance(answer, BadImage)  # it was looked at


def test_a_worker_that_dies_is_replaced_and_its_clients_see_unavailable_only(pair: Launched) -> None:
    victim = pair.workers()[0]
    before = len(pair.said(" serves"))
    with Callers(pair.address) as callers:
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(pair.said(" serves")) > before)
        answered = callers.answered
        until(lambda: callers.answered > answered + 10)
    assert {type(each) for each in callers.failures} <= {Unavailable}
    assert len(pair.workers()) == 2
    assert victim not in pair.workers()
    assert pair.process.poll() is None
    embed(pair.address, times=5, retries=0)
    # Neither the second worker nor the replacement, whose siblings take cores.
    assert [each["worker"] for each in pair.said("model tiny runs batches")] == [1]


def test_while_a_worker_cannot_start_the_other_serves_and_it_is_tried_again(
    pair: Launched, model: Path
) -> None:
    good = model.read_bytes()
    before = len(pair.said(" serves"))
    model.with_suffix(".new").write_bytes(b"no model")
    model.with_suffix(".new").replace(model)
    os.kill(pair.workers()[-1], signal.SIGKILL)
    until(lambda: pair.said("cannot start"))
    embed(pair.address, times=3)
    assert len(pair.said(" serves")) == before
    model.with_suffix(".new").write_bytes(good)
    model.with_suffix(".new").replace(model)
    until(lambda: len(pair.said(" serves")) > before)
    pauses = [float(each["message"].split()[-2]) for each in pair.said("another starts in")]
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]


def test_a_stop_drains_every_worker_and_ends_with_0(pair: Launched) -> None:
    workers = pair.workers()
    pair.process.send_signal(signal.SIGTERM)
    out, _ = pair.process.communicate(timeout=15)
    assert pair.process.returncode == 0
    assert out.startswith(f"served {pair.address} for ")
    assert {each.get("worker") for each in pair.said("draining")} == {None, 1, 2}
    assert not any(alive(pid) for pid in workers)
    assert [each for each in pair.records() if "incident" in each or each.get("code") == "INTERNAL"] == []
    # As several event loops in one process bring about (grpc#25364, grpc#42357).
    assert "BlockingIOError" not in pair.errors.read_text()
    with socket.socket() as again:  # nothing is left of the port
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(pair.address.rpartition(":")[2])))
        again.listen()


@pytest.mark.parametrize("end", ["killed", "told twice"])
def test_workers_do_not_outlive_their_supervisor(model: Path, end: str) -> None:
    with launched(
        model, model.with_name("h"), *WORDS, "--drain-delay", "60" if end != "killed" else "0"
    ) as pair:
        workers = pair.workers()
        if end == "killed":
            pair.process.kill()
        else:
            pair.process.send_signal(signal.SIGTERM)
            until(lambda: len(pair.said("draining")) == 3)
            for pid in workers:  # systemd tells every process of a service
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)
            assert pair.process.poll() is None  # would wait for a minute
            assert all(alive(pid) for pid in workers)
            pair.process.send_signal(signal.SIGTERM)
            assert pair.process.wait(5) == 128 + signal.SIGTERM
        until(lambda: not any(alive(pid) for pid in workers), 8)
        assert len(pair.said("draining", worker=1)) == 1


def test_a_worker_runs_models_as_it_is_told_and_tells_what_it_finds_by_itself(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.onnx")
    plans = {Kind("tiny", SIZE, "fp32", DIMENSION): Plan(7)}  # of a size that no trial has
    settings = Settings(model=(str(path),), galleries=tmp_path, port=0, workers=2, threads=1)
    told = {
        "worker": 1,
        "settings": settings.model_dump(mode="json"),
        "plans": written_plans(plans),
        "metrics": "",
    }
    line = [sys.executable, "-m", "serving.server.worker"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(told) + "\n")
            worker.stdin.flush()
            said = (json.loads(each) for each in worker.stdout)
            assert next(said) == {"plans": written_plans(plans)}
            address = next(said)["serving"]
            write_tiny_model(path, tiny_graph(size=2 * SIZE), image_size=2 * SIZE)
            worker.send_signal(signal.SIGHUP)
            ((kind, plan),) = read_plans(next(said)["plans"]).items()
            assert kind.image_size == 2 * SIZE
            assert plan.max_batch in (1, 2, 4, 8, 16, 32)
            assert next(said) == {"reloaded": ""}
            with grpc.insecure_channel(address) as channel:
                model_service_pb2_grpc.ModelServiceStub(channel).ReloadModels(
                    model_pb.ReloadModelsRequest(), timeout=10
                )
            # Before what lets the others load anew, one of which may die of it.
            assert read_plans(next(said)["plans"]) == {kind: plan}
            assert next(said) == {"reload": True}
            worker.stdin.close()
            assert worker.wait(10) == 0
        finally:
            worker.kill()


def test_what_no_worker_can_start_with_is_one_sentence_and_status_2(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    line = command(tmp_path / "bad.onnx", tmp_path / "g", *WORDS)
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("crossbatch serve: ")
    assert "bad.onnx" in sentence
    assert "Traceback" not in done.stderr
