"""HTML and SVG as text that is safe by its making: whatever is not `Markup` already is escaped."""

import html
import re
from collections.abc import Iterable

__all__ = ["Markup", "clip", "element", "number", "percent", "table"]

_ALONE = frozenset(("br", "circle", "image", "img", "line", "meta", "path", "rect", "use"))
"""Elements that hold nothing, of HTML and of SVG."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

Value = str | float | bool | None


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: Value) -> Markup:
    """Make an element.

    Args:
        name: Its tag.
        children: In order; text is escaped, `Markup` is taken as it is.
        attributes: `class_` is `class`, `aria_label` is `aria-label`; None and False are left out, True
            stands alone, numbers have two decimals at the most.
    """
    given = "".join(
        f" {key}" if value is True else f' {key}="{_text(value)}"'
        for key, value in ((_key(name), value) for name, value in attributes.items())
        if value is not None and value is not False
    )
    if name in _ALONE and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{''.join(map(_text, children))}</{name}>")


def table(
    head: Iterable[str], rows: Iterable[Iterable[str]], *, caption: str, numbers: bool = False
) -> Markup:
    """Make a table whose first column heads its rows; it scrolls by itself where it is too wide.

    Args:
        head: A name a column.
        rows: A text a column, each.
        caption: What it tells.
        numbers: Whether its cells are numbers, which do not break.
    """
    columns = element("tr", *(element("th", name, scope="col") for name in head))
    lines = (
        element("tr", *(element("th", cell, scope="row") if i == 0 else element("td", cell)
                        for i, cell in enumerate(row)))
        for row in rows
    )  # fmt: skip
    made = element(
        "table",
        element("caption", caption),
        element("thead", columns),
        element("tbody", *lines),
        class_="numbers" if numbers else None,
    )
    return element("div", made, class_="wide", tabindex="0", role="region", aria_label=clip(caption))


def clip(text: str, most: int = 60) -> str:
    """Shorten a name to `most` characters; both its ends are told, since keys differ in their last ones."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1 - most // 2) :]}"


def number(value: float) -> str:
    """Write a figure with four digits that count."""
    return f"{value:.4g}"


def percent(share: float, digits: int = 2) -> str:
    """Write a share of 0..1 as percent."""
    return f"{100 * share:.{digits}f}\u00a0%"


def _key(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")


def _text(value: Value) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".")
    # a control character is not allowed in HTML, not even escaped
    return _CONTROL.sub("\ufffd", html.escape(str(value)))
