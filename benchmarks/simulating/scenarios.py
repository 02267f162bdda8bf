"""What is simulated: servers by their load, parts of one gallery, the loss of a server, what was measured."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

import simpy

from benchmarks.replicas import DEADLINE
from benchmarks.simulating.fleet import Balancer, Outcomes, Shards, send
from benchmarks.simulating.replica import Machine, Replica
from benchmarks.simulating.times import Parts

__all__ = ["CORES", "MACHINES", "Row", "beside", "capacity", "losses", "replicas", "shards"]

CORES: Final = 2
"""Of each machine in what is foretold."""
MACHINES: Final = 8
"""That a gallery is spread over."""
_CALLS: Final = 10_000
_WINDOW: Final = 0.5
_LOST_AT: Final = 4.0
Row: TypeAlias = dict[str, object]


def capacity(parts: Parts) -> float:
    """Return the calls a second that a machine answers whose cores do nothing else, in full batches."""
    largest = len(parts.encode)
    each = parts.decode.mean + parts.encode[-1].mean / largest + parts.gallery.mean + parts.handling.mean
    return CORES / each


def replicas(parts: Parts, counts: Sequence[int], loads: Sequence[float]) -> Iterator[Row]:
    """So many servers, each on a machine of its own, by the share of what all of them can do."""
    for count in counts:
        for load in loads:
            clock, random = simpy.Environment(), Random(0)
            rate = load * count * capacity(parts)
            balancer = _balancer(clock, parts, random, count)
            outcomes = send(clock, balancer, random, rate=rate, seconds=_CALLS / rate, patience=DEADLINE)
            yield {"scenario": "replicas", "replicas": count, "load": load} | _told(outcomes, _CALLS / rate)


def shards(whole: Mapping[int, Parts], loads: Sequence[float]) -> Iterator[Row]:
    """A gallery in so many parts on MACHINES machines, the parts of a call by their number."""
    for count, parts in whole.items():
        for load in loads:
            clock, random = simpy.Environment(), Random(0)
            groups = [_balancer(clock, parts, random, MACHINES // count) for _ in range(count)]
            rate = load * MACHINES / count * capacity(parts)
            seconds = _CALLS / rate / 5  # each is several
            outcomes = send(
                clock, Shards(clock, groups), random, rate=rate, seconds=seconds, patience=DEADLINE
            )
            yield {"scenario": "shards", "shards": count, "load": load} | _told(outcomes, seconds)


def losses(parts: Parts, count: int, loads: Sequence[float]) -> Iterator[Row]:
    """One of so many servers is killed, or vanishes, under load: what calls see, window by window."""
    for silent in (False, True):
        for load in loads:
            clock, random = simpy.Environment(), Random(0)
            balancer = _balancer(clock, parts, random, count)
            clock.process(balancer.lose(balancer.replicas[0], _LOST_AT, silent=silent))
            rate = load * count * capacity(parts)
            outcomes = send(clock, balancer, random, rate=rate, seconds=4 * _LOST_AT, patience=DEADLINE)
            how = "vanished" if silent else "killed"
            about = {"replicas": count, "load": load}
            yield {"scenario": f"after: {how}"} | about | _told(outcomes, 3 * _LOST_AT, _LOST_AT)
            for window in range(round(4 * _LOST_AT / _WINDOW)):
                since = window * _WINDOW
                yield (
                    {"scenario": how} | about | {"second": since - _LOST_AT} | _told(outcomes, _WINDOW, since)
                )


def beside(parts: Parts, measured: Path, seconds: float) -> Iterator[Row]:
    """The same servers on the same cores, by the load that was measured, and how far the two are apart."""
    with measured.open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    for run in runs:
        clock, random = simpy.Environment(), Random(0)
        machine = Machine(clock, int(run["cores"]))
        balancer = _balancer(clock, parts, random, int(run["servers"]), machine)
        rate = float(run["offered"])
        outcomes = send(clock, balancer, random, rate=rate, seconds=seconds, patience=DEADLINE)
        told = _told(outcomes, seconds)
        ratios = {
            f"{name}_ratio": float(str(told[name])) / float(run[name])
            for name in ("answered", "p50_ms", "p99_ms")
        }
        about = {"scenario": "beside", "replicas": int(run["servers"]), "load": run["load"]}
        was = {f"measured_{name}": float(run[name]) for name in ("answered", "p50_ms", "p99_ms")}
        yield about | told | was | ratios


def _balancer(
    clock: simpy.Environment, parts: Parts, random: Random, count: int, shared: Machine | None = None
) -> Balancer:
    """Make servers of one thread on one machine, or each on a machine of its own with a thread a core."""
    servers = [
        Replica(clock, shared or Machine(clock, CORES), parts, random, instances=1 if shared else CORES)
        for _ in range(count)
    ]
    return Balancer(
        clock,
        servers,
        random,
        front=shared or Machine(clock, None),
        handling=parts.front,
        waiting=parts.waiting,
    )


def _told(outcomes: Outcomes, seconds: float, since: float = 0.0) -> Row:
    """Return the figures of the calls of a while."""
    some = Outcomes([each for each in outcomes.ends if since <= each[0] < since + seconds])
    ends = [end for _, _, end in some.ends]
    return {
        "offered": len(ends) / seconds,
        "answered": some.count("OK") / seconds,
        "p50_ms": 1e3 * some.percentile(50),
        "p99_ms": 1e3 * some.percentile(99),
        "refused": some.count("refused") / max(1, len(ends)),
        "failed": (some.count("late") + some.count("broken")) / max(1, len(ends)),
    }
