"""A server as the simulation has it: permits, a queue, batches, as `serving.rpc` and `serving.engine` do."""

import math
from collections import deque
from collections.abc import Generator
from random import Random
from typing import Any, Final, TypeAlias

import simpy

from benchmarks.simulating.times import Parts

__all__ = ["Machine", "Replica", "Steps"]

Steps: TypeAlias = Generator[simpy.Event, Any, Any]
_SLICE: Final = 3e-3  # seconds that work keeps a processor while other work waits for it
_MARGIN: Final = 1.2  # as of serving/engine/instances.py
_SMOOTHING: Final = 0.2


class Machine:
    """Processors: what answers calls comes before models, which servers make nicer; equals take turns."""

    def __init__(self, clock: simpy.Environment, cores: int | None) -> None:
        """Have so many; always enough when None."""
        self._clock = clock
        self._cores = simpy.PriorityResource(clock, cores) if cores else None

    def work(self, seconds: float, *, urgent: bool = True) -> Steps:
        """Take so many seconds of a processor."""
        if self._cores is None:
            yield self._clock.timeout(seconds)
            return
        while seconds > 0:
            with self._cores.request(priority=int(not urgent)) as core:
                yield core
                while seconds > 0:
                    now = min(seconds, _SLICE)
                    yield self._clock.timeout(now)
                    seconds -= now
                    if self._cores.queue:
                        break


class Replica:
    """One server, whose calls bring one image or one query each."""

    def __init__(
        self,
        clock: simpy.Environment,
        machine: Machine,
        parts: Parts,
        random: Random,
        *,
        instances: int = 1,
        permits: int = 512,
    ) -> None:
        """Start its instances: threads that take what waits and run the model on it."""
        self.in_flight = 0
        self.lost = clock.event()
        """Happens when its connections break."""
        self.alive = True
        self._clock, self._machine, self._parts, self._random = clock, machine, parts, random
        self._instances, self._permits = instances, permits
        self._waiting: deque[tuple[simpy.Event, float]] = deque()
        self._idle: deque[simpy.Event] = deque()
        self._busy = self._taken = 0
        self._pace = 0.0
        for _ in range(instances):
            clock.process(self._live())

    def answer(self, deadline: float) -> Steps:
        """Answer one call; returns "OK", "refused" or "late"."""
        parts, random = self._parts, self._random
        if self.in_flight >= self._permits:
            yield from self._machine.work(parts.handling(random) / 2)
            return "refused"
        self.in_flight += 1
        try:
            yield from self._machine.work(parts.handling(random) / 2)
            ahead = self._taken + len(self._waiting)
            wait = _MARGIN * (ahead + 1) * self._pace / self._instances
            if self._waiting and self._clock.now + wait > deadline:
                return "refused"
            done = self._clock.event()
            self._waiting.append((done, deadline))
            if self._idle:
                self._idle.popleft().succeed()
            if not (yield done):
                return "late"
            yield from self._machine.work(parts.gallery(random))
            yield from self._machine.work(parts.handling(random) / 2)
            return "OK" if self._clock.now <= deadline else "late"
        finally:
            self.in_flight -= 1

    def _live(self) -> Steps:
        """Take batch after batch: of what waits, the share of the instances that are free."""
        parts, random, most = self._parts, self._random, len(self._parts.encode)
        while True:
            while not self._waiting:
                self._idle.append(self._clock.event())
                yield self._idle[-1]
            share = min(math.ceil(len(self._waiting) / (self._instances - self._busy)), most)
            batch: list[simpy.Event] = []
            while self._waiting and len(batch) < share:
                done, deadline = self._waiting.popleft()
                if deadline < self._clock.now:
                    done.succeed(False)  # nobody waits for it
                else:
                    batch.append(done)
            if not batch:
                continue
            self._busy += 1
            self._taken += len(batch)
            began = self._clock.now
            decoding = sum(parts.decode(random) for _ in batch)
            yield from self._machine.work(decoding + parts.encode[len(batch) - 1](random), urgent=False)
            self._busy -= 1
            self._taken -= len(batch)
            pace = (self._clock.now - began) / len(batch)
            self._pace += (_SMOOTHING if self._pace else 1.0) * (pace - self._pace)
            for done in batch:
                done.succeed(True)
