"""Several processes on one port: no fork with engines, replaced when they die, spread, told together."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.client.client import Client
from serving.errors import CrossbatchError, Unavailable
from serving.rpc.address import held_port
from serving.server import supervisor
from serving.server.supervisor import Supervisor
from serving.settings import Settings
from tests.serving.indexed import picture
from tests.serving.processes import Launched, alive, launched
from tests.serving.rpc_fakes import until
from tests.serving.test_metrics import read, values
from tests.tiny_model import write_tiny_model

WORDS = ("--workers", "2", "--threads", "1", "--metrics-port", "0")


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
            client.embed([picture(0)])


@contextmanager
def calling(address: str, count: int = 4) -> Iterator[list[CrossbatchError | None]]:
    """Clients that call without end, a connection a call, and never try again; yields what comes of each."""
    seen: list[CrossbatchError | None] = []
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            try:
                embed(address, retries=0)
                seen.append(None)
            except CrossbatchError as error:
                seen.append(error)

    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(call)
        try:
            until(lambda: seen.count(None) > 10)
            yield seen
        finally:
            done.set()


def test_no_engine_is_forked(pair: Launched) -> None:
    own = Path(f"/proc/{pair.process.pid}/maps").read_text()
    assert [name for name in ("onnxruntime", "faiss", "sqlite3", "cygrpc") if name in own] == []
    assert len(pair.workers()) == 2
    for pid in pair.workers():
        words = Path(f"/proc/{pid}/cmdline").read_text()
        assert "serving.server.supervisor" in words
        assert "tiny.onnx" not in words  # what a worker is told stands on no command line
        assert "onnxruntime" in Path(f"/proc/{pid}/maps").read_text()


def test_new_connections_go_to_every_worker_and_each_line_of_the_log_tells_which(pair: Launched) -> None:
    def answering() -> set[int]:
        embed(pair.address)
        return {each["worker"] for each in pair.said("Embed OK")}

    until(lambda: answering() == {1, 2})


def metrics(pair: Launched) -> dict[str, float]:
    (told,) = pair.said("metrics on")  # by the supervisor
    return values(read(told["address"]))


def test_the_metrics_of_all_workers_are_read_in_one_place(pair: Launched) -> None:
    embed(pair.address)
    until(lambda: len([name for name in metrics(pair) if name.startswith("crossbatch_worker_threads{")]) == 2)
    assert metrics(pair)['crossbatch_images_embedded_total{model="tiny"}'] > 0


def loads(pair: Launched, text: str = "loaded anew") -> list[int]:
    return [len(pair.said(text, worker=number)) for number in (1, 2)]


@pytest.mark.parametrize("by", ["a hangup", "a call"])
def test_all_workers_load_anew_by_whatever_tells_one_and_no_call_fails(pair: Launched, by: str) -> None:
    before = loads(pair)
    with calling(pair.address, 2) as seen, Client(pair.address) as client:
        pair.process.send_signal(signal.SIGHUP) if by == "a hangup" else client.reload()
        until(lambda: all(now > then for now, then in zip(loads(pair), before, strict=True)))
    assert set(seen) == {None}


def test_workers_that_cannot_load_anew_say_why_and_go_on(pair: Launched, model: Path) -> None:
    good = model.read_bytes()
    replace(model, b"no model")
    pair.process.send_signal(signal.SIGHUP)
    until(lambda: loads(pair, "nothing was loaded anew") == [1, 1])
    assert all(str(model) in each["message"] for each in pair.said("nothing was loaded anew"))
    replace(model, good)
    embed(pair.address, times=3)


def replace(model: Path, data: bytes) -> None:
    model.with_suffix(".new").write_bytes(data)
    model.with_suffix(".new").replace(model)


def test_a_worker_that_dies_is_replaced_and_its_clients_see_unavailable_only(pair: Launched) -> None:
    (last,) = pair.said("ReloadModels OK")
    victim = pair.said(" serves", worker=last["worker"])[-1]["pid"]
    before = len(pair.said(" serves"))
    with calling(pair.address) as seen:
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(pair.said(" serves")) > before)
        answered = seen.count(None)
        until(lambda: seen.count(None) > answered + 10)
    assert {type(each) for each in seen} <= {type(None), Unavailable}
    found = metrics(pair)
    assert found['crossbatch_call_duration_seconds_count{code="OK",rpc="ModelService/ReloadModels"}'] == 1
    started = found[f'crossbatch_worker_start_time_seconds{{worker="{last["worker"]}"}}']
    assert started < time.time()  # counts of the dead one stay, and gauges do not
    assert len(pair.workers()) == 2
    assert victim not in pair.workers()
    assert pair.process.poll() is None
    embed(pair.address, times=5, retries=0)


def test_a_worker_that_cannot_start_is_tried_again(pair: Launched, model: Path) -> None:
    good = model.read_bytes()
    before = len(pair.said(" serves"))
    replace(model, b"no model")
    os.kill(pair.workers()[-1], signal.SIGKILL)
    until(lambda: pair.said("cannot start"))
    embed(pair.address, times=3)
    assert len(pair.said(" serves")) == before
    pauses = [float(each["message"].split()[-2]) for each in pair.said("another starts in")]
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]
    replace(model, good)
    pair.process.send_signal(signal.SIGHUP)  # ends the pause
    until(lambda: len(pair.said(" serves")) > before)


def test_a_stop_drains_every_worker_and_ends_with_0(pair: Launched) -> None:
    workers = pair.workers()
    pair.process.send_signal(signal.SIGTERM)
    out, _ = pair.process.communicate(timeout=15)
    assert pair.process.returncode == 0
    assert out.startswith(f"served {pair.address} for ")
    assert {each.get("worker") for each in pair.said("draining")} == {None, 1, 2}
    assert not any(alive(pid) for pid in workers)
    assert [each for each in pair.records() if "incident" in each or each.get("code") == "INTERNAL"] == []
    with held_port("127.0.0.1", int(pair.address.rpartition(":")[2])):
        pass  # nothing is left of the port


@pytest.mark.parametrize("end", ["killed", "told twice"])
def test_workers_do_not_outlive_their_supervisor(model: Path, end: str) -> None:
    delay = "0" if end == "killed" else "60"
    with launched(model, model.with_name("h"), *WORDS, "--drain-delay", delay) as pair:
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


@pytest.fixture
def workers(model: Path, tmp_path: Path) -> Supervisor:
    told = {"model": [str(model)], "galleries": tmp_path, "port": 0, "workers": 2}
    return Supervisor(Settings.model_validate(told))


def test_a_worker_that_loads_too_long_is_killed(workers: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOAD_SECONDS", 0.01)
    with pytest.raises(Unavailable, match=r"Worker 1 has not loaded within 0\.01 s and is killed"):
        workers.start()
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert not any(b"supervisor" in Path(f"/proc/{each}/cmdline").read_bytes() for each in children)


def test_a_worker_that_does_not_drain_in_time_is_killed(
    workers: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.1)
    with caplog.at_level(logging.INFO):
        workers.start()
    pids = [vars(each)["pid"] for each in caplog.records if each.getMessage().endswith(" serves")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    workers.stop(0.1)
    assert "2 workers have not ended after 0.2 s and are killed" in caplog.messages
    assert not any(alive(pid) for pid in pids)
