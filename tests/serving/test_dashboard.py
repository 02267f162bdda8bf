"""The Grafana dashboard and docs/monitoring.md, held against the metrics of a running server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.rpc_fakes import FakeEncoder, until
from tests.serving.stubs import image, item
from tests.serving.test_metrics import read, watched

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "examples/grafana.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
PANELS = [each for each in DASHBOARD["panels"] if each["type"] != "row"]
TARGET_LABELS = {"job", "instance"}  # which Prometheus adds


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every metric that a server with all kinds of events behind it tells, by sample name."""
    with watched(tmp_path_factory.mktemp("galleries"), FakeEncoder()) as (server, stubs):
        stubs.create("shoes")
        stubs.upsert("shoes", item("k"))
        stubs.search("shoes", image(b"photo"))
        with pytest.raises(grpc.RpcError):
            stubs.embed(b"bad")
        until(lambda: "crossbatch_gallery_index_recall{" in read(server.metrics_address))  # which is set last
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


def test_the_log_line_of_the_page_has_the_fields_of_a_call() -> None:
    told = json.loads(re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)[0])
    assert set(told) == {
        *("time", "level", "logger", "message", "request_id", "worker"),
        *("rpc", "code", "milliseconds", "inputs", "client"),
    }
