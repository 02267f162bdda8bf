"""Threads off the event loop: a bounded queue, nothing done for those who left, and nothing lost."""

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.workers import Workers, check_time
from serving.errors import DeadlineExceeded, Draining, Overloaded
from serving.observability.logs import request_id
from tests.serving.processes import ROOT
from tests.tiny_model import write_tiny_model

# A process that ends while a model runs that was to be loaded.
TRYING = """
import asyncio, sys
from pathlib import Path
import numpy as np
from serving.model.encoder import Encoder
from serving.engine.workers import Threads
running = []
def run_for_ever():
    encoder = Encoder(Path(sys.argv[1]), threads=1)
    side = encoder.spec.image_size
    while True:
        encoder.encode(np.zeros((64, side, side, 3), np.uint8))
        running.append(True)
async def main():
    threads = Threads(1, most=4)
    loading = asyncio.create_task(threads.load(run_for_ever))
    while not running:
        await asyncio.sleep(0.01)
    loading.cancel()
    await asyncio.wait([loading])
    threads.close()
asyncio.run(main())
print("ended")
"""


def test_the_queue_has_a_bound() -> None:
    gate = threading.Event()
    done: list[int] = []

    async def main() -> None:
        workers = Workers("w", 1, most=3, what="it was done")
        running = asyncio.create_task(workers.run(None, gate.wait, 20))
        waiting = [asyncio.create_task(workers.run(None, done.append, i)) for i in range(2)]
        await asyncio.sleep(0)
        assert len(workers) == 3
        with pytest.raises(Overloaded, match="3 jobs wait until it was done"):
            await workers.run(None, done.append, 2)
        gate.set()
        assert await running
        await asyncio.gather(*waiting)
        await workers.run(None, done.append, 3)
        assert len(workers) == 0
        workers.close()

    asyncio.run(main())
    assert done == [0, 1, 3]


def test_a_job_whose_caller_left_frees_its_place_and_what_it_holds() -> None:
    gate = threading.Event()
    done: list[object] = []

    class Image:
        """Something whose end can be seen."""

    async def main() -> None:
        workers = Workers("w", 1, most=4, what="it was done")
        running = asyncio.create_task(workers.run(None, gate.wait, 20))
        handed = asyncio.create_task(workers.run(None, done.append, 0))
        image = Image()
        seen = weakref.ref(image)
        given_up = [asyncio.create_task(workers.run(None, done.append, image)) for _ in range(2)]
        del image
        await asyncio.sleep(0)
        assert len(workers) == 4
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)
        given_up.clear()
        del task
        assert len(workers) == 2
        assert seen() is None
        last = asyncio.create_task(workers.run(None, done.append, 1))
        gate.set()
        await asyncio.gather(running, handed, last)
        assert len(workers) == 0
        workers.close()

    asyncio.run(main())
    assert done == [0, 1]


@settings(max_examples=40, deadline=None)
@given(
    fates=st.lists(st.sampled_from(["wait", "leave", "leave late", "expired"]), max_size=30),
    threads=st.integers(1, 3),
)
def test_each_job_has_one_outcome_in_order_and_no_place_is_lost(fates: list[str], threads: int) -> None:
    done: list[int] = []

    async def main() -> None:
        workers = Workers("w", threads, most=100, what="it was done")
        gate = threading.Event()
        blocking = [asyncio.create_task(workers.run(None, gate.wait, 20)) for _ in range(threads)]
        await asyncio.sleep(0)
        now = time.monotonic()
        jobs = [
            asyncio.create_task(workers.run(now - 1 if fate == "expired" else None, done.append, i))
            for i, fate in enumerate(fates)
        ]
        await asyncio.sleep(0)
        for job, fate in zip(jobs, fates, strict=True):
            if fate == "leave":
                job.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait(blocking)
        for job, fate in zip(jobs, fates, strict=True):
            if fate == "leave late":
                job.cancel()
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        for fate, outcome in zip(fates, outcomes, strict=True):
            match fate:
                case "wait":
                    assert outcome is None
                case "leave":
                    assert isinstance(outcome, asyncio.CancelledError)
                case "expired":
                    assert isinstance(outcome, DeadlineExceeded)
        await workers.run(None, int)
        await asyncio.to_thread(workers.close)
        await asyncio.sleep(0)
        assert len(workers) == 0

    asyncio.run(asyncio.wait_for(main(), 15))
    kept = [i for i, fate in enumerate(fates) if fate == "wait"]
    found = [i for i in done if i in kept]
    assert sorted(found) == kept
    assert threads > 1 or found == kept
    assert not {i for i in done if fates[i] in ("leave", "expired")}


