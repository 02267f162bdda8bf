"""Servers behind a balancer as deploy/envoy/replicas.yaml has it, calls, and what becomes of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

import simpy

from benchmarks.driving.figures import percentile
from benchmarks.simulating.replica import Machine, Replica, Steps
from benchmarks.simulating.times import Time

__all__ = ["Balancer", "Outcomes", "Shards", "send"]

_ATTEMPTS: Final = 3
_PAUSE: Final = 0.025  # before the second attempt at the most, and twice that before the third
_STRIKES: Final = 3  # connections that break, one after another, until a server is thrown out
_CHECK: Final = 1.0  # between two health checks, and until one has failed that gets no answer
_KEEPALIVE: Final = 20.0  # until a connection is given up that nobody answers on


@dataclass
class Outcomes:
    """What became of calls."""

    ends: list[tuple[float, float, str]] = field(default_factory=list)
    """When each came, how long it took, and how it ended."""

    def count(self, end: str) -> int:
        """Return how many ended so."""
        return sum(each == end for _, _, each in self.ends)

    def percentile(self, percent: float, since: float = 0.0, until: float = math.inf) -> float:
        """Return the seconds that so many percent of the answers took no more than, of calls of a while."""
        return percentile(
            [took for came, took, end in self.ends if end == "OK" and since <= came < until], percent
        )


class Answering(Protocol):
    """What takes calls."""

    def answer(self, deadline: float) -> Steps:
        """Answer one; returns how it ended."""


class Balancer:
    """Asks the one of two healthy servers, drawn at random, that has fewer calls in flight."""

    def __init__(
        self,
        clock: simpy.Environment,
        replicas: Sequence[Replica],
        random: Random,
        *,
        front: Machine,
        handling: Time,
        waiting: Time,
    ) -> None:
        """Find all of them healthy.

        Args:
            clock: Of the simulation.
            replicas: The servers.
            random: For all that is drawn.
            front: The machine that this and the client are on.
            handling: What they take of it for a call.
            waiting: When nobody works.
        """
        self.replicas = replicas
        self._clock, self._random, self._front = clock, random, front
        self._handling, self._waiting = handling, waiting
        self._healthy = list(replicas)
        self._strikes = 0
        self._losing = False  # only then a call needs a process of its own, from which it can break away

    def answer(self, deadline: float) -> Steps:
        """Answer one call; returns "OK", "refused", "late" or "broken"."""
        yield from self._front.work(self._handling(self._random) / 2)
        yield self._clock.timeout(self._waiting(self._random))
        tried: list[Replica] = []
        end = "broken"
        for attempt in range(_ATTEMPTS):
            if attempt:
                yield self._clock.timeout(self._random.uniform(0, _PAUSE * 2 ** (attempt - 1)))
            replica = self._choice(tried)
            tried.append(replica)
            end = yield from self._asked(replica, deadline)
            if end != "broken":
                break
            self._strike(replica)
        yield from self._front.work(self._handling(self._random) / 2)
        return end

    def lose(self, replica: Replica, at: float, *, silent: bool) -> Steps:
        """Take one server away: killed, its machine says so; silent, its machine is gone and nobody does.

        To be begun before the first call comes.
        """
        self._losing = True
        yield self._clock.timeout(at)
        replica.alive = False
        if not silent:
            replica.lost.succeed()
        noticed = (
            self._random.uniform(0, _CHECK) + (3 if silent else 1) * _CHECK
        )  # the second check has failed
        yield self._clock.timeout(noticed)
        self._throw_out(replica)
        if silent:
            yield self._clock.timeout(_KEEPALIVE - noticed)
            replica.lost.succeed()

    def _asked(self, replica: Replica, deadline: float) -> Steps:
        if not self._losing:
            return (yield from replica.answer(deadline))
        if replica.alive:
            work = self._clock.process(replica.answer(deadline))
            yield work | replica.lost
            if replica.alive:
                return work.value
        replica.in_flight += 1
        yield replica.lost | self._clock.timeout(max(0.0, deadline - self._clock.now))
        replica.in_flight -= 1
        return "broken" if self._clock.now < deadline else "late"

    def _choice(self, tried: Sequence[Replica]) -> Replica:
        among = [each for each in self._healthy if each not in tried] or self._healthy or list(self.replicas)
        one, other = self._random.choice(among), self._random.choice(among)
        return other if other.in_flight < one.in_flight else one

    def _strike(self, replica: Replica) -> None:
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._throw_out(replica)

    def _throw_out(self, replica: Replica) -> None:
        if replica in self._healthy:
            self._healthy.remove(replica)


class Shards:
    """Each call goes to all of several parts, and is answered when the slowest has answered."""

    def __init__(self, clock: simpy.Environment, parts: Sequence[Answering]) -> None:
        """Keep the parts."""
        self._clock, self._parts = clock, parts

    def answer(self, deadline: float) -> Steps:
        """Answer one call; returns "OK" where all parts did."""
        work = [self._clock.process(each.answer(deadline)) for each in self._parts]
        yield simpy.AllOf(self._clock, work)
        ends = {each.value for each in work}
        return "OK" if ends == {"OK"} else min(ends - {"OK"})


def send(
    clock: simpy.Environment,
    to: Answering,
    random: Random,
    *,
    rate: float,
    seconds: float,
    patience: float = math.inf,
) -> Outcomes:
    """Send calls at random times (Poisson), and run the simulation until all have ended.

    Args:
        clock: Of the simulation.
        to: Takes the calls.
        random: Times the times.
        rate: Calls a second.
        seconds: That it sends.
        patience: Seconds that a caller waits.
    """
    outcomes = Outcomes()

    def one() -> Steps:
        came = clock.now
        end = yield from to.answer(came + patience)
        outcomes.ends.append((came, clock.now - came, end))

    def come() -> Steps:
        while clock.now < seconds:
            yield clock.timeout(random.expovariate(rate))
            calls.append(clock.process(one()))
        yield simpy.AllOf(clock, calls)

    calls: list[simpy.Process] = []
    clock.run(clock.process(come()))
    return outcomes
