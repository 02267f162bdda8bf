"""The benchmark of the server under load, in short: real processes, and figures that are made up."""

import csv
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks import load
from benchmarks.driving import messages, overload
from benchmarks.driving.bounds import Bounds, verdict
from benchmarks.driving.client import Target
from benchmarks.driving.figures import apart, percentile, quartiles
from benchmarks.driving.overload import strain
from benchmarks.driving.rounds import Rounds
from benchmarks.driving.served import Failed, Served
from tests.serving.processes import alive
from tests.serving.rpc_fakes import until

TARGET = Target("nowhere", messages.EMBED, Path("none"))


def test_a_short_run(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{model} {data} --threads 2 --rounds 1 --seconds 0.1 --in-flight 1 8 --vectors 300 --queries 20"
    words += f" --overload-seconds 0.4 --work {tmp_path} --csv {tmp_path / 'found.csv'}"
    status = load.main(words.split())
    shown = capsys.readouterr().out
    assert status == ("NOT MET" in shown)
    with (tmp_path / "found.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    of = {what: [row for row in found if row["what"] == what] for what in ("embed", "search", "overload")}
    for row in of["embed"]:
        assert row["in_flight"] in ("1", "8")
        assert float(row["ratio"]) == pytest.approx(
            float(row["images_per_second"]) / float(row["plain_per_second"]), rel=1e-4
        )
        assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"])
    assert all(float(row["p50_ms"]) > 0 for row in of["search"])
    (patient,) = of["overload"]
    assert float(patient["goodput"]) > 0
    assert patient["unexpected"] == "0"
    bounds = ("bound >= 0.9: ", "bound <= 2 ms: ", "bound <= 1 ms: ", "bound >= 2.85: ")
    assert all(line in shown for line in ("| crossbatch | 8 |", *bounds))


class MadeUp:
    """Stands for the client and the plain loop: gives rates and latencies from a list."""

    def __init__(self, *rates: float, code: str = "OK") -> None:
        self.rates = list(rates)
        self.code = code

    def rate(self, seconds: float) -> float:
        return self.rates.pop(0)

    def latency(self, seconds: float) -> float:
        return 0.004

    def closed(self, target: Target, *, in_flight: int, seconds: float) -> dict[str, Any]:
        latency = {f"p{percent}": 5.0 + percent / 100 for percent in (50, 95, 99)}
        return {
            "seconds": 2.0,
            "cpu_seconds": 1.0,
            "codes": {self.code: 180},
            "latency_ms": {self.code: latency},
            "said": [[f"{self.code}: why", 180]],
        }


def rounds(client: MadeUp, plain: MadeUp, wanted: int) -> Rounds:
    who: tuple[Any, Any] = client, plain
    return Rounds(*who, rounds=wanted, seconds=0.1, cores=2, tell=lambda _: None)


def test_a_round_is_left_out_when_the_plain_loop_differs_before_and_after() -> None:
    plain = MadeUp(100, 120, 100, 104, 96, 100)
    (level,) = rounds(MadeUp(), plain, 2).play({"ours": TARGET}, [8])
    assert level.skipped == 1
    assert level.plain_per_second == [102, 98]
    assert level.ratios == [pytest.approx(90 / 102), pytest.approx(90 / 98)]
    assert level.client_share == [0.25, 0.25]
    (level,) = rounds(MadeUp(), MadeUp(100, 100), 1).play({"ours": TARGET}, [1])
    assert level.extra_ms == [pytest.approx(1.5)]  # one in flight is compared by its latency


def test_a_call_that_fails_stops_the_measurement() -> None:
    with pytest.raises(Failed, match=r"ours, 8 in flight: .*UNAVAILABLE: why"):
        rounds(MadeUp(code="UNAVAILABLE"), MadeUp(100, 100), 1).play({"ours": TARGET}, [8])


def test_a_verdict_says_whether_a_bound_was_met_and_one_that_was_not_is_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verdict("latency", 3.1, 3, most=True, unit=" ms").endswith("bound <= 3 ms: NOT MET")
    bounds = Bounds()
    statuses = []
    for found in (0.95, math.nan, 0.95):
        bounds.hold("ratio", found, 0.95)
        statuses.append(bounds.status)
    assert statuses == [0, 1, 1]
    assert "- ratio: not measured, bound >= 0.95: NOT MET" in capsys.readouterr().out


def test_figures_of_latencies() -> None:
    assert [percentile([4, 1, 3, 2], percent) for percent in (50, 75, 99)] == [2, 3, 4]
    assert math.isnan(percentile([], 50))
    assert quartiles([1, 2, 3, 4, 5]) == (2, 4)
    assert apart(90, 110) == pytest.approx(0.2)


def test_refusals_are_no_goodput_and_other_ends_are_counted() -> None:
    def strained(**codes: int) -> overload.Overload:
        client: Any = MadeUp()
        latency = {code: {"p99": 7.0} for code in codes}
        times = {"seconds": 10.0, "whole_seconds": 12.5, "cpu_seconds": 2.0}
        client.open = MagicMock(return_value={**times, "codes": codes, "latency_ms": latency, "said": []})
        seen = strain(client, TARGET, times=3, in_flight=8, seconds=10, timeout=1, cores=2)
        assert client.open.call_args.kwargs["rate"] == 3 * 90
        return seen

    seen = strained(OK=850, RESOURCE_EXHAUSTED=1800, UNAVAILABLE=2)
    assert "of refusals 7 ms" in str(seen)
    assert (seen.peak, seen.goodput, seen.offered) == (90, 68, 265.2)
    assert (seen.unexpected, seen.refusal_p99_ms, seen.client_share) == (2, 7.0, 0.08)
    assert math.isnan(seen.wasted)
    assert "of refusals not measured" in str(strained(OK=850))


def test_a_server_that_does_not_start_is_told_and_leaves_no_process(tmp_path: Path) -> None:
    def failing(reason: str, *words: str, patience: float = 20) -> None:
        with pytest.raises(Failed, match=reason):
            Served(list(words), tmp_path / "log", patience=patience)

    failing("no luck", sys.executable, "-c", "raise SystemExit('no luck')")
    failing(r"did not answer within 0\.3 s", "sleep", "60", patience=0.3)
    failing("no-such-program cannot be run", "no-such-program")


def test_a_server_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; each = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(60)']); print('serving on', each.pid, flush=True); time.sleep(60)"
    )
    with Served([sys.executable, "-c", code], tmp_path / "log") as served:
        child = int(served.address)
        assert alive(child)
        assert served.memory() > served.own_memory() > 0
    assert not served.alive
    until(lambda: not alive(child))


def test_a_server_with_other_embeddings_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, client = MagicMock(images=(b"one", b"two")), MagicMock()
    plain.embed.return_value = np.eye(2, 3) + 2e-4
    client.return_value.__enter__.return_value.embed.return_value = np.eye(2, 3)
    monkeypatch.setattr(load, "PythonClient", client)
    with pytest.raises(Failed, match=r"differ from those of the plain loop by 0\.0002"):
        load.check("somewhere", plain)
