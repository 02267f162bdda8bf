"""More than a server can do: what it does of it, how fast it refuses the rest, and what it wastes."""

import math
import re
import urllib.request
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.driving.client import Client, Target

__all__ = ["LEAST_GOODPUT", "LEAST_OFFERED", "MOST_REFUSAL_MS", "Overload", "encoded", "scrape", "strain"]

LEAST_GOODPUT: Final = 0.95
LEAST_OFFERED: Final = 0.95  # of what was to be sent
MOST_REFUSAL_MS: Final = 20.0
_ALLOWED: Final = {"OK", "RESOURCE_EXHAUSTED"}


@dataclass(frozen=True)
class Overload:
    """What came of an open loop at a multiple of the capacity."""

    peak: float
    """Images a second of the closed loop before."""
    offered: float
    """Images a second that were sent."""
    goodput: float
    """Images a second that were embedded within their deadline."""
    refusal_p99_ms: float
    """99 % of the refusals took less; NaN where there was none."""
    answer_p99_ms: float
    """The same of the answers."""
    codes: dict[str, int]
    said: list[Any]
    """The commonest errors."""
    wasted: float
    """Images that were run through the model and not answered; NaN where the server does not tell."""
    client_share: float
    """Of the processors that the client took, 0 to 1."""

    @property
    def unexpected(self) -> int:
        """Calls that ended in any other way than with an answer or a refusal."""
        return sum(count for code, count in self.codes.items() if code not in _ALLOWED)

    def __str__(self) -> str:
        ran = "" if math.isnan(self.wasted) else f", {self.wasted:.0f} images run for nobody"
        return (
            f"peak {self.peak:.0f} images/s, offered {self.offered:.0f}, answered {self.goodput:.0f}, p99 of "
            f"answers {_told(self.answer_p99_ms)}, of refusals {_told(self.refusal_p99_ms)}{ran}; the client "
            f"took {100 * self.client_share:.0f} % of the processors; {self.codes}"
        )

    def row(self) -> dict[str, object]:
        """Return what is kept of it."""
        return {
            "peak_per_second": self.peak,
            "offered": self.offered / self.peak,
            "goodput": self.goodput / self.peak,
            "refusal_p99_ms": self.refusal_p99_ms,
            "answer_p99_ms": self.answer_p99_ms,
            "unexpected": self.unexpected,
            "client_share": self.client_share,
        }


def strain(
    client: Client,
    target: Target,
    *,
    times: float,
    in_flight: int,
    seconds: float,
    timeout: float,
    cores: int,
    metrics: str = "",
) -> Overload:
    """Find the peak with a closed loop, then send so many times as much.

    Args:
        client: Sends.
        target: Where to.
        times: The peak.
        in_flight: Of the closed loop.
        seconds: Of the open loop; the closed loop has a quarter.
        timeout: Deadline of each call in seconds.
        cores: Processors of the machine.
        metrics: Where the server tells how many images it has run through the model.
    """
    closed = client.closed(target, in_flight=in_flight, seconds=seconds / 4)
    peak = closed["codes"].get("OK", 0) / closed["seconds"]
    before = encoded(metrics)
    answer = client.open(target, rate=times * peak, seconds=seconds, timeout=timeout)
    codes: dict[str, int] = answer["codes"]
    good = codes.get("OK", 0)

    def p99(code: str) -> float:
        return float(answer["latency_ms"][code]["p99"]) if code in codes else math.nan

    return Overload(
        peak=peak,
        offered=sum(codes.values()) / answer["seconds"],
        goodput=good / answer["whole_seconds"],  # what waits in the end is work of the server, too
        refusal_p99_ms=p99("RESOURCE_EXHAUSTED"),
        answer_p99_ms=p99("OK"),
        codes=codes,
        said=answer["said"],
        wasted=encoded(metrics) - before - good,
        client_share=answer["cpu_seconds"] / answer["whole_seconds"] / cores,
    )


def _told(milliseconds: float) -> str:
    return "not measured" if math.isnan(milliseconds) else f"{milliseconds:.0f} ms"


def encoded(metrics: str) -> float:
    """Return how many images a server has run through its models; NaN where it does not tell."""
    found = [
        float(value)
        for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", scrape(metrics), re.MULTILINE)
        if re.fullmatch(r"crossbatch_\w*batch\w*_sum", name) and "second" not in name
    ]
    return sum(found) if found else math.nan


def scrape(metrics: str) -> str:
    """Return what a server tells Prometheus; nothing where no address is given."""
    if not metrics:
        return ""
    with urllib.request.urlopen(metrics, timeout=10) as reply:
        text: str = reply.read().decode()
        return text