def test_a_caller_that_leaves_as_its_turn_comes_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[int] = []

    async def main() -> None:
        workers = Workers("w", 1, most=9, what="it was done")
        gate = threading.Event()
        handed = [asyncio.create_task(workers.run(None, gate.wait, 20)) for _ in range(2)]
        leaving, next_one = (asyncio.create_task(workers.run(None, done.append, i)) for i in range(2))
        await asyncio.sleep(0)
        pass_on = workers._pass_on

        def pass_on_and_leave() -> None:
            monkeypatch.setattr(workers, "_pass_on", pass_on)
            pass_on()
            leaving.cancel()

        monkeypatch.setattr(workers, "_pass_on", pass_on_and_leave)
        gate.set()
        await asyncio.gather(next_one, *handed)
        await asyncio.wait([leaving])
        await asyncio.sleep(0)
        assert len(workers) == 0
        workers.close()

    asyncio.run(asyncio.wait_for(main(), 15))
    assert done == [1]


def test_a_job_that_waits_while_the_threads_end_is_refused() -> None:
    gate = threading.Event()

    async def main() -> None:
        workers = Workers("w", 1, most=9, what="it was done")
        jobs = [asyncio.create_task(workers.run(None, gate.wait, 20)) for _ in range(4)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(workers.close))
        await asyncio.sleep(0.05)
        gate.set()
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        await closing
        assert [type(each) for each in outcomes] == [bool, bool, Draining, Draining]
        assert len(workers) == 0

    asyncio.run(asyncio.wait_for(main(), 15))


def test_a_job_whose_deadline_passed_in_the_queue_is_not_begun() -> None:
    done: list[int] = []

    async def main() -> None:
        workers = Workers("w", 1, most=9, what="it was done")
        running = asyncio.create_task(workers.run(None, time.sleep, 0.1))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="before it was done"):
            await workers.run(time.monotonic() + 0.02, done.append, 1)
        await running
        workers.close()

    asyncio.run(main())
    assert done == []


def test_a_job_that_runs_ends_when_its_caller_leaves() -> None:
    ended = threading.Event()
    begun = threading.Event()

    def job() -> None:
        begun.set()
        try:
            for _ in range(1000):
                check_time(None, "it was done")
                time.sleep(0.01)
        except DeadlineExceeded:
            ended.set()

    async def main() -> None:
        workers = Workers("w", 1, most=1, what="it was done")
        task = asyncio.create_task(workers.run(None, job))
        await asyncio.to_thread(begun.wait, 5)
        task.cancel()
        await asyncio.wait([task])
        workers.close()

    asyncio.run(main())
    assert ended.is_set()


def test_a_job_knows_the_call_that_it_works_for_and_its_failure_is_the_callers() -> None:
    async def main() -> None:
        workers = Workers("w", 1, most=1, what="it was done")
        request_id.set("my-id")
        assert await workers.run(None, request_id.get) == "my-id"
        with pytest.raises(ZeroDivisionError):
            await workers.run(None, divmod, 1, 0)
        assert await workers.run(None, int, "7") == 7
        workers.close()

    asyncio.run(main())


def test_a_process_ends_well_while_a_model_is_tried_that_nobody_waits_for(tmp_path: Path) -> None:
    """Python would abort a daemon that comes back from an engine while the interpreter ends."""
    line = [sys.executable, "-c", TRYING, str(write_tiny_model(tmp_path / "tiny.onnx"))]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n")
