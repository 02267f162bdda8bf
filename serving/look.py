"""How all pages look: colours by theme, a colour for each prototype, and text that is safe to show."""

import re
from pathlib import Path

__all__ = ["COLOURS", "POLICY", "PROTOTYPES", "palette", "printable", "prototype_colour", "stylesheet"]

COLOURS = {
    "light": {
        "ink": "#1a1d21", "soft": "#565d66", "paper": "#ffffff", "panel": "#f4f5f7", "line": "#d5d9de",
        "right": "#0b6e4f", "wrong": "#b3261e", "rest": "#868d96",
        "s0": "#1f5fbf", "s1": "#b3500b", "s2": "#0b7a5b", "s3": "#a3307f",
        "s4": "#6a4fc4", "s5": "#7a6000", "s6": "#c2273d", "s7": "#00738c",
    },
    "dark": {
        "ink": "#e8eaed", "soft": "#abb2bc", "paper": "#14171b", "panel": "#1e2227", "line": "#3a4048",
        "right": "#5fd3a4", "wrong": "#ff8a80", "rest": "#747b85",
        "s0": "#8ab4f8", "s1": "#ffb074", "s2": "#5fd3a4", "s3": "#f59bd3",
        "s4": "#b9a6ff", "s5": "#dcc04a", "s6": "#ff9b9b", "s7": "#64cfe8",
    },
}  # fmt: skip
"""Of pages and plots, by theme; each s is a line or a class."""

_TABLE = """
0069d2 f0e169 c30f00 5ac3f0 b4a500 870f69 966987 2dffe1 ff87a5 8787ff 3c3ca5 c3694b d2c31e 874b5a 5a00ff
8778c3 96e1a5 3cb478 960000 695aa5 a596d2 a55a5a 4be1e1 6900d2 ff3cff a52d87 78c369 5a9678 a53cff 692d87
ff1e0f d278a5 a5d278 783c3c b42dc3 69870f b4f0a5 c3a5d2 b469a5 695a2d 3cff00 ff96ff c369e1 006987 1ec396
f0c3ff 9687c3 1e964b 5a4ba5 f0b4c3 960f5a ff5a69 0096e1 b4e187 3c4be1 78693c 69a55a 96f0c3 d2d24b 7869a5
b4001e b4962d 87d296 7869e1 b42d69 d26987 c3b400 4ba5ff 2d5a87 d25a1e e1a55a 78ff87 a50078 ff5ab4 d2003c
5a00c3 c3c35a 78d2c3 d22d78 9669d2 e1874b f0d269 e12d69 782dc3 f09687 a5a5e1 c36996 695ac3 783c78 5af0e1
3c96b4 3c1ee1 872d69 b4b4ff a55ab4 ff7896 780f96 2d5a1e 876996 f0a5b4 4b69f0 a5004b 694b96 1ed2e1 7887d2
964b4b 693c96 c3783c ff0fc3 a5000f 780fb4 3c7878 e15af0 d2a5c3 873cb4 879669 a5e100 d287f0 785a96 ffc3b4
5aa596 00692d a53cd2 f078ff 87e1d2 c31e78 782dff d29678
"""
PROTOTYPES = tuple(f"#{colour}" for colour in _TABLE.split())
"""Colours of prototypes: number i has PROTOTYPES[i % 128], whatever others are shown.

Each is, of a grid of sRGB with a lightness of 0.42 to 0.9 and a chroma above 0.06 in OKLab, the one farthest
from all before it and at least 0.12 from the three before, where the distance is the least of what eyes with
and without each of the three cones see (Machado et al. 2009). So any of the first eight tell apart (0.12),
and of all 128 no two are alike (0.02), though nobody tells so many apart: a number stands beside them.
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy of a page that is one file: it runs no script and asks for nothing."""

# Control characters, which HTML does not allow even when they are escaped, and those that turn text around.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def prototype_colour(number: int) -> str:
    """Give the colour of a prototype, as `#rrggbb`."""
    return PROTOTYPES[number % len(PROTOTYPES)]


def printable(text: str) -> str:
    """Put U+FFFD for each character that a page must not hold, and hex for half a surrogate pair.

    What it gives is text, to be escaped yet.
    """
    return _UNPRINTABLE.sub("\ufffd", text).encode("utf-8", "backslashreplace").decode("utf-8")


def palette(*, prototypes: bool = False) -> str:
    """Give the colours as variables of CSS (`--ink`), and those of prototypes if wanted (`--p0`)."""
    of_prototypes = {f"p{number}": colour for number, colour in enumerate(PROTOTYPES)} if prototypes else {}
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in colours.items())
        for colours in (COLOURS["light"] | of_prototypes, COLOURS["dark"])
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )


def stylesheet() -> str:
    """Give the style that pages of one file share, with the palette."""
    return palette() + Path(__file__).with_name("look.css").read_text(encoding="utf-8")
