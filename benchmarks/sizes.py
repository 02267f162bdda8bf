"""Latency and bytes of galleries by their size, beside theory: `python benchmarks/sizes.py [--out FILE.svg]`.

Draws benchmarks/results/sizes.csv, whose rows `benchmarks/search.py --count N --brief --rivals --csv` adds.
Theory is a line through the smallest gallery's point: comparing every vector takes time in proportion to the
items, a graph to their logarithm (Malkov and Yashunin, "Efficient and robust approximate nearest neighbor
search using HNSW graphs", 2018), lists to their square root where there are as many as their square root.
On disk an item of d components takes 8 d bytes, in the store and in the index, and what its type adds.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.svg import BLUE, GREEN, GREY, INK, VERMILION, Markup, element, text, write_svg

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "benchmarks/results/sizes.csv"
_SIDE, _TOP, _LEFT, _GAP = 320.0, 56.0, 64.0, 96.0
_COLOURS = {"auto": BLUE, "exact": INK, "HNSW": GREEN, "IVF": VERMILION, "PQ": GREY}
_GROWTH: Mapping[str, Callable[[float], float]] = {
    "exact": lambda count: count,
    "PQ": lambda count: count,
    "HNSW": math.log,
    "IVF": math.sqrt,
}
Points = Mapping[str, Sequence[tuple[int, float]]]


def _kind(contestant: str) -> str:
    """Return the family of an index by its name in the table."""
    name = contestant.removeprefix("crossbatch ")
    return next(family for family in _COLOURS if name.startswith(family))


def _points(column: str, scale: Callable[[Mapping[str, str]], float]) -> Points:
    """Return by family of index its points (items, value); of HNSW the one with 16 links."""
    found: dict[str, list[tuple[int, float]]] = {}
    with RUNS.open(encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            if "HNSW32" in run["contestant"] or run["contestant"].endswith("IVF,Flat"):
                continue
            place = (int(run["items"]), float(run[column]) * scale(run))
            points = found.setdefault(_kind(run["contestant"]), [])
            if place[0] not in [items for items, _ in points]:
                points.append(place)
    return {family: sorted(points) for family, points in found.items()}


def _panel(points: Points, left: float, title: str, *, linear: bool) -> Iterator[Markup]:
    """Draw one plot against the logarithm of the items: values from zero on, or logarithms beside theory."""
    counts = [items for some in points.values() for items, _ in some]
    values = [value for some in points.values() for _, value in some]
    low, high = math.floor(math.log10(min(counts))), math.ceil(math.log10(max(counts)))
    if linear:
        step = 10 ** math.floor(math.log10(max(values)))
        ticks = [step * at for at in range(math.ceil(max(values) / step) + 1)]
    else:
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
        ticks = [10.0**power for power in powers]
    scaled: Callable[[float], float] = (lambda value: value) if linear else math.log10

    def place(items: float, value: float) -> tuple[float, float]:
        across = (math.log10(items) - low) / (high - low)
        up = (scaled(value) - scaled(ticks[0])) / (scaled(ticks[-1]) - scaled(ticks[0]))
        return left + _SIDE * across, _TOP + _SIDE * (1 - up)

    yield text(title, left, _TOP - 18, size=14, weight="600")
    yield element("rect", x=left, y=_TOP, width=_SIDE, height=_SIDE, fill="none", stroke="#bbb")
    for power in range(low, high + 1):
        x, _ = place(10**power, ticks[-1])
        yield text(f"{10**power:,}", x, _TOP + _SIDE + 18, size=11, anchor="middle")
    for tick in ticks:
        _, y = place(10**low, tick)
        yield element("line", x1=left, y1=y, x2=left + _SIDE, y2=y, stroke="#e4e4e4")
        yield text(f"{tick:,g}", left - 6, y + 4, size=11, anchor="end")
    for family, some in points.items():
        line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in some)
        colour = _COLOURS[family]
        yield element("polyline", points=line, fill="none", stroke=colour, stroke_width=1.6)
        for x, y in (place(*point) for point in some):
            yield element("circle", cx=x, cy=y, r=3.2, fill=colour)
        if not linear and family in _GROWTH:
            grow, (first, value) = _GROWTH[family], some[0]
            ends = [place(n, value * grow(n) / grow(first)) for n in (first, some[-1][0])]
            (x1, y1), (x2, y2) = ends
            yield element(
                "line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_dasharray="4 4", stroke_width=1
            )


def main(words: Sequence[str] | None = None) -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/sizes.svg")
    given = parser.parse_args(words)
    second = _LEFT + _SIDE + _GAP
    latency = _points("p50_ms_1", lambda run: 1.0)
    size = _points("disk_mb", lambda run: 1e6 / int(run["items"]))
    parts = [
        *_panel(latency, _LEFT, "ms of a query, one a call (dashed: theory)", linear=False),
        *_panel(size, second, "bytes on disk an item", linear=True),
    ]
    for at, family in enumerate(latency):
        x = _LEFT + 130 * at
        parts.append(element("circle", cx=x, cy=_TOP + _SIDE + 44, r=5, fill=_COLOURS[family]))
        parts.append(text(family, x + 12, _TOP + _SIDE + 48, size=12.5))
    words_of = "Milliseconds of a query and bytes on disk of galleries by their number of items"
    write_svg(given.out, *parts, width=second + _SIDE + 40, height=_TOP + _SIDE + 64, label=words_of)


if __name__ == "__main__":
    main()
