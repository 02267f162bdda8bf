"""The supervisor and its children, without processes: who loads anew, and what one that is stuck costs."""

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from serving.engine.plan import Kind, Plan, written_plans
from serving.errors import Unavailable
from serving.server import child as child_module
from serving.server import supervisor as supervisor_module
from serving.server.child import Child
from serving.server.supervisor import Supervisor
from serving.settings import Settings


class FakeProcess:
    """Says what it is told to say, and notes the signals."""

    status = -9

    def __init__(self) -> None:
        self.pid = 1
        self.stdout = asyncio.StreamReader()
        self.signals: list[int] = []
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.end()

    def say(self, line: str) -> None:
        self.stdout.feed_data(line.encode() + b"\n")

    def end(self) -> None:
        if not self._ended.is_set():
            self.stdout.feed_eof()
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return self.status


class Workers:
    """What the supervisor begins, by number; the newest of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: dict[int, FakeProcess] = {}
        self.begun = 0
        self.plans: dict[int, Mapping[Kind, Plan]] = {}
        monkeypatch.setattr(Child, "begin", self._begin)

    async def _begin(
        self, number: int, settings: Settings, plans: Mapping[Kind, Plan], metrics: Path | None = None
    ) -> Child:
        self.begun += 1
        self.plans[number] = plans
        process: Any = FakeProcess()
        self.processes[number] = process
        return Child(number, process, plans)

    def told(self) -> list[int]:
        """Numbers of those that were told to load anew."""
        return [number for number, each in self.processes.items() if signal.SIGHUP in each.signals]

    def serve(self, *numbers: int) -> None:
        for number in numbers:
            self.processes[number].say('{"serving": "here"}')

    def found(self, number: int, plans: Mapping[Kind, Plan]) -> None:
        self.processes[number].say(json.dumps({"plans": written_plans(plans)}))

    def loaded(self, number: int, failure: str = "") -> None:
        self.processes[number].say(f'{{"reloaded": "{failure}"}}')


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(supervisor_module, "SHORTEST_PAUSE", 0.0)
    return Workers(monkeypatch)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def came_true(condition: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


def kind(name: str) -> Kind:
    return Kind(name, 224, "fp32", 128)


def run(use: Callable[[Supervisor], Awaitable[None]], workers: Workers, *, serving: bool = True) -> None:
    async def main() -> None:
        given = {"model": ["m"], "galleries": "g", "port": 0, "workers": 3, "max_batch": 8}
        supervisor = Supervisor(Settings.model_validate(given))
        starting = asyncio.create_task(supervisor.start())
        await came_true(lambda: len(workers.processes) == 3)
        if serving:
            workers.serve(1, 2, 3)
            await starting
        try:
            await use(supervisor)
            await starting
        finally:
            for process in workers.processes.values():
                process.end()
            await supervisor.stop(0.0)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_the_first_worker_tries_the_models_and_the_others_run_them_like_it(workers: Workers) -> None:
    async def main() -> None:
        given = {"model": ["m"], "galleries": "g", "port": 0, "workers": 3}
        supervisor = Supervisor(Settings.model_validate(given))
        starting = asyncio.create_task(supervisor.start())
        await came_true(lambda: 1 in workers.processes)
        await settled()
        assert workers.begun == 1
        plans = {kind("a"): Plan(24, 2, alone_on_all=False), kind("b"): Plan(8)}
        workers.found(1, plans)
        workers.serve(1)
        await came_true(lambda: workers.begun == 3)  # at once, as there is nothing to try
        assert list(workers.plans.values()) == [{}, plans, plans]
        workers.serve(2, 3)
        await starting
        workers.processes[2].end()
        await came_true(lambda: workers.begun == 4)
        assert workers.plans[2] == plans
        for process in workers.processes.values():
            process.end()
        await supervisor.stop(0.0)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_replacement_is_told_what_any_worker_runs_now(workers: Workers) -> None:
    async def use(supervisor: Supervisor) -> None:
        workers.found(1, {kind("a"): Plan(1), kind("gone"): Plan(2)})
        workers.found(2, {kind("a"): Plan(16), kind("b"): Plan(8)})
        workers.found(3, {kind("a"): Plan(32)})
        await settled()
        workers.found(1, {kind("a"): Plan(1), kind("new"): Plan(4)})  # after a reload
        workers.processes[1].say('{"plans": [[{"name": "a"}, {"max_batch": 0}]]}')  # as no worker says it
        await settled()
        known = {kind("a"): Plan(1), kind("b"): Plan(8), kind("new"): Plan(4)}
        workers.processes[1].end()
        await came_true(lambda: workers.begun == 4)
        assert workers.plans[1] == known
        workers.processes[1].end()  # before it told anything
        await came_true(lambda: workers.begun == 5)
        assert workers.plans[1] == known

    run(use, workers)


def test_a_worker_may_tell_of_thousands_of_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line past the 64 KiB that asyncio reads by itself would end the reading of all that follow."""
    plans = {kind(f"model-{number}"): Plan(8) for number in range(2_000)}
    lines = tmp_path / "lines"
    lines.write_text(json.dumps({"plans": written_plans(plans)}) + '\n{"serving": "here"}\n')
    execute = asyncio.create_subprocess_exec
    monkeypatch.setattr(
        asyncio, "create_subprocess_exec", lambda *_, **options: execute("cat", str(lines), **options)
    )

    async def main() -> None:
        settings = Settings.model_validate({"model": ["m"], "galleries": "g", "workers": 2})
        child = await Child.begin(1, settings, {})
        await child.serving()
        assert child.plans == plans
        await child.ended()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_workers_start_one_after_the_other_while_none_has_told_how_it_runs_its_models(
    workers: Workers,
) -> None:
    async def main() -> None:
        given = {"model": ["m"], "galleries": "g", "port": 0, "workers": 3}
        supervisor = Supervisor(Settings.model_validate(given))
        starting = asyncio.create_task(supervisor.start())
        for number in (1, 2, 3):
            await came_true(lambda number=number: number in workers.processes)  # type: ignore[misc]
            await settled()
            assert workers.begun == number
            assert not starting.done()
            workers.serve(number)
        await starting
        for process in workers.processes.values():
            process.end()
        await supervisor.stop(0.0)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_worker_that_cannot_start_ends_those_before_it(workers: Workers) -> None:
    async def main() -> None:
        given = {"model": ["m"], "galleries": "g", "port": 0, "workers": 3}
        supervisor = Supervisor(Settings.model_validate(given))
        starting = asyncio.create_task(supervisor.start())
        await came_true(lambda: 1 in workers.processes)
        workers.serve(1)
        await came_true(lambda: 2 in workers.processes)
        workers.processes[2].say('{"failed": "It is damaged."}')
        workers.processes[2].end()
        with pytest.raises(Unavailable, match=r"It is damaged\."):
            await starting
        assert signal.SIGKILL in workers.processes[1].signals
        assert workers.begun == 2

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize(("status", "how"), [(-9, " by SIGKILL"), (-signal.SIGSEGV, " by SIGSEGV"), (1, "")])
def test_what_ended_a_worker_is_told(
    workers: Workers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, how: str
) -> None:
    async def use(supervisor: Supervisor) -> None:
        monkeypatch.setattr(FakeProcess, "status", status)
        workers.processes[2].end()
        await came_true(lambda: workers.begun == 4)
        workers.serve(2)
        await settled()

    run(use, workers)
    assert f"worker 2 ended{how}; another starts in 0 s" in caplog.messages


