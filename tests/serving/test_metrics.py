"""What Prometheus reads of a running server, and the dashboard and the page of the docs held against it."""

import json
import math
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from serving.errors import Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.gallery.note import Note, write_note
from serving.observability.metrics import served_metrics
from serving.rpc.address import held_port
from serving.server.server import Server
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSources, FakeSpec, serving, until
from tests.serving.stubs import Stubs, connected, image, item

EMBED = "RetrievalService/Embed"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.observability.metrics.REFRESH_SECONDS", 0.02)


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[str, float]:
    """Each sample as `name{label="value",...}`, labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def told(server: Server, name: str) -> float:
    """A sample of a server; NaN where it has none."""
    return values(read(server.metrics_address)).get(name, float("nan"))


@contextmanager
def watched(
    path: Path, encoder: FakeEncoder | FakeSources, **settings: int
) -> Iterator[tuple[Server, Stubs]]:
    with (
        serving(encoder, GalleryDirectory(path), metrics_port=0, **settings) as server,
        connected(server.address) as stubs,
    ):
        yield server, stubs


def test_what_was_done_is_counted_and_how_the_server_stands_is_told(tmp_path: Path) -> None:
    with watched(tmp_path, FakeEncoder()) as (server, stubs):
        stubs.embed(b"one", b"two")
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"bad")
        stubs.create("shoes")
        stubs.upsert("shoes", item("k"), item("l"))
        until(lambda: told(server, 'crossbatch_gallery_items{gallery="shoes"}') == 2)
        found = values(read(server.metrics_address))
    assert found[f'crossbatch_call_duration_seconds_count{{code="OK",rpc="{EMBED}"}}'] == 1
    assert found[f'crossbatch_call_duration_seconds_count{{code="INVALID_ARGUMENT",rpc="{EMBED}"}}'] == 1
    assert found[f'crossbatch_call_errors_total{{reason="BAD_IMAGE",rpc="{EMBED}"}}'] == 1
    assert found[f'crossbatch_inputs_total{{rpc="{EMBED}"}}'] == 3
    assert found['crossbatch_inputs_total{rpc="GalleryService/UpsertItems"}'] == 2
    assert found['crossbatch_images_embedded_total{model="fake"}'] == 2
    assert found['crossbatch_batch_images_sum{model="fake"}'] == 2
    runs = found['crossbatch_batch_images_count{model="fake"}']
    assert found['crossbatch_model_run_duration_seconds_count{model="fake"}'] == runs >= 1
    for stage, calls in (("decode", 2), ("queue", 2), ("encode", 1)):
        assert found[f'crossbatch_stage_duration_seconds_count{{stage="{stage}"}}'] == calls
        assert 0 < found[f'crossbatch_stage_duration_seconds_sum{{stage="{stage}"}}'] < 10
    assert found['crossbatch_stage_duration_seconds_count{stage="gallery"}'] == 1
    assert found['crossbatch_gallery_usable{gallery="shoes"}'] == 1
    assert found['crossbatch_gallery_info{gallery="shoes",index_type="exact",model="fake"}'] == 1
    info = f'dimension="8",fingerprint="{"a" * 64}",model="fake",precision="fp32",provider="cpu"'
    assert found[f"crossbatch_model_info{{{info}}}"] == 1
    assert found['crossbatch_worker_resident_memory_bytes{worker="0"}'] > 1e7
    assert found['crossbatch_worker_cpu_seconds_total{worker="0"}'] > 0
    assert found['crossbatch_inputs_in_flight_limit{worker="0"}'] == 512
    assert [name for name in found if name.startswith("crossbatch_build_info{")]


def test_what_waits_is_told_while_it_waits(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    in_flight = f'crossbatch_calls_in_flight{{rpc="{EMBED}",worker="0"}}'
    with watched(tmp_path, encoder, max_batch=1, threads=1) as (server, stubs):
        calls = [threading.Thread(target=stubs.embed, args=(b"%d" % i,)) for i in range(3)]
        for call in calls:
            call.start()
        # One is with the model, and the others wait for it.
        until(lambda: told(server, 'crossbatch_queue_images{model="fake",worker="0"}') == 2)
        until(lambda: told(server, 'crossbatch_inputs_in_flight{worker="0"}') == 3)
        assert told(server, in_flight) == 3
        assert told(server, 'crossbatch_request_bytes_in_flight{worker="0"}') > 0
        encoder.encode_gate.set()
        for call in calls:
            call.join()
        assert told(server, in_flight) == 0
        until(lambda: told(server, 'crossbatch_inputs_in_flight{worker="0"}') == 0)
        until(lambda: told(server, 'crossbatch_queue_images{model="fake",worker="0"}') == 0)


def test_refused_expired_and_cancelled_calls_are_told_apart(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    given_up = "crossbatch_inputs_given_up_total"
    with watched(tmp_path, encoder, max_in_flight=256, max_batch=1) as (server, stubs):
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"late", timeout=0.2)
        held = stubs.embedding(*(b"x%d" % i for i in range(200)))
        until(lambda: told(server, 'crossbatch_inputs_in_flight{worker="0"}') >= 200)
        with pytest.raises(grpc.RpcError):
            stubs.embed(*(b"%d" % i for i in range(100)))
        held.cancel()
        until(lambda: told(server, f'{given_up}{{reason="cancelled"}}') == 200)
        encoder.encode_gate.set()
        until(lambda: told(server, f'{given_up}{{reason="expired"}}') == 1)
        assert told(server, 'crossbatch_admission_refusals_total{limit="inputs",worker="0"}') == 1
        assert told(server, f'crossbatch_call_errors_total{{reason="OVERLOADED",rpc="{EMBED}"}}') == 1


def test_a_gallery_that_is_damaged_or_that_no_model_fits_is_not_usable(tmp_path: Path) -> None:
    with watched(tmp_path, FakeEncoder()) as (server, stubs):
        for name in ("good", "harmed"):
            stubs.create(name)
            stubs.upsert(name, item("k"))
        GalleryDirectory(tmp_path).create("theirs", model_name="z", fingerprint="f" * 64, dimension=DIMENSION)
        with pytest.raises(grpc.RpcError):
            stubs.search("theirs", image(b"x"))
        until(lambda: told(server, 'crossbatch_gallery_usable{gallery="theirs"}') == 0)
        aside = tmp_path / "harmed" / "new"
        aside.write_bytes(b"no gallery" * 1000)
        aside.replace(tmp_path / "harmed" / "gallery.sqlite")
        until(lambda: told(server, 'crossbatch_gallery_usable{gallery="harmed"}') == 0)
        assert told(server, 'crossbatch_gallery_usable{gallery="good"}') == 1
        assert told(server, 'crossbatch_gallery_items{gallery="good"}') == 1


def test_what_is_gone_is_told_no_more(tmp_path: Path) -> None:
    sources = FakeSources({"a": FakeEncoder(), "b": FakeEncoder(FakeSpec(fingerprint="b" * 64))})
    with watched(tmp_path, sources) as (server, stubs):
        stubs.create("shoes")
        gone = ['crossbatch_gallery_usable{gallery="shoes"}', 'crossbatch_queue_images{model="b",worker="0"}']
        until(lambda: not any(math.isnan(told(server, each)) for each in gone))
        del sources.models["b"]
        server.reload()
        with GalleryDirectory(tmp_path) as elsewhere:
            elsewhere.drop("shoes")
        until(lambda: all(math.isnan(told(server, each)) for each in gone))


def test_a_taken_port_is_one_sentence() -> None:
    with held_port("127.0.0.1", 0) as port:
        told = f"127.0.0.1:{port} .*; choose another --metrics-port"
        with pytest.raises(Unavailable, match=told), served_metrics("127.0.0.1", port, CollectorRegistry()):
            pass


ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "examples/grafana.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
PANELS = [each for each in DASHBOARD["panels"] if each["type"] != "row"]
TARGET_LABELS = {"job", "instance"}  # which Prometheus adds


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every metric that a server with all kinds of events behind it tells, by sample name."""
    folder = tmp_path_factory.mktemp("galleries")
    with watched(folder, FakeEncoder()) as (server, stubs):
        stubs.create("shoes")
        stubs.upsert("shoes", item("k"))
        stubs.search("shoes", image(b"photo"))
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"bad")
        write_note(folder / "shoes", Note("shared", "host", 1, "0", "2026-03-01T12:00:00+00:00", served=True))
        until(lambda: "crossbatch_gallery_lag_seconds{" in read(server.metrics_address))  # which is set last
        text = read(server.metrics_address)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        assert family.samples, family.name
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[str]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"]
    yield from re.findall(r"^ +expr: (.+)$", PAGE, re.MULTILINE)


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert {"uid", "title", "time", "version", "annotations"} <= DASHBOARD.keys()
    assert "id" not in DASHBOARD  # Grafana gives it
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == variables
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert {"title", "targets", "fieldConfig", "options", "description"} <= panel.keys()
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) >= 1


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_asks_for_what_there_is(expression: str, exposed: dict[str, set[str]]) -> None:
    """As much of PromQL as the expressions use: selectors, ranges and the labels that sums are by."""
    known = set(TARGET_LABELS)
    for each in re.finditer(r"(crossbatch_\w+)(?:\{(.*?)\})?(\[[^\]]*\])?", expression):
        name, matchers, duration = each.groups()
        assert name in exposed, name
        assert set(re.findall(r'(\w+)(?:=|!=|=~|!~)"', matchers or "")) <= exposed[name] | TARGET_LABELS
        known |= exposed[name]
        counted = name.endswith(("_total", "_bucket", "_count", "_sum"))
        inside = expression[: each.start()].endswith(("rate(", "increase("))
        assert counted == inside == bool(duration), f"{name}: a counter, and no gauge, is read as a rate"
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(grouped.split(", ")) <= known, grouped


def test_every_metric_has_its_line_in_the_docs(exposed: dict[str, set[str]]) -> None:
    lines = re.findall(r"^\| `(crossbatch_\w+)` \| (\w+) \| ([\w, ]+) \| .+ \|$", PAGE, re.MULTILINE)
    told = {name: (kind, set(labels.split(", "))) for name, kind, labels in lines}
    assert len(told) == len(lines)
    found: dict[str, tuple[str, set[str]]] = {}
    for name, labels in exposed.items():
        stem = re.sub(r"_(bucket|count|sum)$", "", name)
        if f"{stem}_bucket" in exposed:
            found[stem] = "histogram", labels - {"le"} | found.get(stem, ("", set()))[1]
        else:
            found[name] = ("counter" if name.endswith("_total") else "gauge"), labels
    assert told == found


def test_every_metric_is_on_the_dashboard(exposed: dict[str, set[str]]) -> None:
    text = json.dumps([panel["targets"] for panel in PANELS])
    stems = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed}
    assert [name for name in sorted(stems) if name not in text] == []
