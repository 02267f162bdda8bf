"""Rounds in which the plain loop and servers take turns, and the table of what they came to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.driving.client import Client, Target
from benchmarks.driving.figures import apart, median, quartiles
from benchmarks.driving.plain import Plain
from benchmarks.driving.served import Failed

__all__ = ["LEAST_RATIO", "MOST_EXTRA_MS", "Level", "Rounds", "table"]

LEAST_RATIO: Final = {8: 0.90, 32: 0.95, 128: 0.95}
"""Bound on images a second over the plain loop, by how many are in flight."""
MOST_EXTRA_MS: Final = 2.0
"""Bound on the latency of one in flight beyond that of the plain loop."""
_MOST_APART: Final = 0.10
_TRIES: Final = 3  # rounds that are begun for each that counts


@dataclass
class Level:
    """What came of one server with so many in flight; a value for each round that counts."""

    server: str
    in_flight: int
    p50_ms: list[float] = field(default_factory=list)
    p95_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    plain_per_second: list[float] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)
    """Latency of the plain loop, one image after another; with one in flight only."""
    client_share: list[float] = field(default_factory=list)
    """Of the processors that the client took, 0 to 1."""
    skipped: int = 0
    """Rounds in which the plain loop before and after were too far apart."""

    @property
    def ratios(self) -> list[float]:
        """Images a second over those of the plain loop, round by round."""
        return [ours / plain for ours, plain in zip(self.per_second, self.plain_per_second, strict=True)]

    @property
    def extra_ms(self) -> list[float]:
        """Latency beyond that of the plain loop, round by round."""
        return [ours - plain for ours, plain in zip(self.p50_ms, self.plain_ms, strict=False)]

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield what is kept of each round."""
        columns = {
            "images_per_second": self.per_second,
            "plain_per_second": self.plain_per_second,
            "ratio": self.ratios,
            "p50_ms": self.p50_ms,
            "p95_ms": self.p95_ms,
            "p99_ms": self.p99_ms,
            "client_share": self.client_share,
            "extra_ms": self.extra_ms,
        }
        for turn in range(len(self.per_second)):
            row = {name: values[turn] for name, values in columns.items() if values}
            yield {"server": self.server, "in_flight": self.in_flight, "round": turn, **row}


class Rounds:
    """Measures servers by turns with the plain loop."""

    def __init__(
        self,
        client: Client,
        plain: Plain,
        *,
        rounds: int,
        seconds: float,
        cores: int,
        tell: Callable[[str], None],
    ) -> None:
        """Keep what holds for all.

        Args:
            client: Sends.
            plain: What all are compared with.
            rounds: That count.
            seconds: Of each turn.
            cores: Processors of the machine, for the client's share.
            tell: Takes a line on how far it is.
        """
        self._client = client
        self._plain = plain
        self._rounds = rounds
        self._seconds = seconds
        self._cores = cores
        self._tell = tell

    def play(self, targets: dict[str, Target], in_flight: Sequence[int]) -> list[Level]:
        """Let each server have its turn at each level, between two turns of the plain loop.

        Returns:
            One level a server and number in flight, in that order.

        Raises:
            Failed: A call failed.
        """
        levels = [Level(server, number) for number in in_flight for server in targets]
        for target in targets.values():
            self._client.closed(target, in_flight=max(in_flight), seconds=min(1.0, self._seconds))
        for turn in range(self._rounds * _TRIES):
            due = [level for level in levels if len(level.per_second) < self._rounds]
            if not due:
                break
            before = self._plain.rate(self._seconds)
            for level in due[:: 1 if turn % 2 else -1]:  # nobody always goes first
                before = self._turn(level, targets[level.server], before)
        return levels

    def _turn(self, level: Level, target: Target, before: float) -> float:
        """Take one turn at one level; returns the plain loop's rate after it."""
        alone = self._plain.latency(self._seconds) if level.in_flight == 1 else None
        answer = self._client.closed(target, in_flight=level.in_flight, seconds=self._seconds)
        after = self._plain.rate(self._seconds)
        if set(answer["codes"]) != {"OK"}:
            raise Failed(f"{level.server}, {level.in_flight} in flight: {answer['said']}")
        if apart(before, after) > _MOST_APART:
            level.skipped += 1
            self._tell(f"skipped: the plain loop made {before:.0f} and then {after:.0f} images/s")
            return after
        latency = answer["latency_ms"]["OK"]
        level.p50_ms.append(latency["p50"])
        level.p95_ms.append(latency["p95"])
        level.p99_ms.append(latency["p99"])
        level.per_second.append(answer["codes"]["OK"] / answer["seconds"])
        level.plain_per_second.append((before + after) / 2)
        level.client_share.append(answer["cpu_seconds"] / answer["seconds"] / self._cores)
        if alone is not None:
            level.plain_ms.append(1e3 * alone)
        self._tell(f"{level.server}, {level.in_flight} in flight: {level.per_second[-1]:.0f} images/s")
        return after


def table(levels: Sequence[Level]) -> str:
    """Return a table in Markdown: medians of the rounds, and the quartiles of the ratio."""
    lines = [
        "| server | in flight | p50 ms | p95 ms | p99 ms | images/s | plain loop | ratio (quartiles) "
        "| client | rounds (skipped) |",
        "| --- | --: | --: | --: | --: | --: | --: | --- | --: | --- |",
    ]
    for level in levels:
        first, third = quartiles(level.ratios)
        figures = [level.p50_ms, level.p95_ms, level.p99_ms, level.per_second, level.plain_per_second]
        columns = [level.server, str(level.in_flight), *(f"{median(each):.1f}" for each in figures)]
        columns += [f"{median(level.ratios):.3f} ({first:.3f} to {third:.3f})"]
        columns += [f"{100 * median(level.client_share):.0f} %", f"{len(level.ratios)} ({level.skipped})"]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)