def test_a_worker_that_is_starting_loads_anew_as_soon_as_it_serves(workers: Workers) -> None:
    async def use(supervisor: Supervisor) -> None:
        workers.serve(1, 2)
        await settled()
        workers.processes[1].say('{"reload": true}')
        await settled()
        assert workers.told() == [2]
        workers.loaded(2)
        workers.serve(3)
        await settled()
        assert workers.told() == [2, 3]
        workers.loaded(3)

    run(use, workers, serving=False)


def test_a_worker_that_dies_while_it_loads_keeps_the_others_from_nothing(workers: Workers) -> None:
    async def use(supervisor: Supervisor) -> None:
        reload = asyncio.create_task(supervisor.reload())
        await settled()
        assert workers.told() == [1]
        workers.processes[1].end()
        await settled()
        for number in (2, 3):
            assert number in workers.told()
            workers.loaded(number)
            await settled()
        await reload

    run(use, workers)


def test_one_that_fails_is_told_and_those_after_it_keep_what_they_have(workers: Workers) -> None:
    async def use(supervisor: Supervisor) -> None:
        reload = asyncio.create_task(supervisor.reload())
        await settled()
        workers.loaded(1, "It is damaged.")
        with pytest.raises(Unavailable, match=r"Worker 1: It is damaged\."):
            await reload
        assert workers.told() == [1]

    run(use, workers)


