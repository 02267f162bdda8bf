"""The look of pages: colours of prototypes that eyes of all kinds tell apart, and text that may be shown."""

import html
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.look import COLOURS, PROTOTYPES, palette, printable, prototype_colour, stylesheet

STATIC = Path(__file__).resolve().parents[2] / "serving/web/static"
# How eyes without one kind of cone see linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
EYES: dict[str, Any] = {
    "normal": np.eye(3),
    "protanope": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranope": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881],
    ],
    "tritanope": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039],
    ],
}  # fmt: skip
_TO_CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.6806995, 0.10739696],
    [0.08830246, 0.28171884, 0.6299787],
]
_TO_LAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.9779985, -2.4285922, 0.4505937],
    [0.02590404, 0.78277177, -0.80867577],
]


def oklab(colours: tuple[str, ...], eyes: str) -> np.ndarray:
    """Ottosson's OKLab of sRGB colours as such eyes see them, (N, 3)."""
    channels = np.array([list(bytes.fromhex(colour[1:])) for colour in colours]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.transpose(EYES[eyes]), 0, 1)
    found: np.ndarray = np.cbrt(seen @ np.transpose(_TO_CONES)) @ np.transpose(_TO_LAB)
    return found


@pytest.mark.parametrize("eyes", EYES)
def test_prototypes_are_told_apart_by_eyes_of_all_kinds(eyes: str) -> None:
    lab = oklab(PROTOTYPES, eyes)
    apart = np.linalg.norm(lab[:, None] - lab, axis=2) + np.eye(128)
    assert lab.shape == (128, 3)
    for first, least in ((8, 0.12), (16, 0.08), (32, 0.045), (128, 0.02)):
        assert apart[:first, :first].min() >= least
    for step in (1, 2, 3):
        assert np.diagonal(apart, step).min() >= 0.12


def test_a_prototype_keeps_its_colour() -> None:
    assert [prototype_colour(number) for number in (0, 1, 127, 128)] == [
        "#0069d2",
        "#f0e169",
        "#d29678",
        "#0069d2",
    ]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in PROTOTYPES)


def test_the_page_that_a_server_shows_has_its_colours_from_here() -> None:
    given = palette(prototypes=True)
    assert [f"--p{number}: {colour};" in given for number, colour in enumerate(PROTOTYPES)] == [True] * 128
    style = (STATIC / "style.css").read_text()
    own = {*re.findall(r"--([\w-]+):", style)}
    assert {*re.findall(r"var\(--([\w-]+)\)", style)} <= own | COLOURS["light"].keys() | {"twin"}
    assert not own & COLOURS["light"].keys()


def test_the_style_has_all_colours_of_both_themes_and_asks_for_nothing() -> None:
    style = stylesheet()
    light, dark = style.split("prefers-color-scheme: dark")
    for name in COLOURS["light"].keys() | COLOURS["dark"].keys():
        assert f"--{name}: {COLOURS['light'][name]};" in light
        assert f"--{name}: {COLOURS['dark'][name]};" in dark
    assert set(re.findall(r"var\(--(\w+)\)", style)) <= COLOURS["light"].keys()
    assert not re.search(r"url\(|@import|</", style)


@given(st.text(st.characters(), max_size=30))
def test_any_text_may_be_shown(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert not {unicodedata.bidirectional(each) for each in shown} & {
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    }
    assert not [each for each in shown if unicodedata.category(each) == "Cc" and each not in "\t\n\r"]
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_what_may_not_be_shown_leaves_a_trace() -> None:
    assert printable("a\0b\u202egpj.exe\ud83d") == "a\ufffdb\ufffdgpj.exe\\ud83d"
    assert printable("<b>é 日本 \U0001f600 שלום") == "<b>é 日本 \U0001f600 שלום"
    assert html.unescape(html.escape(printable("\x85&#0;"))) == "\ufffd&#0;"
