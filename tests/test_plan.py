"""The plan of machines: worked out by hand for made-up runs, and the committed one is what the runs give."""

import csv
import math
from pathlib import Path

import pytest

from benchmarks import plan
from benchmarks.plan import RESULTS, Measured, Wanted

FOUND = Measured(
    items=1_000_000,
    bytes_an_item=1_000.0,
    build_seconds=1e-4,
    search=1e-3,
    slope=0.5,
    handling=1e-3,
    images=100.0,
)
WANTED = Wanted(items=400_000_000, rate=1000.0, cores=4, memory=250.0, price=0.1, load=0.5)


def told(rows: object) -> dict[str, tuple[str, str]]:
    return {f"{row['step']}, {row['unit']}": (row["log"], row["slope"]) for row in rows}  # type: ignore[attr-defined]


def test_a_plan_is_what_a_hand_works_out() -> None:
    found = told(plan.plan(FOUND, WANTED))
    assert found["memory of all, GB"] == ("400", "400")
    assert found["parts of the gallery, "] == ("2", "2")  # 200 GB of each machine are to be filled
    log = math.log(2e8) / math.log(1e6)  # ms, of 200 million items
    slope = math.sqrt(200)
    assert found["search in a part, ms of a core"] == (f"{log:.3g}", f"{slope:.3g}")
    assert found["queries a core, a second"] == (f"{1e3 / (1 + log):.3g}", f"{1e3 / (1 + slope):.3g}")
    cores = [2 * 1000 * (1 + each) / 1e3 / 0.5 for each in (log, slope)]  # 9.5 and 60.6
    assert found["cores that search, "] == tuple(f"{each:.3g}" for each in cores)
    assert found["machines a part, "] == ("3", "9")  # 4.8 and 30.3 cores, and one machine more
    assert found["machines that search, "] == ("6", "18")
    assert found["cost of searching, $ an hour"] == ("2.4", "7.2")
    assert found["cost of searching, $ a month"] == ("1,750", "5,260")
    assert found["cores that embed queries, "][0] == "20"
    assert found["machines that embed queries, "][0] == "6"
    assert found["embedding all items once, core hours"][0] == "1,110"
    assert found["the same on 10 machines, hours"][0] == "27.8"
    assert found["cost of it, $"][0] == "111"
    assert found["building the index of a part, hours"][0] == "5.56"


def test_a_small_load_has_two_machines_all_the_same() -> None:
    found = told(plan.plan(FOUND, Wanted(items=1000, rate=1.0)))
    assert (found["parts of the gallery, "][0], found["machines that search, "][0]) == ("1", "2")


def test_thresholds_are_what_a_hand_works_out() -> None:
    found = told(plan.thresholds(FOUND, WANTED))
    assert found["one process, calls/s"][0] == "500"
    assert found["one process, cores that embed"][0] == "5"
    assert found["one machine, queries/s"][0] == "1,000"
    assert found["one machine, images/s"][0] == "200"
    assert found["one machine, items"][0] == "200,000,000"
    assert found["index on one machine, images a night"][0] == "11,500,000"


def test_the_committed_plan_is_what_the_runs_give(tmp_path: Path) -> None:
    plan.main(["--write", str(tmp_path)])
    for name in ("plan.csv", "thresholds.csv"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text(), "run benchmarks/plan.py --write"


def test_runs_are_read_and_a_price_changes_what_is_dear(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan.measured("resnet-50-224")
    with (RESULTS / "sizes.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["contestant"] == "crossbatch auto"]
    last = max(rows, key=lambda row: int(row["items"]))
    assert found.items == int(last["items"])
    assert found.seconds(found.items, "log") == found.seconds(found.items, "slope") == found.search
    assert found.search == 1 / float(last["queries_per_second_1"])
    with pytest.raises(ValueError, match=r"load\.csv has no runs of other"):
        plan.measured("other")
    shown = []
    for price in ("0.04", "0.4"):
        plan.main(["--price", price, "--items", "1000000", "--rate", "10"])
        lines = capsys.readouterr().out.splitlines()
        shown.append(float(next(line for line in lines if "$ an hour" in line).split()[3]))
    assert shown[1] == pytest.approx(10 * shown[0])
