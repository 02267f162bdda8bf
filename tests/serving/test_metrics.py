"""What Prometheus reads of a running server, of one worker and of several."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import values as values_of_library
from prometheus_client.parser import text_string_to_metric_families

from protos import retrieval_service_pb2 as pb
from serving.engine.fleet import Fleet
from serving.engine.pipeline import Bounds
from serving.errors import Mismatch, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.observability import exposition, gathered, gauges
from serving.observability.call import Call, Stages, current_call
from serving.observability.counters import Counters
from serving.observability.gauges import Gauges
from serving.observability.metrics import Metrics
from serving.observability.state import GalleryState, ModelState, State
from serving.rpc.admission import Admission
from serving.server.server import Server
from serving.server.watch import Watch
from serving.settings import Settings
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSources, FakeSpec, serving
from tests.serving.stubs import Stubs, connected, image, item

EMBED = "RetrievalService/Embed"


def read(address: str, path: str = "/metrics", accept: str = "") -> str:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[str, float]:
    """Each sample as `name{label="value",...}`, labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def watched(path: Path, encoder: FakeEncoder, **settings: int) -> Iterator[tuple[Server, Stubs]]:
    with (
        serving(encoder, GalleryDirectory(path), metrics_port=0, **settings) as server,
        connected(server.address) as stubs,
    ):
        yield server, stubs


def test_calls_inputs_stages_and_runs_are_counted(tmp_path: Path) -> None:
    with watched(tmp_path, FakeEncoder()) as (server, stubs):
        stubs.embed(b"one", b"two")
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"bad")
        stubs.create("shoes")
        stubs.upsert("shoes", item("k"), item("l"))
        told = values(read(server.metrics_address))
    assert told[f'crossbatch_call_duration_seconds_count{{code="OK",rpc="{EMBED}"}}'] == 1
    assert told[f'crossbatch_call_duration_seconds_count{{code="INVALID_ARGUMENT",rpc="{EMBED}"}}'] == 1
    assert told[f'crossbatch_call_errors_total{{reason="BAD_IMAGE",rpc="{EMBED}"}}'] == 1
    assert told[f'crossbatch_inputs_total{{rpc="{EMBED}"}}'] == 3
    assert told['crossbatch_inputs_total{rpc="GalleryService/UpsertItems"}'] == 2
    assert told['crossbatch_images_embedded_total{model="fake"}'] == 2
    assert told['crossbatch_batch_images_sum{model="fake"}'] == 2
    runs = told['crossbatch_batch_images_count{model="fake"}']
    assert told['crossbatch_model_run_duration_seconds_count{model="fake"}'] == runs >= 1
    for stage in ("decode", "queue", "encode"):
        assert told[f'crossbatch_stage_duration_seconds_count{{stage="{stage}"}}'] == 1
        assert 0 < told[f'crossbatch_stage_duration_seconds_sum{{stage="{stage}"}}'] < 10
    assert told['crossbatch_stage_duration_seconds_count{stage="gallery"}'] == 1


def test_the_server_tells_how_it_stands(tmp_path: Path) -> None:
    with watched(tmp_path, FakeEncoder()) as (server, stubs):
        stubs.create("shoes")
        stubs.upsert("shoes", item("k"), item("l"))
        told = values(read(server.metrics_address))
    assert told['crossbatch_gallery_items{gallery="shoes"}'] == 2
    assert told['crossbatch_gallery_usable{gallery="shoes"}'] == 1
    assert told['crossbatch_gallery_info{gallery="shoes",index_type="exact",model="fake"}'] == 1
    info = f'crossbatch_model_info{{dimension="8",fingerprint="{"a" * 64}",model="fake",precision="fp32"}}'
    assert told[info] == 1
    assert told['crossbatch_worker_resident_memory_bytes{worker="0"}'] > 1e7
    assert told['crossbatch_worker_cpu_seconds_total{worker="0"}'] > 0
    assert told['crossbatch_inputs_in_flight_limit{worker="0"}'] == 512
    assert [name for name in told if name.startswith("crossbatch_build_info{")]