def test_many_that_ask_at_once_make_one_reload_run_and_one_wait(workers: Workers) -> None:
    async def use(supervisor: Supervisor) -> None:
        for _ in range(20):
            workers.processes[1].say('{"reload": true}')
            await settled()
        for _ in range(2):
            for number in (2, 3):
                assert signal.SIGHUP in workers.processes[number].signals
                workers.loaded(number)
                await settled()
        hangups = [process.signals.count(signal.SIGHUP) for process in workers.processes.values()]
        assert hangups == [0, 2, 2]

    run(use, workers)


def test_a_worker_that_is_stuck_is_killed_and_replaced(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(supervisor: Supervisor) -> None:
        monkeypatch.setattr(child_module, "LOAD_SECONDS", 0.05)
        stuck = workers.processes[1]
        with pytest.raises(Unavailable, match=r"Worker 1 has not loaded within 0\.05 s and is killed"):
            await supervisor.reload()
        assert signal.SIGKILL in stuck.signals
        await came_true(lambda: workers.begun >= 5)  # the one in its place is stuck before it serves

    run(use, workers)


def test_a_reload_ends_the_pause_before_a_worker_is_replaced(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(supervisor: Supervisor) -> None:
        monkeypatch.setattr(supervisor_module, "SHORTEST_PAUSE", 30.0)
        workers.processes[1].end()
        await settled()
        assert workers.begun == 3  # it is to pause
        reload = asyncio.create_task(supervisor.reload())
        await came_true(lambda: workers.begun == 4)
        await came_true(lambda: 2 in workers.told())
        workers.loaded(2)
        await came_true(lambda: 3 in workers.told())
        workers.loaded(3)
        await reload
        # Asked while the new one starts, and in vain: what it has read may be older than that.
        reload = asyncio.create_task(supervisor.reload())
        await settled()
        workers.processes[1].end()
        await came_true(lambda: workers.begun == 5)
        # And asked by nobody it pauses as ever.
        workers.processes[1].end()
        await asyncio.sleep(0.05)
        assert workers.begun == 5
        reload.cancel()

    run(use, workers)


def test_metrics_that_cannot_be_forgotten_keep_no_worker_from_being_replaced(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    class Gathered:
        folder = Path("metrics")
        failures = 1

        def forget(self, number: int) -> None:
            if self.failures:
                self.failures -= 1
                raise PermissionError("not ours")

        def close(self) -> None: ...

    async def use(supervisor: Supervisor) -> None:
        gathered: Any = Gathered()
        supervisor._gathered = gathered
        workers.processes[2].end()
        await came_true(lambda: workers.begun >= 4)

    run(use, workers)
    assert [
        each.message for each in caplog.records if each.levelno == logging.ERROR and "cannot" in each.message
    ]
