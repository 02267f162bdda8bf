"""The contact sheet of a search: its picture and what it found, on one HTML page that asks for nothing."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from serving.client import Hit
from serving.look import POLICY, printable, stylesheet

__all__ = ["contact_sheet"]

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="referrer" content="no-referrer"/>
<meta http-equiv="Content-Security-Policy" content="$policy"/>
<title>$title</title>
<style>
$style
.row { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1.5rem 1rem; margin-top: 2rem; }
.row img { object-fit: contain; }
.row .gone { display: grid; place-content: center; padding: 1rem; text-align: center; }
.row .gone { color: var(--soft); font-size: 0.8rem; overflow-wrap: anywhere; }
.row figcaption b { color: var(--ink); font-size: 0.95rem; font-variant-numeric: tabular-nums; }
.row .label { color: var(--ink); }
.row dl { margin: 0.25rem 0 0; }
.row dt { float: left; clear: left; margin-right: 0.4em; }
.row dt::after { content: ":"; }
.row dd { margin: 0; color: var(--ink); unicode-bidi: isolate; }
.row summary { cursor: pointer; padding: 0.2rem 0; }
</style>
</head>
<body>
<header><h1>$title</h1><p class="soft">$about</p></header>
<main><ol class="row" role="list">
$cards
</ol></main>
</body>
</html>
""")
_MOST = 300  # characters of a label, a key or a value


def contact_sheet(
    query: str, picture: bytes, hits: Sequence[Hit], *, gallery: str, columns: Sequence[str], about: str
) -> str:
    """Write the page: the query by its name and JPEG, empty where there is none, and its hits, nearest first.

    A hit shows the fields of `columns`, or has all its metadata under a heading to open.
    """
    asked = f"<figcaption><b>query</b>{_span(query)}</figcaption>"
    cards = [f'<li class="asked"><figure>{_image(picture, "the query")}{asked}</figure></li>']
    for rank, hit in enumerate(hits, start=1):
        image = _image(hit.thumbnail, f"hit {rank}: {hit.label or hit.key}")
        told = f"<b>{hit.score:.4f}</b>{_span(hit.label, 'label')}{_span(hit.key)}"
        if hit.uri not in ("", hit.key):
            told += _span(hit.uri)
        if columns:
            told += _fields({name: hit.metadata[name] for name in columns if name in hit.metadata})
        elif hit.metadata:
            told += f"<details><summary>metadata</summary>{_fields(hit.metadata)}</details>"
        cards.append(f"<li><figure>{image}<figcaption>{told}</figcaption></figure></li>")
    return _PAGE.substitute(
        policy=escape(POLICY),
        style=stylesheet(),
        title=_text(f"{query} in {gallery}"),
        about=_text(about),
        cards="\n".join(cards),
    )


def _text(value: str) -> str:
    """Write text that stays text, in attributes too."""
    return escape(printable(value if len(value) <= _MOST else f"{value[:_MOST]}…"))


def _span(text: str, kind: str = "") -> str:
    return f'<span class="{kind}">{_text(text)}</span>' if text else ""


def _image(jpeg: bytes, told: str) -> str:
    if not jpeg:
        return f'<div class="gone">no picture of {_text(told)}</div>'
    return f'<img src="data:image/jpeg;base64,{b64encode(jpeg).decode("ascii")}" alt="{_text(told)}"/>'


def _fields(metadata: Mapping[str, Any]) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in metadata.items()
    }
    return (
        f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{_text(told)}</dd>' for name, told in texts.items())}</dl>"
    )