def test_what_waits_is_told_while_it_waits(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    with watched(tmp_path, encoder, max_batch=1) as (server, stubs):
        calls = [threading.Thread(target=stubs.embed, args=(b"%d" % i,)) for i in range(3)]
        for call in calls:
            call.start()
        # One is with the model, and the others wait for it.
        wait_until(
            lambda: (
                values(read(server.metrics_address))['crossbatch_queue_images{model="fake",worker="0"}'] == 2
            )
        )
        told = values(read(server.metrics_address))
        encoder.encode_gate.set()
        for call in calls:
            call.join()
        after = values(read(server.metrics_address))
    assert told['crossbatch_inputs_in_flight{worker="0"}'] == 3
    assert told['crossbatch_request_bytes_in_flight{worker="0"}'] > 0
    assert told[f'crossbatch_calls_in_flight{{rpc="{EMBED}",worker="0"}}'] == 3
    assert after[f'crossbatch_calls_in_flight{{rpc="{EMBED}",worker="0"}}'] == 0
    assert after['crossbatch_inputs_in_flight{worker="0"}'] == 0
    assert after['crossbatch_queue_images{model="fake",worker="0"}'] == 0


def test_images_that_are_decoded_are_told(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    encoder.decode_gate.clear()
    with watched(tmp_path, encoder) as (server, stubs):
        call = threading.Thread(target=stubs.embed, args=(b"a", b"b", b"c"))
        call.start()
        wait_until(
            lambda: values(read(server.metrics_address))['crossbatch_decoding_images{worker="0"}'] == 3
        )
        encoder.decode_gate.set()
        call.join()
        assert values(read(server.metrics_address))['crossbatch_decoding_images{worker="0"}'] == 0


def test_refused_expired_and_cancelled_calls_are_told_apart(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    with watched(tmp_path, encoder, max_in_flight=256, max_batch=1) as (server, stubs):
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"late", timeout=0.2)
        wait_until(
            lambda: (
                values(read(server.metrics_address))['crossbatch_inputs_given_up_total{reason="expired"}']
                == 1
            )
        )
        held = stubs.retrieval.Embed.future(
            pb.EmbedRequest(images=[b"x%d" % i for i in range(200)]), timeout=20
        )
        wait_until(
            lambda: values(read(server.metrics_address))['crossbatch_inputs_in_flight{worker="0"}'] == 200
        )
        with pytest.raises(grpc.RpcError):
            stubs.embed(*(b"%d" % i for i in range(100)))
        held.cancel()
        name = 'crossbatch_inputs_given_up_total{reason="cancelled"}'
        wait_until(lambda: values(read(server.metrics_address))[name] == 200)
        encoder.encode_gate.set()
        told = values(read(server.metrics_address))
    assert told['crossbatch_inputs_given_up_total{reason="expired"}'] == 1
    assert told['crossbatch_admission_refusals_total{limit="inputs",worker="0"}'] == 1
    assert told[f'crossbatch_call_errors_total{{reason="OVERLOADED",rpc="{EMBED}"}}'] == 1


def test_a_damaged_gallery_does_not_fail_the_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.observability.state.GALLERY_SECONDS", 0.0)
    with watched(tmp_path, FakeEncoder()) as (server, stubs):
        for name in ("good", "harmed"):
            stubs.create(name)
            stubs.upsert(name, item("k"))
        assert values(read(server.metrics_address))['crossbatch_gallery_usable{gallery="harmed"}'] == 1
        aside = tmp_path / "harmed" / "new"
        aside.write_bytes(b"no gallery" * 1000)
        aside.replace(tmp_path / "harmed" / "gallery.sqlite")
        told = values(read(server.metrics_address))
    assert told['crossbatch_gallery_usable{gallery="harmed"}'] == 0
    assert told['crossbatch_gallery_items{gallery="good"}'] == 1


def test_a_gallery_that_no_served_model_fits_is_not_usable(tmp_path: Path) -> None:
    with watched(tmp_path, FakeEncoder()) as (server, stubs):
        stubs.create("ours")
        GalleryDirectory(tmp_path).create("theirs", model_name="z", fingerprint="f" * 64, dimension=DIMENSION)
        with pytest.raises(grpc.RpcError):
            stubs.search("theirs", image(b"x"))
        told = values(read(server.metrics_address))
    assert told['crossbatch_gallery_usable{gallery="ours"}'] == 1
    assert told['crossbatch_gallery_usable{gallery="theirs"}'] == 0


def test_a_slow_disk_does_not_hold_up_the_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.observability.state.PATIENCE", 0.05)
    stuck = threading.Event()

    class SlowDirectory(GalleryDirectory):
        def open_names(self) -> list[str]:
            stuck.wait(20)
            return super().open_names()

    try:
        with serving(FakeEncoder(), SlowDirectory(tmp_path), metrics_port=0) as server:
            began = time.monotonic()
            assert 'crossbatch_inputs_in_flight{worker="0"}' in values(read(server.metrics_address))
            assert time.monotonic() - began < 2
            stuck.set()
    finally:
        stuck.set()


def test_a_dropped_gallery_is_told_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.observability.state.GALLERY_SECONDS", 0.0)
    galleries = GalleryDirectory(tmp_path)
    with serving(FakeEncoder(), galleries, metrics_port=0) as server, connected(server.address) as stubs:
        stubs.create("shoes")
        assert "crossbatch_gallery_items{" in read(server.metrics_address)
        with GalleryDirectory(tmp_path) as elsewhere:
            elsewhere.drop("shoes")
        assert "crossbatch_gallery_items{" not in read(server.metrics_address)


def test_only_a_get_of_metrics_is_answered(tmp_path: Path) -> None:
    with watched(tmp_path, FakeEncoder()) as (server, _):
        for path in ("/", "/metrics/", "/etc/passwd", "/metrics/../x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                read(server.metrics_address, path)
        post = urllib.request.Request(f"http://{server.metrics_address}/metrics", data=b"x")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(post, timeout=10)
        opened = read(server.metrics_address, accept="application/openmetrics-text; version=1.0.0")
        assert opened.endswith("# EOF\n")


def test_a_slow_reader_of_the_metrics_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(exposition, "CONNECTIONS", 3)
    endpoint = exposition.serve(CollectorRegistry(), "127.0.0.1", 0)
    host, port = endpoint.address.split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(2)]
    try:
        for each in slow:
            each.sendall(b"GET /met")
        assert read(endpoint.address) == ""  # there is room for one more
        slow.append(socket.create_connection((host, int(port))))
        slow[-1].sendall(b"GET /met")
        slow[0].settimeout(0.3)  # less than it has
        assert read(endpoint.address) == ""  # in the place of the oldest
        assert slow[0].recv(100) == b""
        for each in slow[1:]:
            each.settimeout(5)
            assert each.recv(100) == b""  # and these have had their time
    finally:
        for each in slow:
            each.close()
        endpoint.close()


def test_silent_connections_keep_nobody_from_the_metrics() -> None:
    endpoint = exposition.serve(CollectorRegistry(), "127.0.0.1", 0)
    host, port = endpoint.address.split(":")
    silent: list[socket.socket] = []
    try:
        for _ in range(5):
            silent += [socket.create_connection((host, int(port))) for _ in range(20)]
            assert read(endpoint.address) == ""
    finally:
        for each in silent:
            each.close()
        endpoint.close()


def test_a_reader_that_asks_and_takes_nothing_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(exposition, "SECONDS", 1.5)
    monkeypatch.setattr(exposition, "CONNECTIONS", 1)
    answering = threading.Event()

    class Waiting(CollectorRegistry):
        def collect(self) -> Any:
            answering.set()
            time.sleep(0.6)  # longer than the head may take
            return iter(())

    endpoint = exposition.serve(Waiting(), "127.0.0.1", 0)
    host, port = endpoint.address.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as asking:
            asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert answering.wait(5)
            with socket.create_connection((host, int(port)), timeout=5) as beyond:
                assert beyond.recv(100) == b""  # nobody is silent, so nobody makes room
            assert asking.recv(15) == b"HTTP/1.0 200 OK"
    finally:
        endpoint.close()


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serving(FakeEncoder(), GalleryDirectory(tmp_path), metrics_port=port)
        with pytest.raises(Unavailable, match=rf"127.0.0.1:{port} .*in use.* --metrics-port"), server:
            pass
    with pytest.raises(Unavailable, match="--metrics-host"):
        exposition.serve(CollectorRegistry(), "no such host", 0)


def test_a_start_that_fails_leaves_nobody_on_the_port_of_the_metrics(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    twice = FakeSources({"a": FakeEncoder(), "": FakeEncoder(FakeSpec(name="a"))})
    server = serving(twice, GalleryDirectory(tmp_path), metrics_port=port)
    with pytest.raises(Mismatch, match="would both be served as a"), server:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_nothing_is_served_unless_asked_for(tmp_path: Path) -> None:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server:
        assert server.metrics_address == ""
        assert type(server._watch.metrics) is Metrics


def test_galleries_past_a_hundred_are_told_together() -> None:
    count = gauges.MOST_GALLERIES + 3
    found = [GalleryState(f"g{i:03}", usable=True, items=i, recall=0.9) for i in range(count)]
    text = page(lambda: [state(galleries=found)])
    told = values(text)
    names = [name for name in told if name.startswith("crossbatch_gallery_items{")]
    assert len(names) == gauges.MOST_GALLERIES + 1
    assert told['crossbatch_gallery_items{gallery="(others)"}'] == 100 + 101 + 102
    assert 'crossbatch_gallery_index_recall{gallery="(others)"}' not in told


def test_a_state_survives_its_way_to_another_process(tmp_path: Path) -> None:
    told = state(
        galleries=[GalleryState("shoes", usable=True, items=3)],
        models=[ModelState("m", "f" * 64, "int8", 8, waiting=2)],
    )
    gathered.tell(tmp_path, told)
    assert gathered.told(tmp_path) == [told]
    gathered.forget(tmp_path, told.worker)
    gathered.forget(tmp_path, told.worker)
    assert gathered.told(tmp_path) == []


WORKER = """
import json, sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from serving.observability import gathered
from serving.observability.call import Call
from serving.observability.counters import Counters, share_values
from serving.observability.state import State
folder, state = Path(sys.argv[1]), State.of_json(json.loads(sys.argv[2]))
calls = state.inputs
share_values(folder, state.worker)
counters = Counters(CollectorRegistry())
for _ in range(calls):
    call = Call("RetrievalService/Embed", inputs=2)
    counters.began(call)
    counters.ended(call, "OK", 0.01)
counters.batch("m", 4, 0.1)
gathered.tell(folder, state)
print("ready", flush=True)
sys.stdin.read()
"""


def test_workers_are_added_up_and_a_dead_one_is_replaced() -> None:
    supervisor = gathered.Gathered("127.0.0.1", 0)
    folder, address = supervisor.folder, supervisor.address
    count = f'crossbatch_call_duration_seconds_count{{code="OK",rpc="{EMBED}"}}'

    def worker(number: int, calls: int) -> subprocess.Popen[str]:
        told = json.dumps(state(worker=number, inputs=calls).as_json())
        command = [sys.executable, "-c", WORKER, str(folder), told]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(*processes: subprocess.Popen[str]) -> None:
        for each in processes:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"

    workers = [worker(1, 3), worker(2, 4)]
    try:
        ready(*workers)
        told = values(read(address))
        assert told[count] == 7
        assert told[f'crossbatch_inputs_total{{rpc="{EMBED}"}}'] == 14
        assert told['crossbatch_images_embedded_total{model="m"}'] == 8
        assert told['crossbatch_inputs_in_flight{worker="1"}'] == 3
        assert told['crossbatch_inputs_in_flight{worker="2"}'] == 4
        workers[1].kill()
        workers[1].wait(10)
        supervisor.forget(2)
        told = values(read(address))
        assert told[count] == 7  # no total ever falls
        assert 'crossbatch_inputs_in_flight{worker="2"}' not in told
        files = sorted(os.listdir(folder))
        workers.append(worker(2, 5))
        ready(workers[2])
        told = values(read(address))
        assert told[count] == 12  # it counts on where the one before it stopped
        assert told['crossbatch_inputs_in_flight{worker="2"}'] == 5
        assert sorted(os.listdir(folder)) == sorted([*files, "state-2.json"])  # no file a death
    finally:
        for each in workers:
            each.kill()
            each.communicate()
        supervisor.close()
    assert not folder.exists()


def test_the_folder_of_a_supervisor_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "crossbatch-metrics-left"
    left.mkdir()
    (left / gathered.LOCK).touch()
    first = gathered.Gathered("127.0.0.1", 0)
    second = gathered.Gathered("127.0.0.1", 0)
    try:
        assert sorted(tmp_path.iterdir()) == sorted([first.folder, second.folder])
    finally:
        first.close()
        second.close()
    assert not list(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Unavailable):
        gathered.Gathered("127.0.0.1", taken.getsockname()[1])
    assert not list(tmp_path.iterdir())


def test_a_worker_tells_how_it_stands_until_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # to be as it was afterwards
    monkeypatch.setattr(values_of_library, "ValueClass", values_of_library.ValueClass)
    settings = Settings(model=("m",), galleries=tmp_path, metrics_port=0)
    watch = Watch(settings, worker=3, folder=tmp_path)
    fleet = Fleet(
        FakeSources({}), Bounds(1, 0.0, 1), decode_threads=1, metrics=watch.metrics, failed=lambda: None
    )
    watch.start(fleet, Admission(7), GalleryDirectory(tmp_path))
    try:
        wait_until(lambda: bool(gathered.told(tmp_path)))
        assert gathered.told(tmp_path)[0].worker == 3
        assert gathered.told(tmp_path)[0].most_inputs == 7
        assert watch.address == ""  # the supervisor serves
    finally:
        watch.stop(1.0)
    assert gathered.told(tmp_path) == []


def test_a_call_knows_its_slowest_input() -> None:
    call = Call(EMBED)
    token = current_call.set(call)
    stages = Stages()
    Stages()  # of a part of it that nobody asked the times of
    current_call.reset(token)
    stages.spent("decode", 1.0, 0.5)
    stages.spent("decode", 2.0, 0.1)
    assert call.stages is stages
    assert (stages.decode, stages.starts) == (0.5, {"decode": 1.0})


def test_counting_costs_a_call_little() -> None:
    """Some 10 µs are measured; a busy machine gets ten times that."""
    counters = Counters(CollectorRegistry())
    call = Call(EMBED, inputs=1, stages=Stages(decode=0.002, queue=0.001, encode=0.01, gallery=0.001))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            counters.began(call)
            counters.ended(call, "OK", 0.015)
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 100e-6


def page(look: Callable[[], list[State]]) -> str:
    registry = CollectorRegistry()
    registry.register(Gauges(look))
    return generate_latest(registry).decode()


def state(
    *,
    worker: int = 0,
    inputs: int = 0,
    galleries: list[GalleryState] | None = None,
    models: list[ModelState] | None = None,
) -> State:
    return State(
        worker=worker,
        calls={EMBED: 1},
        inputs=inputs,
        most_inputs=512,
        bytes=0,
        most_bytes=1,
        refusals={"inputs": 1},
        decoding=0,
        lines_dropped=0,
        process={"cpu_seconds_total": 1.0},
        models=models or [],
        galleries=galleries or [],
    )
