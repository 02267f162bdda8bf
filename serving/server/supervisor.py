"""Several processes on one port: started, replaced when they die, told to load anew, drained."""

import asyncio
import logging
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from serving.engine.plan import Kind, Plan
from serving.engine.reloads import Reloads
from serving.errors import CrossbatchError
from serving.rpc.address import written_address
from serving.server.child import Child
from serving.server.port import Port
from serving.settings import Settings

if TYPE_CHECKING:  # it brings prometheus_client, which a server without metrics does not need
    from serving.observability.gathered import Gathered

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

# A worker that served this long is replaced at once, and one that did not after a pause that doubles.
STEADY_SECONDS = 30.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
# Beyond the grace, to flush and to close; what has not ended by then is killed.
END_SECONDS = 5.0


class Supervisor:
    """Holds the port and keeps `workers` processes listening on it. Loads no engine itself.

    The kernel deals new connections out among the workers (SO_REUSEPORT). Since a client keeps its connection
    each worker hangs up gently after a while, by the options of `serving.server.channel`.
    """

    def __init__(self, settings: Settings) -> None:
        """Keep the settings; nothing runs yet."""
        self.address = ""
        self.failed = asyncio.Event()  # never set, as a worker that fails is replaced
        self._settings = settings
        self._port: Port | None = None
        self._children: dict[int, Child] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._reloads = Reloads(self._load_anew)
        self._owed: set[int] = set()  # numbers of workers that have yet to load anew
        self._asked = asyncio.Event()  # set for a moment when they come to owe it
        self._gathered: Gathered | None = None

    @property
    def metrics_address(self) -> str:
        """Where Prometheus reads the metrics of all workers, as `host:port`; empty when nobody asked."""
        return self._gathered.address if self._gathered is not None else ""

    async def start(self) -> None:
        """Take the port, start the workers, and wait until each of them serves.

        Raises:
            BadSetting: if the host may not be used.
            Unavailable: if the port is in use, or a worker cannot start; with its reason.
        """
        self._port = await asyncio.to_thread(Port, self._settings)
        self._settings = self._settings.model_copy(update={"port": self._port.number})
        if self._settings.metrics_port is not None:
            try:
                self._gathered = await asyncio.to_thread(_gather, self._settings)
            except BaseException:
                self._port.close()
                raise
        numbers = range(1, self._settings.workers + 1)
        try:
            await self._begin_all(numbers)
        except BaseException:
            await self._kill()
            self._let_go()
            raise
        self.address = written_address(self._settings.host, self._port.number)
        self._keeping |= {asyncio.create_task(self._keep(number)) for number in numbers}

    async def stop(self, grace: float) -> None:
        """Let every worker drain, and end those that have not done so a while after the grace.

        Args:
            grace: Seconds that running calls have.
        """
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._reloads.end()
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        longest = self._settings.drain_delay + grace + END_SECONDS
        ending = [asyncio.create_task(child.ended()) for child in self._children.values()]
        _, late = await asyncio.wait(ending, timeout=longest)
        if late:
            logger.error("%d workers have not ended after %g s and are killed", len(late), longest)
        await self._kill()
        await asyncio.to_thread(self._let_go)

    async def reload(self) -> None:
        """Let the workers load anew, one after the other, so that the others have the cores meanwhile.

        One that is starting does so as soon as it serves, and one that ends has another in its place; where a
        pause goes before that, it is over.

        Raises:
            Draining: if the server is stopping.
            Unavailable: if one could not, in which case those after it were not told.
        """
        self._owe(self._children)
        await self._reloads.ask()

    async def _load_anew(self) -> None:
        ready = [child for number, child in self._children.items() if number in self._owed and child.ready]
        self._owed -= {child.number for child in ready}
        for child in ready:
            await child.reload()
        logger.info("loaded anew", extra={"workers": len(ready)})

    async def _begin_all(self, numbers: Iterable[int]) -> None:
        """Start the first workers: all at once, as soon as it is known how their models are best run.

        Until then one is alone: side by side, they would find out how a busy machine runs them.
        """
        waiting = list(numbers)
        while waiting and not (self._settings.max_batch or self._plans()):
            await self._begin(waiting.pop(0))
        starting = [asyncio.create_task(self._begin(number)) for number in waiting]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise

    async def _begin(self, number: int) -> None:
        self._owed.discard(number)  # it loads what is there now
        folder = self._gathered.folder if self._gathered else None
        child = self._children[number] = await Child.begin(number, self._settings, self._plans(), folder)
        child.asked_to_reload = lambda: self._follow(self._children.keys() - {number})
        await child.serving()
        logger.info("worker %d serves", number, extra={"worker": number, "pid": child.process.pid})
        if number in self._owed:
            self._follow()

    def _plans(self) -> Mapping[Kind, Plan]:
        """Tell how workers run their models; where some differ, as the first of them does."""
        children = reversed(self._children.values())
        return {kind: plan for child in children for kind, plan in child.plans.items()}

    async def _keep(self, number: int) -> None:
        """Replace a worker whenever it ends."""
        pause = 0.0
        while True:
            began = time.monotonic()
            status = await self._children[number].ended()
            steady = time.monotonic() - began >= STEADY_SECONDS
            at_once = steady or number in self._owed
            pause = 0.0 if at_once else min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            told = {"worker": number, "status": status}
            logger.error("worker %d ended%s; another starts in %g s", number, _by(status), pause, extra=told)
            if await self._is_asked_within(pause):
                pause = 0.0
            try:
                if self._gathered is not None:
                    self._gathered.forget(number)
                await self._begin(number)
            except (CrossbatchError, OSError) as error:
                logger.error("worker %d cannot start: %s", number, error, extra={"worker": number})

    async def _is_asked_within(self, seconds: float) -> bool:
        """Wait, until somebody asks for a reload at the longest: what was amiss may be mended by then."""
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        return True

    def _owe(self, numbers: Iterable[int]) -> None:
        self._owed.update(numbers)
        self._asked.set()  # those who wait go on
        self._asked.clear()

    def _let_go(self) -> None:
        if self._gathered is not None:
            self._gathered.close()
        if self._port is not None:
            self._port.close()

    def _follow(self, owing: Collection[int] = ()) -> None:
        """Let workers do what a client has let another one do, and those who owe it already."""
        if owing:
            self._owe(owing)
        task = asyncio.create_task(self._reload_owing())
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _reload_owing(self) -> None:
        try:
            await self._reloads.ask()
        except CrossbatchError as error:
            logger.error("not every worker has loaded anew: %s", error)

    async def _kill(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGKILL)
            await child.ended()


def _by(status: int) -> str:
    """Name the signal that ended a process: the kernel kills by SIGKILL where memory runs out."""
    return next((f" by {each.name}" for each in signal.Signals if each == -status), "")


def _gather(settings: Settings) -> "Gathered":
    from serving.observability.gathered import Gathered

    return Gathered(settings.metrics_host, settings.metrics_port or 0)
