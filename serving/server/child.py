"""A worker as its supervisor sees it: a process that tells how it fares."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from serving.cores import usable_cores
from serving.engine.plan import Kind, Plan, read_plans, written_plans
from serving.errors import Unavailable
from serving.settings import Settings

__all__ = ["Child"]

WORKER = "serving.server.worker"
# Longest time to load every model and open every gallery; a worker that takes longer is stuck.
LOAD_SECONDS = 600.0
# Longest line that a worker may say: it names every model, and how each is run.
MAX_LINE = 1 << 20


class Child:
    """A process of its own, executed anew: an ONNX session does not survive a fork (onnxruntime#31961)."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, plans: Mapping[Kind, Plan]) -> None:
        """Watch a process that `begin` has begun."""
        self.number = number
        self.process = process
        self.ready = False
        self.plans = plans
        """How it is to run its models; since it serves, how it does."""
        self.asked_to_reload: Callable[[], None] = lambda: None
        """Called when a client has let it load anew, which the other workers know nothing of."""
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def begin(
        cls, number: int, settings: Settings, plans: Mapping[Kind, Plan], metrics: Path | None = None
    ) -> "Child":
        """Start a worker.

        Args:
            number: Of the worker, from 1; it is in each line of its log.
            settings: With the port that is held for it. They travel by a pipe: other users see a command
                line, and it may not be long.
            plans: By which it runs those models that others have tried.
            metrics: The folder in which it leaves its metrics.

        Raises:
            OSError: if there can be no more processes.
        """
        pipe = asyncio.subprocess.PIPE
        share = str(max(1, usable_cores() // settings.workers))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", WORKER),
            stdin=pipe,
            stdout=pipe,
            limit=MAX_LINE,
            # Ctrl-C on a terminal goes to the supervisor alone, which lets the workers drain.
            start_new_session=True,
            # FAISS would search with every core in every worker.
            env={"OMP_NUM_THREADS": share} | os.environ,
        )
        stdin = cast(asyncio.StreamWriter, process.stdin)
        told = {
            "worker": number,
            "settings": settings.model_dump(mode="json"),
            "plans": written_plans(plans),
            "metrics": str(metrics or ""),
        }
        with suppress(ConnectionError):  # a worker that has ended already is noticed by `serving`
            stdin.write(json.dumps(told).encode() + b"\n")
            await stdin.drain()
        return cls(number, process, plans)

    async def serving(self) -> None:
        """Wait until it serves.

        Raises:
            Unavailable: if it has ended before; tells why. One that takes too long is killed.
        """
        said = await self._hear()
        if "serving" not in said:
            status = await self.process.wait()
            raise Unavailable(
                said.get("failed")
                or f"Worker {self.number} ended with status {status} before it served; its log tells more."
            )
        self.ready = True

    async def reload(self) -> None:
        """Let it load models and galleries anew, and wait until that is done, or until it has ended.

        Raises:
            Unavailable: if something could not be loaded, or took too long, for which it is killed.
        """
        while not self._said.empty():  # somebody may have sent it a signal of his own
            if not self._said.get_nowait():
                return
        self.signal(signal.SIGHUP)
        said = await self._hear()
        if failure := said.get("reloaded"):  # nothing of the kind says one that has ended
            raise Unavailable(f"Worker {self.number}: {failure}")

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait until it has ended; tells its exit status, or minus the signal that ended it."""
        status = await self.process.wait()
        self.ready = False
        await self._reading
        return status

    async def _hear(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                return await self._said.get()
        except TimeoutError as error:
            self.ready = False
            self.signal(signal.SIGKILL)
            raise Unavailable(
                f"Worker {self.number} has not loaded within {LOAD_SECONDS:g} s and is killed."
            ) from error

    async def _read(self) -> None:
        stdout = cast(asyncio.StreamReader, self.process.stdout)
        while line := await stdout.readline():
            with suppress(ValueError):  # a library that prints says nothing to us
                said = json.loads(line)
                if said == {"reload": True}:
                    self.asked_to_reload()
                elif isinstance(said, dict) and "plans" in said:
                    self.plans = read_plans(said["plans"])
                elif isinstance(said, dict):
                    self._said.put_nowait(said)
        self._said.put_nowait({})  # it has ended
