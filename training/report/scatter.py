"""Points on a plane, as SVG: some classes by mark and colour, the others grey."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from training.report.markup import Markup, clip, element

__all__ = ["MARKS", "scatter"]

_SIDE, _EDGE = 400, 22
MARKS = (
    "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z",  # circle
    "M-2.7-2.7H2.7V2.7H-2.7Z",  # square
    "M0-3.6L3.4 2.4H-3.4Z",  # triangle
    "M0-3.9L3.3 0L0 3.9L-3.3 0Z",  # diamond
    "M-1.2-3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",  # plus
    "M0 3.6L-3.4-2.4H3.4Z",  # triangle on its head
    "M0-4L1.1-1.3L4-1.2L1.7.6L2.5 3.4L0 1.8L-2.5 3.4L-1.7.6L-4-1.2L-1.1-1.3Z",  # star
    "M-3.4-3.4L0-1.3L3.4-3.4L1.3 0L3.4 3.4L0 1.3L-3.4 3.4L-1.3 0Z",  # cross
)
"""Outlines of the marks of the classes that are told apart, about the origin."""


def scatter(
    points: NDArray[np.float64],
    names: Sequence[str],
    titles: Sequence[str],
    shown: Sequence[str],
    *,
    axes: tuple[str, str],
) -> Markup:
    """Draw points in a square whose two axes have one scale.

    Args:
        points: (N, 2).
        names: Class of each.
        titles: What each tells when it is pointed at.
        shown: Classes that have a mark of their own, at most as many as `MARKS`.
        axes: What the axes are.
    """
    low, high = points.min(axis=0), points.max(axis=0)
    reach = max(float((high - low).max()), 1e-12)
    room = _SIDE - 2 * _EDGE
    places = (points - (low + high) / 2) / reach * room * np.array([1, -1]) + _SIDE / 2  # (N, 2)
    style = {name: i for i, name in enumerate(shown)}
    rest = [i for i, name in enumerate(names) if name not in style]
    drawn = [_circle(places[i], titles[i]) for i in rest]
    groups = [element("g", *drawn, class_="rest")]
    for name, number in style.items():
        marks = (
            element(
                "path",
                element("title", titles[i]),
                d=MARKS[number],
                transform=f"translate({places[i, 0]:.1f} {places[i, 1]:.1f})",
                class_="mark",
            )
            for i in range(len(names))
            if names[i] == name
        )
        groups.append(element("g", *marks, class_=f"s{number}"))
    frame = element("rect", x=1, y=1, width=_SIDE - 2, height=_SIDE - 2, rx=4, class_="axis")
    drawing = element(
        "svg",
        frame,
        *groups,
        element("text", axes[0], x=_SIDE / 2, y=_SIDE - 7.0, text_anchor="middle"),
        element("text", axes[1], transform=f"translate(13 {_SIDE // 2}) rotate(-90)", text_anchor="middle"),
        viewBox=f"0 0 {_SIDE} {_SIDE}",
        role="img",
        aria_label=f"{len(names)} images as points, {axes[0]} against {axes[1]}.",
    )
    legend = [element("span", _swatch(number), clip(name)) for name, number in style.items()]
    if rest:
        others = len({names[i] for i in rest})
        legend.append(element("span", _swatch(None), f"{others} other classes"))
    caption = element("figcaption", *legend, class_="legend")
    return element("figure", drawing, caption, class_="scatter")


def _circle(place: NDArray[np.float64], title: str) -> Markup:
    x, y = place.tolist()
    return element("circle", element("title", title), cx=f"{x:.1f}", cy=f"{y:.1f}", r=1.8)


def _swatch(style: int | None) -> Markup:
    if style is None:
        mark = element("circle", r=2.5, class_="rest")
    else:
        mark = element("path", d=MARKS[style], class_="mark")
    return element(
        "svg", element("g", mark, class_=None if style is None else f"s{style}"),
        viewBox="-10 -5 20 10", aria_hidden="true",
    )  # fmt: skip
