"""Threads off the event loop: a bounded queue, nothing done for those who left, and nothing lost."""

import asyncio
import threading
import time

import pytest

from serving.errors import DeadlineExceeded, Overloaded
from serving.rpc.work.workers import Workers, check_time
from serving.telemetry import request_id


def test_the_queue_has_a_bound_that_jobs_given_up_count_towards() -> None:
    gate = threading.Event()
    done: list[int] = []

    async def main() -> None:
        workers = Workers("w", 1, most=3, what="it was done")
        running = asyncio.create_task(workers.run(None, gate.wait, 20))
        await asyncio.sleep(0.05)
        given_up = [asyncio.create_task(workers.run(None, done.append, i)) for i in range(2)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)
        with pytest.raises(Overloaded, match="3 jobs wait until it was done"):
            await workers.run(None, done.append, 2)
        gate.set()
        assert await running
        await workers.run(None, done.append, 3)
        workers.close()

    asyncio.run(main())
    assert done == [3]


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
