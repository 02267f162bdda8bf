"""What the figures of docs/figures/ share: an SVG that stands by itself, colours that all can tell."""

from pathlib import Path

from training.report.markup import Markup, element

__all__ = ["BLUE", "GREEN", "GREY", "INK", "ORANGE", "VERMILION", "text", "write_svg"]

# of the palette of Okabe and Ito, which the colour-blind can tell apart
BLUE, GREEN, ORANGE, VERMILION = "#0072b2", "#009e73", "#e69f00", "#d55e00"
INK, GREY = "#222", "#8a8a8a"


def text(
    words: str,
    x: float,
    y: float,
    *,
    size: float = 12,
    anchor: str = "start",
    fill: str = INK,
    weight: str | None = None,
    turned: bool = False,
) -> Markup:
    """Write words at a point; `turned` writes them upwards."""
    return element(
        "text",
        words,
        x=None if turned else x,
        y=None if turned else y,
        transform=f"translate({x:g} {y:g}) rotate(-90)" if turned else None,
        font_size=size,
        text_anchor=None if anchor == "start" else anchor,
        fill=fill,
        font_weight=weight,
    )


def write_svg(path: Path, *parts: Markup, width: float, height: float, label: str) -> None:
    """Write a figure on white, which can be read on a dark page too.

    Args:
        path: The file.
        parts: What it shows, in order.
        width: In pixels.
        height: In pixels.
        label: What it shows, in words.
    """
    drawing = element(
        "svg",
        element("rect", width=width, height=height, fill="#fff"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        font_family="system-ui, Helvetica, Arial, sans-serif",
        role="img",
        aria_label=label,
    )
    path.write_text(f"{drawing}\n", encoding="utf-8")
