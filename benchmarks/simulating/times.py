"""How long things take: drawn at random, from what was measured or from what theory can solve."""

import csv
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

__all__ = [
    "NONE",
    "Parts",
    "Time",
    "constant",
    "exponential",
    "largest",
    "lognormal",
    "measured_parts",
    "search_parts",
]

_Z99: Final = 2.3263  # a normal variable is below so many deviations with a probability of 0.99


@dataclass(frozen=True)
class Time:
    """A time in seconds that is drawn anew for each call."""

    mean: float
    law: Callable[[Random], float]

    def __call__(self, random: Random) -> float:
        """Draw one."""
        return self.law(random)


def constant(mean: float) -> Time:
    """Return a time that is always the same."""
    return Time(mean, lambda random: mean)


def exponential(mean: float) -> Time:
    """Return a time without memory."""
    return Time(mean, lambda random: random.expovariate(1 / mean))


def lognormal(mean: float, deviation: float) -> Time:
    """Return a time whose logarithm is normal.

    Args:
        mean: Of the time itself, in seconds.
        deviation: Of its logarithm.
    """
    location = math.log(mean) - deviation**2 / 2
    return Time(mean, lambda random: random.lognormvariate(location, deviation))


NONE: Final = constant(0.0)


@dataclass(frozen=True)
class Parts:
    """What a call is made of."""

    encode: Sequence[Time]
    """The model's run, by the size of the batch from 1 on; the largest is the last."""
    decode: Time = NONE
    gallery: Time = NONE
    handling: Time = NONE
    """What the server takes of a processor beside these."""
    front: Time = NONE
    """What stands before the server takes of a processor: the proxy, and the client."""
    waiting: Time = NONE
    """When nobody works."""


def measured_parts(path: Path) -> Parts:
    """Read the parts of a call that `benchmarks/replicas.py` timed."""
    found: dict[tuple[str, int], Time] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            mean, spread = float(row["mean_ms"]) / 1e3, float(row["spread_ms"]) / 1e3
            time = lognormal(mean, math.sqrt(math.log1p((spread / mean) ** 2))) if spread else constant(mean)
            found[row["part"], int(row["batch"])] = time
    proxy, client = found["proxy", 1], found["client", 1]
    return Parts(
        encode=[found["encode", batch] for batch in range(1, 1 + max(size for _, size in found))],
        **{name: found[name, 1] for name in ("decode", "gallery", "handling", "waiting")},
        front=Time(proxy.mean + client.mean, lambda random: proxy(random) + client(random)),
    )


def largest(path: Path) -> int:
    """Return the items of the largest gallery that was measured."""
    return _searches(path)[-1][0]


def search_parts(path: Path, items: float, *, handling: Time) -> Parts:
    """Read how long a search takes in so many items, from the runs of `benchmarks/search.py`.

    Between two sizes that were measured a straight line is laid through the logarithms of items and seconds.

    Raises:
        ValueError: There are more, or fewer, items than in any gallery that was measured.
    """
    for (fewer, quick, _), (more, slow, tail) in itertools.pairwise(_searches(path)):
        if fewer <= items <= more:
            share = math.log(items / fewer) / math.log(more / fewer)
            mean = quick ** (1 - share) * slow**share
            return Parts(encode=[lognormal(mean, math.log(tail) / _Z99)], handling=handling)
    raise ValueError(f"no galleries of fewer and of more than {items:,.0f} items are in {path.name}")


def _searches(path: Path) -> list[tuple[int, float, float]]:
    """Return items, seconds of a query, and p99 over p50, of galleries whose index crossbatch chose."""
    with path.open(encoding="utf-8", newline="") as file:
        return sorted(
            (
                int(run["items"]),
                1 / float(run["queries_per_second_1"]),
                float(run["p99_ms_1"]) / float(run["p50_ms_1"]),
            )
            for run in csv.DictReader(file)
            if run["contestant"] == "crossbatch auto"
        )
