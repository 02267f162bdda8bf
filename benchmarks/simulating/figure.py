"""Draws docs/figures/simulation.svg of the rows that a simulation has written."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.svg import BLUE, GREEN, GREY, VERMILION, Markup, element, text, write_svg

__all__ = ["draw"]

_WIDE, _HIGH, _LEFT, _TOP, _GAP, _BELOW = 330.0, 230.0, 60.0, 40.0, 80.0, 96.0
_COLOURS: Final = (BLUE, VERMILION, GREEN, GREY)
_LEAST, _MOST = 1, 10_000  # milliseconds
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points of one colour: joined, or each by itself."""

    label: str
    points: Sequence[Point]
    colour: str
    joined: bool = True


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write the figure."""

    def points(x: str, y: str = "p99_ms", **chosen: str) -> list[Point]:
        some = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
        return [(float(row[x]), float(row[y])) for row in some if row[y] not in ("", "nan")]

    def lines(by: str, x: str, label: str, **chosen: str) -> list[Line]:
        values = dict.fromkeys(
            row[by] for row in rows if all(row[name] == value for name, value in chosen.items())
        )
        return [
            Line(label.format(value), points(x, **{by: value}, **chosen), colour)
            for value, colour in zip(values, _COLOURS, strict=False)
        ]

    own = lines("replicas", "offered", "{}", scenario="beside")
    measured = [
        Line(
            "",
            points("offered", "measured_p99_ms", replicas=line.label),
            line.colour,
            joined=False,
        )
        for line in own
    ]
    panels = [
        ("servers, by share of what they can do", lines("replicas", "load", "{}", scenario="replicas")),
        (
            "parts on 8 machines, by queries/s",
            lines("shards", "offered", "{}", scenario="shards"),
        ),
        ("one of 3 killed at 0 s, by load", lines("load", "second", "{}", scenario="killed")),
        ("one of 3 vanished at 0 s, by load", lines("load", "second", "{}", scenario="vanished")),
        ("servers on 2 cores, simulated; dots: measured", own + measured),
    ]
    parts: list[Markup] = []
    for number, (title, some) in enumerate(panels):
        left = _LEFT + (number % 2) * (_WIDE + _GAP)
        top = _TOP + number // 2 * (_HIGH + _BELOW)
        parts += _panel(title, some, left, top)
    height = _TOP + math.ceil(len(panels) / 2) * (_HIGH + _BELOW)
    label = "Milliseconds that 99 % of the calls take no more than, by load and in the loss of a server"
    write_svg(path, *parts, width=_LEFT + 2 * _WIDE + _GAP + 20, height=height, label=label)


def _panel(title: str, lines: Sequence[Line], left: float, top: float) -> Iterator[Markup]:
    """Draw one plot: the logarithm of p99 in milliseconds against x."""
    every = [x for line in lines for x, _ in line.points]
    step = _step(max(every) - min(0.0, *every))
    low, high = step * math.floor(min(0.0, *every) / step), step * math.ceil(max(every) / step)

    def place(point: Point) -> Point:
        value = min(max(point[1], _LEAST), _MOST)
        up = math.log(value / _LEAST) / math.log(_MOST / _LEAST)
        return left + _WIDE * (point[0] - low) / (high - low), top + _HIGH * (1 - up)

    yield text(f"p99 ms: {title}", left, top - 12, size=13, weight="600")
    yield element("rect", x=left, y=top, width=_WIDE, height=_HIGH, fill="none", stroke="#bbb")
    for power in range(5):
        _, y = place((low, 10.0**power))
        yield element("line", x1=left, y1=y, x2=left + _WIDE, y2=y, stroke="#e4e4e4")
        yield text(f"{10**power:,}", left - 6, y + 4, size=11, anchor="end")
    for tick in range(round((high - low) / step) + 1):
        x, _ = place((low + tick * step, 1))
        yield text(f"{low + tick * step:,.4g}", x, top + _HIGH + 16, size=11, anchor="middle")
    across = left
    for line in lines:
        places = [place(point) for point in line.points]
        if line.joined:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield element("polyline", points=joined, fill="none", stroke=line.colour, stroke_width=1.6)
        else:
            for x, y in places:
                yield element("circle", cx=x, cy=y, r=3.2, fill=line.colour)
            continue
        yield element("circle", cx=across + 5, cy=top + _HIGH + 36, r=5, fill=line.colour)
        yield text(line.label, across + 15, top + _HIGH + 40, size=12)
        across += 30 + 7 * len(line.label)


def _step(reach: float) -> float:
    """Return a round step of which some five make up a reach."""
    power = 10.0 ** math.floor(math.log10(reach / 4))
    return power * next(each for each in (1, 2, 5, 10) if each * power >= reach / 5)
