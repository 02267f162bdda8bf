"""The whole page around its sections: one file that asks for nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from training.report.markup import Markup, element

__all__ = ["Section", "document"]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser is told to refuse: scripts, fonts, and every request."""


class Section(NamedTuple):
    """A part of the page that its contents list."""

    anchor: str
    """A word of ours, which links to it."""
    title: str
    parts: Sequence[str]


def document(title: str, head: Sequence[str], sections: Sequence[Section], *, foot: str) -> bytes:
    """Make the page.

    Args:
        title: Of the page and of its first heading.
        head: What stands between that heading and the contents.
        sections: In order.
        foot: The last line.

    Returns:
        UTF-8; a byte of a path that is not UTF-8 is written as hex.
    """
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    contents = element(
        "nav",
        element(
            "ul",
            *(element("li", element("a", part.title, href=f"#{part.anchor}")) for part in sections),
        ),
        aria_label="Contents",
    )
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'),
            element("title", title),
            element("style", Markup(style)),
        ),
        element(
            "body",
            element("header", element("h1", title), *head, contents),
            element("main", *(_section(part) for part in sections)),
            element("footer", element("p", foot, class_="soft")),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n".encode("utf-8", "backslashreplace")


def _section(part: Section) -> Markup:
    return element(
        "section",
        element("h2", part.title, id=f"{part.anchor}-title"),
        *part.parts,
        id=part.anchor,
        aria_labelledby=f"{part.anchor}-title",
    )
