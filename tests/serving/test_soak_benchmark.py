"""The soak, in short: a server under load whose galleries and models change, and what is told of it."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks import soak
from benchmarks.soaking.tally import Tally


def test_a_short_soak_ends_well(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = model.with_name("soak.log")
    words = [model, data, "--minutes", "0.04", "--load", "0.3", "--pauses", "0.08", "--log", log]
    soak.main([str(word) for word in words])
    shown = capsys.readouterr().out
    assert "lines of the server at ERROR or above: 0: met" in shown, shown
    assert "calls that did not end as they should: 0: met" in shown, shown
    assert "growth of memory after the first quarter: " in shown
    kinds = ("search by image", "search by vector", "upsert images", "delete", "rebuild", "switch", "reload")
    for work in (*(f"{each} OK" for each in kinds), "injected: bad image INVALID_ARGUMENT"):
        assert f"  {work}: " in shown
    assert log.read_text().splitlines() == shown.splitlines()


def test_what_does_not_end_as_it_should_is_counted_by_its_kind() -> None:
    async def call(code: grpc.StatusCode = grpc.StatusCode.OK, text: str = "") -> Any:
        if code is grpc.StatusCode.OK:
            return "reply"
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)

    async def calls(tally: Tally) -> None:
        assert await tally.take("search", call()) == "reply"
        for number in (3, 44):
            full = call(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{number} in flight")
            assert await tally.take("search", full) is None
        await tally.take("injected", call(grpc.StatusCode.NOT_FOUND), "NOT_FOUND")
        await tally.take("injected", call(), "NOT_FOUND")

    tally = Tally()
    asyncio.run(calls(tally))
    tally.expect("search", True, "nothing")
    tally.expect("search", False, "no neighbours")
    codes = {"search OK": 1, "search RESOURCE_EXHAUSTED": 2, "injected NOT_FOUND": 1, "injected OK": 1}
    assert tally.codes == codes
    assert tally.unexpected == {
        "search ended with RESOURCE_EXHAUSTED, not OK: # in flight": 2,
        "injected ended with OK, not NOT_FOUND: ": 1,
        "search: no neighbours": 1,
    }
    assert "  UNEXPECTED, 2 times: search ended with RESOURCE_EXHAUSTED, not OK: # in flight" in tally.lines()


def test_growth_is_that_after_the_first_quarter() -> None:
    warm_up = [10.0 * number for number in range(1, 11)]
    assert soak.growth([*warm_up, *[100.0] * 30]) == 0
    assert soak.growth([*warm_up, *[100.0] * 20, *[104.0] * 10]) == pytest.approx(0.04)
    assert soak.growth([*warm_up, *[100.0, 100.0, 180.0] * 10]) == 0
    assert soak.growth([50.0]) == 0


def test_lines_of_the_server_at_error_or_above_are_judged(tmp_path: Path) -> None:
    levels = [f'{{"level": "{level}"}}' for level in ("INFO", "WARNING", "ERROR", "CRITICAL")]
    (tmp_path / "served").write_text("\n".join([*levels, "Segmentation fault", "17"]))
    lines = soak.warnings(tmp_path / "served")
    assert lines == [*levels[1:], "Segmentation fault", "17"]
    assert soak.severe(lines) == levels[2:]
    served: Any = None
    with (tmp_path / "log").open("w") as log:
        seen = soak.Soak(served, log, memory=[1], own_memory=[1])
        assert (soak.judge(seen, 0), soak.judge(seen, 1)) == (0, 1)
    assert "- lines of the server at ERROR or above: 1: NOT MET" in (tmp_path / "log").read_text()
