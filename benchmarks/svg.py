"""What the figures of docs/figures/ share: an SVG that stands by itself, colours that all can tell."""

import html
from pathlib import Path

__all__ = ["BLUE", "GREEN", "GREY", "INK", "VERMILION", "Markup", "element", "text", "write_svg"]

# of the palette of Okabe and Ito, which the colour-blind can tell apart
BLUE, GREEN, VERMILION = "#0072b2", "#009e73", "#d55e00"
INK, GREY = "#222", "#8a8a8a"


class Markup(str):
    """Text that is XML already."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Make an element; text is escaped, `Markup` is taken as it is.

    Args:
        name: Its tag.
        children: In order.
        attributes: `fill_opacity` is `fill-opacity`; None is left out, numbers have two decimals at the most.
    """
    given = "".join(
        f' {key.replace("_", "-")}="{_told(value)}"' for key, value in attributes.items() if value is not None
    )
    if not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{''.join(map(_told, children))}</{name}>")


def _told(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(str(value))


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
