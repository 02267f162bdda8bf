"""Reloads that many ask for: one runs and one waits, all share what comes of it, and none outlives a stop."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable

import pytest

from serving.engine.reloads import Reloads
from serving.errors import BadArtifact, Draining


class Loading:
    """Counts what has begun; each ends when it is let go, with its number or the failure that is set."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.go = asyncio.Event()
        self.failing: Exception | None = None

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.go.wait()
        self.ended += 1
        if self.failing is not None:
            raise self.failing
        return number


def run(use: Callable[[Reloads[int], Loading], Awaitable[None]]) -> None:
    async def main() -> None:
        loading = Loading()
        await use(Reloads(loading), loading)

    asyncio.run(asyncio.wait_for(main(), 10))


async def ask(reloads: Reloads[int], count: int = 1) -> list["asyncio.Task[int]"]:
    """Ask several times, and let the first one begin."""
    tasks = [asyncio.create_task(reloads.ask()) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_one_runs_and_one_waits_however_many_ask() -> None:
    async def use(reloads: Reloads[int], loading: Loading) -> None:
        first = await ask(reloads)
        others = await ask(reloads, 60)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert names.count("reload") == 2
        assert loading.begun == 1
        loading.go.set()
        assert await asyncio.gather(*first, *others) == [1] + [2] * 60
        (again,) = await ask(reloads)
        assert await again == 3

    run(use)


def test_all_who_share_one_have_its_failure_and_the_next_one_runs() -> None:
    async def use(reloads: Reloads[int], loading: Loading) -> None:
        loading.failing = BadArtifact("It is damaged.")
        both = await ask(reloads, 2)
        loading.go.set()
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        assert outcomes == [loading.failing] * 2
        loading.failing = None
        assert await reloads.ask() == 2

    run(use)


@pytest.mark.parametrize("failure", [None, BadArtifact("It is damaged."), ZeroDivisionError("a bug")])
def test_what_was_begun_is_carried_through_and_its_failure_told_once_though_who_asked_has_left(
    failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(reloads: Reloads[int], loading: Loading) -> None:
        loading.failing = failure
        callers = await ask(reloads, 2)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        loading.go.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert loading.ended == 1

    run(use)
    gc.collect()  # which tells of failures that nobody looked at
    assert [record.levelno for record in caplog.records] == ([logging.ERROR] if failure else [])
    if failure:
        assert "everything stays as it is" in caplog.text
        assert str(failure) in caplog.text


def test_a_failure_is_left_to_those_who_have_stayed(caplog: pytest.LogCaptureFixture) -> None:
    async def use(reloads: Reloads[int], loading: Loading) -> None:
        loading.failing = BadArtifact("It is damaged.")
        left, stayed = await ask(reloads, 2)
        left.cancel()
        loading.go.set()
        with pytest.raises(BadArtifact):
            await stayed

    run(use)
    assert caplog.records == []


def test_a_stop_refuses_what_has_not_begun_and_breaks_off_what_has(caplog: pytest.LogCaptureFixture) -> None:
    async def use(reloads: Reloads[int], loading: Loading) -> None:
        first = await ask(reloads)
        second = await ask(reloads)
        reloads.close()
        with pytest.raises(Draining, match="stopping"):
            await second[0]
        with pytest.raises(Draining, match="stopping"):
            await reloads.ask()
        assert not first[0].done()
        await reloads.end()
        with pytest.raises(Draining, match="stopping"):
            await first[0]
        assert (loading.begun, loading.ended) == (1, 0)
        await reloads.end()

    run(use)
    assert caplog.records == []
