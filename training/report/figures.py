"""Figures for the page: tables of numbers, and as data URIs plots in light and dark, thumbnails and maps."""

import base64
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from serving.catalog.catalog import Row
from serving.look import COLOURS, PROTOTYPES, prototype_colour
from training.data.pictures import Stream, viewing_decoder
from training.evaluation.metrics import FIGURE_NAMES, named_shares
from training.loop.logbook import History
from training.recipes.recipe import Recipe
from training.report.findings import Findings, class_histograms

__all__ = [
    "MARKS", "NUMBERED", "SPLITS", "bars", "clip", "jpeg", "line_chart", "map_colours", "map_picture",
    "percent", "scatter", "strongest", "tabulate_figures", "tabulate_histograms", "thumbnails",
]  # fmt: skip

SPLITS = {"test": "unseen classes (test)", "train": "training classes", "all": "all classes"}
MARKS = dict(zip("●■▲◆✚▼★✖", "os^DPv*X", strict=True))
"""Marks of the classes that a scatter tells apart, as the page's legend and as matplotlib has them."""
NUMBERED = 12
"""Widest map whose places are numbered, in places."""
_COUNTS, _CLASSES = ("images", "classes"), 40  # of a table of figures; most classes with a histogram
_LINES = ["-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1))]
_PALETTE = np.array([list(bytes.fromhex(colour[1:])) for colour in PROTOTYPES], dtype=np.uint8)  # (128, 3)
_BAR = 24
"""Height of a histogram's bar, in pixels."""
_MARKED = 30
"""Most points of a line that are marked each."""


def tabulate_figures(
    record: Mapping[str, Any],
    history: History,
    measured: Mapping[str, Any],
    untrained: Mapping[str, Any] | None,
    *,
    title: str,
) -> dict[str, dict[str, str]]:
    """Tabulate what was measured now (`title`), the run's record, and the start of training.

    Gives cells by column, by row; only columns of which any row holds a number.
    """
    found = {title: measured} | ({f"{title}: the untrained backbone": untrained} if untrained else {})
    for name, noted in record["metrics"].items():
        if isinstance(noted, dict):  # and not the number of the epoch
            told = f"{SPLITS.get(name, clip(name))}, as noted in the run"
            if name == "validation":
                told = "validation classes, of the epoch that is kept"
            found[told] = noted
            if "untrained" in noted:
                found[f"{told}: the untrained backbone"] = noted["untrained"]
    start = next((row for row in history if row["epoch"] == 0), {})
    if "map_at_r" in start:
        before = {"recall_at": {"1": start["recall_at_1"]}, "map_at_r": start["map_at_r"]}
        found["validation classes, before training"] = before
    cells = {
        name: {heading: percent(share) for heading, share in named_shares(each).items()}
        | {count: f"{each[count]:,}" for count in _COUNTS if count in each}
        for name, each in found.items()
    }
    held = set(chain.from_iterable(cells.values()))
    recalls = sorted((name for name in held if name.startswith("R@")), key=lambda name: int(name[2:]))
    columns = [*recalls, *(name for name in (*FIGURE_NAMES.values(), *_COUNTS) if name in held)]
    return {name: {column: each.get(column, "–") for column in columns} for name, each in cells.items()}


def tabulate_histograms(findings: Findings) -> dict[str, Any]:
    """Show the mean histogram of each class, or of classes evenly spaced by name."""
    means = class_histograms(findings.histograms, findings.labels, len(findings.classes))  # (C, m)
    classes, count = means.shape
    shown = np.unique(np.linspace(0, classes - 1, min(classes, _CLASSES)).round().astype(int)).tolist()
    largest = max(float(means[shown].max()), 1e-12)
    return {
        "count": count,
        "used": len(np.unique(means.argmax(axis=1))),
        "largest": largest,
        "colours": bars(np.ones(count)),
        "classes": classes,
        "lines": [
            {"name": findings.classes[place], "bars": bars(means[place] / largest),
             "strongest": strongest(means[place], 3)[0]}
            for place in shown
        ],
    }  # fmt: skip


def strongest(shares: NDArray[np.float64], most: int) -> tuple[list[tuple[str, str]], int]:
    """Give colour and words of the prototypes of the largest shares, (m,), and count the others above 0."""
    order = [place for place in np.argsort(-shares, kind="stable").tolist() if shares[place] > 0]
    told = [(prototype_colour(place), f"{place} ({percent(shares[place], 0)})") for place in order[:most]]
    return told, len(order[most:])


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]], *, unit: str) -> dict[str, str]:
    """Plot lines of (epoch, value) in one frame; a data URI by theme, as of `scatter`."""

    def draw(axes: Axes, _: Mapping[str, str]) -> None:
        for name, points in series.items():
            marker = "o" if len(points) <= _MARKED else ""
            axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=3.5)
        axes.set(xlabel="epoch", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=8)

    return _plot(draw, (4.2, 2.7), "svg")


