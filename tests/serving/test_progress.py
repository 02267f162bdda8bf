"""Progress where nobody watches: whole lines, few of them."""

import io
import sys
import time

import pytest

from serving.progress import progress, stages


@pytest.mark.parametrize(
    ("done", "seconds", "told"),
    [
        (335_652, 1.0, "336,000 item/s"),
        (25, 2.0, "12.5 item/s"),
        (2, 39.018, "19.5 s/item"),
        (5, 0.0, "? item/s"),
    ],
)
def test_a_log_has_rates_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, done: int, seconds: float, told: str
) -> None:
    log, now = io.StringIO(), time.time()
    monkeypatch.setattr(sys, "stderr", log)
    with progress(tuple[int, ...](), "Reading", total=400_000, unit="item") as bar:
        bar.start_t, bar._time = now, lambda: now + seconds  # type: ignore[attr-defined]
        bar.update(done)
    assert log.getvalue().splitlines()[-1].split(", ")[1] == told


def test_a_log_gets_a_line_a_minute_and_one_for_short_work(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = io.StringIO(), time.time()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(time, "time", lambda: now)
    with progress(tuple[int, ...](), "Indexing", total=600) as bar:
        bar._time = lambda: now  # type: ignore[attr-defined]  # tqdm binds its clock early
        for _ in range(600):
            now += 1
            bar.update(1)
    assert len(log.getvalue().splitlines()) == pytest.approx(11, abs=1)
    assert list(progress(range(50), "Reading", unit="image")) == list(range(50))
    last = log.getvalue().splitlines()[-1]
    assert last.startswith("Reading: 50 of 50, ")
    assert "\r" not in log.getvalue()


def test_stages_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with stages("item") as advance:
        for stage, total in (("read", 30), ("build", 20), ("read", 40)):
            for done in range(0, total + 1, 10):
                advance(stage, done, total)
    told = [line.split(",")[0] for line in log.getvalue().splitlines()]
    assert told == ["read: 30 of 30", "build: 20 of 20", "read: 40 of 40"]
