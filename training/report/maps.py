"""The section of prototype maps: which prototype each place of an image belongs to."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row
from training.report.document import Section
from training.report.markup import Markup, clip, element, percent

__all__ = ["MAP", "SIDE", "maps_section", "tiles"]

MAP = 160
"""Side of a picture, in pixels."""
_NUMBERED = 12
"""Widest map whose places are numbered, in places."""
_TOLD = 4
SIDE = 100.0
"""Side of a picture in a drawing of its own."""
_GAP = 4.0


def maps_section(
    rows: Sequence[Row], assignments: NDArray[np.uint8], grid: tuple[int, int], pictures: Mapping[str, str]
) -> Section:
    """Show images beside themselves under their map.

    Args:
        rows: The images, N of them.
        assignments: Dominant prototype of each place, (N, n), places row by row.
        grid: (h, w), n = h * w.
        pictures: Data URIs by key.
    """
    height, width = grid
    told = (
        f"Each of the {height} x {width} places of the feature map is coloured by its dominant prototype, the"
        " largest term of the softmax of eq. 2.4. One prototype has one colour on all images"
        f"{', and its number is written on it' if width <= _NUMBERED else ''}. The images are queries"
        " from above."
    )
    figures = (
        _figure(row, found.reshape(grid), pictures.get(row.key), anchor=f"map-{place}")
        for place, (row, found) in enumerate(zip(rows, assignments, strict=True))
    )
    return Section("maps", "Prototype maps", [element("p", told), element("div", *figures, class_="maps")])


def _figure(row: Row, found: NDArray[np.uint8], uri: str | None, *, anchor: str) -> Markup:
    """Draw one image and its map, (h, w)."""
    counts = np.bincount(found.flatten())
    order = [place for place in np.argsort(-counts, kind="stable").tolist() if counts[place]]
    shares = ", ".join(f"{place} ({percent(counts[place] / found.size, 0)})" for place in order[:_TOLD])
    rest = f" and {len(order) - _TOLD} more" if len(order) > _TOLD else ""
    summary = f"prototypes {shares}{rest}"
    if uri is None:
        return element(
            "figure", element("figcaption", f"{clip(row.label)}: can no longer be read; {summary}")
        )
    right = SIDE + _GAP
    # shown twice, but held once: a data URI is long
    image = element("image", id=anchor, href=uri, width=SIDE, height=SIDE)
    again = element("use", href=f"#{anchor}", x=right)
    drawing = element(
        "svg",
        image,
        again,
        element("g", *tiles(found), transform=f"translate({right:g} 0)"),
        viewBox=f"0 0 {right + SIDE:g} {SIDE:g}",
        role="img",
        aria_label=f"Image of {clip(row.label)}, plain and under its map: {summary}",
    )
    caption = element("figcaption", element("span", clip(row.label)), f" – {summary}")
    return element("figure", drawing, caption, title=clip(row.key, 200))


def tiles(found: NDArray[np.uint8]) -> list[Markup]:
    """Colour the places of a map, (h, w), over a square; neighbours of one prototype in a row are a tile."""
    height, width = found.shape
    tall, wide = SIDE / height, SIDE / width
    drawn = []
    for y, line in enumerate(found.tolist()):
        starts = [x for x in range(width) if x == 0 or line[x] != line[x - 1]]
        for start, end in zip(starts, [*starts[1:], width], strict=True):
            prototype = line[start]
            drawn.append(
                element(
                    "rect",
                    element("title", f"prototype {prototype}"),
                    x=start * wide,
                    y=y * tall,
                    width=(end - start) * wide,
                    height=tall,
                    fill=_colour(prototype),
                    fill_opacity=0.55,
                )
            )
            if width <= _NUMBERED:
                middle = (start + end) / 2 * wide
                drawn.append(element("text", str(prototype), x=middle, y=(y + 0.5) * tall + 1.8))
    return drawn


def _colour(prototype: int) -> str:
    """Give a prototype its colour: hues by the golden angle, so that numbers near each other differ."""
    return f"hsl({prototype * 137.508 % 360:.0f} 85% {(45, 60, 35)[prototype % 3]}%)"