def scatter(
    points: NDArray[np.float64], names: Sequence[str], shown: Sequence[str], *, axes: tuple[str, str]
) -> dict[str, str]:
    """Plot points (N, 2) on axes of one scale, those of `shown` classes each by a mark, the others grey."""
    of_class = np.array(names, dtype=object)

    def draw(area: Axes, colour: Mapping[str, str]) -> None:
        rest = points[~np.isin(of_class, shown)]
        area.scatter(rest[:, 0], rest[:, 1], s=6, c=colour["rest"], alpha=0.5, linewidths=0)
        edge: Any = {"edgecolors": colour["paper"], "linewidths": 0.4}
        for number, (name, mark) in enumerate(zip(shown, MARKS.values(), strict=False)):
            own = points[of_class == name]
            area.scatter(own[:, 0], own[:, 1], s=26, c=colour[f"s{number}"], marker=mark, **edge)
        area.set(xlabel=axes[0], ylabel=axes[1], aspect="equal", xticks=[], yticks=[])

    return _plot(draw, (6, 6), "png")


def bars(shares: NDArray[np.float64]) -> str:
    """Draw shares, (m,) in 0..1, as a bar each in the colour of its prototype, on nothing."""
    filled = np.arange(_BAR)[::-1, None] < (shares * _BAR).round()  # (_BAR, m)
    colours = np.broadcast_to(map_colours(np.arange(len(shares))), (*filled.shape, 3))
    return _encode(np.dstack((colours, np.where(filled, np.uint8(255), np.uint8(0)))), "PNG")


def thumbnails(rows: Sequence[Row], recipe: Recipe, *, side: int) -> dict[str, NDArray[np.uint8]]:
    """Give what the model sees of each image that can be read, uint8 (side, side, 3), by key."""
    shown = recipe.model_copy(update={"image_size": side, "resampling": "lanczos"})
    stream = Stream(rows, viewing_decoder(shown))
    pixels = list(stream)
    return {row.key: each for row, each in zip(stream.rows, pixels, strict=True)}


def map_picture(pixels: NDArray[np.uint8], found: NDArray[np.uint8]) -> str:
    """Show an image, uint8 (S, S, 3), beside itself under the dominant prototypes of its places, (h, w)."""
    side, (height, width) = len(pixels), found.shape
    tiles = Image.fromarray(map_colours(found)).resize((side, side), Image.Resampling.NEAREST)
    covered = Image.blend(Image.fromarray(pixels), tiles, 0.7)
    style: dict[str, Any] = {"anchor": "mm", "font_size": 8, "stroke_width": 1, "stroke_fill": "black"}
    if width <= NUMBERED:
        draw = ImageDraw.Draw(covered)
        for (y, x), prototype in np.ndenumerate(found):
            middle = (x + 0.5) * side / width, (y + 0.5) * side / height
            draw.text(middle, str(prototype), "white", **style)
    return jpeg(np.concatenate((pixels, np.full((side, 4, 3), 128, np.uint8), np.asarray(covered)), axis=1))


def map_colours(found: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Give the colours of prototypes, uint8 (..., 3)."""
    colours: NDArray[np.uint8] = _PALETTE[found % len(_PALETTE)]
    return colours


def jpeg(pixels: NDArray[np.uint8]) -> str:
    """Encode pixels, uint8 (H, W, 3)."""
    return _encode(pixels, "JPEG", quality=80, optimize=True)


def _encode(pixels: NDArray[np.uint8], kind: str, **options: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, kind, **options)
    return _data_uri(buffer, kind.lower())


def _data_uri(buffer: io.BytesIO, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _plot(
    draw: Callable[[Axes, Mapping[str, str]], None], inches: tuple[float, float], kind: str
) -> dict[str, str]:
    made = {}
    for theme, colour in COLOURS.items():
        style: Any = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), colour["soft"])
        style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), colour["paper"])
        style |= dict.fromkeys(("axes.edgecolor", "grid.color"), colour["line"])
        style |= {
            "axes.grid": True,
            "axes.prop_cycle": cycler(color=[colour[f"s{i}"] for i in range(6)], linestyle=_LINES),
            "text.color": colour["ink"],
            "text.parse_math": False,
            "font.size": 9,
            "svg.hashsalt": "crossbatch",
        }
        with mpl.rc_context(style), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a name of the history that the font lacks
            figure = Figure(inches, layout="constrained")
            draw(figure.subplots(), colour)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
        made[theme] = _data_uri(buffer, {"svg": "svg+xml"}.get(kind, kind))
    return made


def percent(share: float, digits: int = 2) -> str:
    """Write a share in 0..1 in percent."""
    return f"{100 * share:.{digits}f}\u00a0%"


def clip(text: str, most: int = 60) -> str:
    """Shorten a name; both its ends are told, since keys differ in their last characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1 - most // 2) :]}"
