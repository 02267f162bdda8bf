"""A chart of lines over epochs, as SVG."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from training.report.markup import Markup, element, number

__all__ = ["Series", "line_chart", "ticks"]

_WIDTH, _HEIGHT = 380, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 40
_MARKED = 30
"""Most points of a line that are marked each."""
_STYLES = 6
_LEAST = 1e-300
_NEAR = 1e-12  # of the values, below which no ticks lie between them
"""Values closer than this are one: floats that small can hardly be divided."""


class Series(NamedTuple):
    """A line; an epoch that it has no point of is drawn through."""

    name: str
    points: Sequence[tuple[float, float]]
    """(epoch, value), by rising epoch, all finite."""


def line_chart(title: str, series: Sequence[Series], *, unit: str) -> Markup:
    """Draw lines over epochs in one frame.

    Args:
        title: Heading above it.
        series: At least one point in all of them together.
        unit: Label of the vertical axis.
    """
    across = [epoch for line in series for epoch, _ in line.points]
    up = [value for line in series for _, value in line.points]
    x_ticks = _epochs(min(across), max(across))
    y_ticks = ticks(min(up), max(up), wanted=4)
    x = _Scale(min(across), max(across), _LEFT, _WIDTH - _RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    drawing = element(
        "svg",
        *(_rule(y(tick), number(tick)) for tick in y_ticks),
        *(
            element("text", number(tick), x=x(tick), y=float(_HEIGHT - _BOTTOM + 16), text_anchor="middle")
            for tick in x_ticks
        ),
        element("text", "epoch", x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6.0, text_anchor="middle"),
        element(
            "text",
            unit,
            transform=f"translate(12 {(_TOP + _HEIGHT - _BOTTOM) / 2:g}) rotate(-90)",
            text_anchor="middle",
        ),
        *(_line(line, i % _STYLES, x, y) for i, line in enumerate(series)),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title} by epoch. {' '.join(_told(line) for line in series)}",
    )
    legend = [element("span", _swatch(i % _STYLES), line.name) for i, line in enumerate(series)]
    caption = element("figcaption", *legend, class_="legend") if len(legend) > 1 else ""
    return element("div", element("h3", title), element("figure", drawing, caption))


def ticks(low: float, high: float, *, wanted: int) -> list[float]:
    """Give about `wanted` round numbers, 1, 2 or 5 times a power of ten apart, that enclose [low, high]."""
    if high - low < max(_LEAST, _NEAR * max(abs(low), abs(high))):
        reach = abs(low) / 2 if abs(low) > _LEAST else 1.0
        low, high = low - reach, high + reach
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def _epochs(low: float, high: float) -> list[float]:
    """Choose the epochs that are written along the axis."""
    if low == high:
        return [low]
    return [tick for tick in ticks(low, high, wanted=6) if low <= tick <= high and tick == round(tick)]


class _Scale:
    """The map from values to places; a single value lies in the middle."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = low, high - low
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        share = (value - self._low) / self._span if self._span else 0.5
        return self._start + share * self._length


def _rule(y: float, text: str) -> Markup:
    """Draw a horizontal rule and what it stands for."""
    return element(
        "g",
        element("line", x1=float(_LEFT), x2=float(_WIDTH - _RIGHT), y1=y, y2=y, class_="axis"),
        element("text", text, x=_LEFT - 6.0, y=y + 4, text_anchor="end"),
    )


def _line(line: Series, style: int, x: _Scale, y: _Scale) -> Markup:
    places = [(x(epoch), y(value)) for epoch, value in line.points]
    path = " ".join(f"{'L' if i else 'M'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(places))
    marked = zip(line.points, places, strict=True) if len(places) <= _MARKED else ()
    dots = (
        element("circle", element("title", f"{line.name}, epoch {epoch:g}: {number(value)}"),
                cx=a, cy=b, r=2.8, class_="dot")
        for (epoch, value), (a, b) in marked
    )  # fmt: skip
    return element("g", element("path", d=path, class_=f"curve s{style}"), *dots, class_=f"s{style}")


def _swatch(style: int) -> Markup:
    line = element("path", d="M0 7H28", class_=f"curve s{style}")
    return element("svg", line, viewBox="0 0 28 14", aria_hidden="true")


def _told(line: Series) -> str:
    """Say a line in words, for whoever does not see it."""
    if not line.points:
        return f"{line.name} has no value."
    (first, begin), (last, end) = line.points[0], line.points[-1]
    if first == last:
        return f"{line.name}: {number(begin)} at epoch {first:g}."
    falls = sum(after < before for (_, before), (_, after) in pairwise(line.points))
    return (
        f"{line.name}: from {number(begin)} at epoch {first:g} to {number(end)} at epoch {last:g},"
        f" falling in {falls} of {len(line.points) - 1} steps."
    )
