"""The second figure of the paper: `python benchmarks/two_arms.py WITHOUT WITH --out docs/figures/NAME.svg`.

Takes two run folders, of a training without XML whose prototypes are learnt by reconstruction, and of one
with it. Draws the mean histogram of each unseen class, and the map of the dominant prototypes over a few
images, for both; beside the SVG goes a CSV with MAP@R, R@1, MAP_c and MAP_x, a run a row. Pictures are held
by the figure, so that only those of sets whose licence allows it may be shown: `--credit` names it.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.svg import GREY, INK, Markup, element, text, write_svg
from serving.catalog.catalog import Row, select
from serving.errors import BadSetting
from training.data.partition import read_own
from training.evaluation.fitted import fitted_figures
from training.loop.run import load_run
from training.report.figures import jpeg, map_colours, thumbnails
from training.report.findings import class_histograms, embed_split, find_assignments

__all__ = ["Arm", "look", "main"]

FIGURES = ("map_at_r", "recall_at_1", "map_c", "map_x", "halvings", "distinct")
_PANEL, _LEFT, _GAP, _TOP, _HEAT = 430, 46, 26, 66, 300
_LEVELS = 24
_PICTURE, _SIDE = 160, 100.0
"""Side of a picture, in pixels of its own and in a drawing before it is scaled."""
_DARK = (8, 48, 107)
"""The colour of the largest share; none is white."""


@dataclass(frozen=True)
class Arm:
    """A run as the figure shows it."""

    name: str
    seed: int
    figures: dict[str, Any]
    """`FIGURES`, shares in 0..1."""
    means: NDArray[np.float64]
    """Mean histogram of each class, (C, m)."""
    classes: tuple[str, ...]
    mapped: tuple[Row, ...]
    assignments: NDArray[np.uint8]
    """Dominant prototype of each place of the mapped images, (k, h, w)."""
    pictures: dict[str, str]
    """Data URIs by key."""


def look(name: str, folder: Path, *, data: Path | None, halvings: int, images: int) -> Arm:
    """Embed a run's unseen classes and measure what its prototypes are worth.

    Args:
        name: Of the arm.
        folder: The run.
        data: The images; the run's own when None.
        halvings: Random halvings of the classes for MAP_x.
        images: How many are mapped, of classes evenly spaced by name.

    Raises:
        BadSetting: If nothing trained the prototypes.
    """
    run = load_run(folder)
    if not run.recipe.learns_prototypes:
        raise BadSetting(
            f"nothing trained the prototypes of {folder}, and MAP_c and MAP_x of random ones compare nothing:"
            " train it with reconstruction_weight above 0"
        )
    rows = select(read_own(run.record, data=data), "test", run.recipe.split)
    found = embed_split(rows, run.embedder, run.recipe, batch=64)
    measured = found.measure()
    fitted = fitted_figures(found.histograms, found.embeddings, found.labels, draws=halvings)
    firsts = np.unique(found.labels, return_index=True)[1]  # an image of each class
    chosen = firsts[(np.arange(images) * len(firsts)) // max(images, 1)].tolist()
    mapped, assignments = find_assignments([found.rows[i] for i in chosen], run.embedder, run.recipe)
    return Arm(
        name=name,
        seed=run.recipe.seed,
        figures={"map_at_r": measured["map_at_r"], "recall_at_1": measured["recall_at"]["1"], **fitted},
        means=class_histograms(found.histograms, found.labels, len(found.classes)),
        classes=found.classes,
        mapped=mapped,
        assignments=assignments,
        pictures={key: jpeg(pixels) for key, pixels in thumbnails(mapped, run.recipe, side=_PICTURE).items()},
    )


def _arm(arm: Arm, left: float, largest: float) -> Iterator[Markup]:
    """Draw one arm: its figures, its histograms, its maps."""
    middle = left + _PANEL / 2
    yield text(arm.name, middle, 26, size=15, anchor="middle", weight="600")
    told = {"MAP@R": "map_at_r", "MAP_c": "map_c", "MAP_x": "map_x"}
    shares = "\u2003".join(f"{title} {100 * arm.figures[key]:.1f}" for title, key in told.items())
    yield text(shares, middle, 49, size=13, anchor="middle")
    yield from _heat(arm.means, left, largest)
    top = _TOP + _HEAT + 36
    count = max(len(arm.mapped), 1)
    side = (_PANEL - (count - 1) * 8) / count
    for i, (row, found) in enumerate(zip(arm.mapped, arm.assignments, strict=True)):
        x = left + i * (side + 8)
        anchor = f"image-{left:.0f}-{i}"  # shown twice, but held once: a data URI is long
        image = element("image", id=anchor, href=arm.pictures.get(row.key), width=_SIDE, height=_SIDE)
        frame = element("rect", width=_SIDE, height=_SIDE, fill="none", stroke="#bbb")
        again = element("use", href=f"#{anchor}")
        numbers = element("g", *_tiles(found), font_size=6, text_anchor="middle", fill=INK)
        scale = f"scale({side / _SIDE:.4f})"
        yield element("g", image, frame, transform=f"translate({x:.2f} {top}) {scale}")
        yield element(
            "g", again, numbers, frame, transform=f"translate({x:.2f} {top + side + 8:.2f}) {scale}"
        )


def _tiles(found: NDArray[np.uint8]) -> Iterator[Markup]:
    """Colour the places of a map, (h, w), over a square, and number them where it is not too wide."""
    tall, wide = _SIDE / found.shape[0], _SIDE / found.shape[1]
    colours = map_colours(found)
    for (y, x), prototype in np.ndenumerate(found):
        fill = f"#{bytes(colours[y, x]).hex()}"
        yield element("rect", x=x * wide, y=y * tall, width=wide, height=tall, fill=fill, fill_opacity=0.55)
        if found.shape[1] <= 12:
            yield element("text", str(prototype), x=(x + 0.5) * wide, y=(y + 0.5) * tall + 1.8)


def _heat(means: NDArray[np.float64], left: float, largest: float) -> Iterator[Markup]:
    """Draw shares, (C, m), as a map of shades; prototypes stand by the class that they are strongest in."""
    classes, count = means.shape
    order = np.lexsort((-means.max(axis=0), means.argmax(axis=0)))
    levels = np.round(means[:, order] / largest * _LEVELS).astype(int)
    paths = []
    for level in range(1, _LEVELS + 1):
        places = np.argwhere(levels == level).tolist()
        if places:
            squares = "".join(f"M{column} {row}h1v1h-1z" for row, column in places)
            paths.append(element("path", d=squares, fill=_shade(level / _LEVELS)))
    scale = f"scale({_PANEL / count:.5f} {_HEAT / classes:.5f})"
    yield element("g", *paths, transform=f"translate({left:g} {_TOP}) {scale}", shape_rendering="crispEdges")
    yield element("rect", x=left, y=_TOP, width=_PANEL, height=_HEAT, fill="none", stroke="#bbb")
    yield text(
        f"{count} prototypes, by the class that they are strongest in",
        left + _PANEL / 2,
        _TOP + _HEAT + 20,
        anchor="middle",
    )


def _shade(share: float) -> str:
    return "#" + "".join(f"{round(255 + (dark - 255) * share**0.7):02x}" for dark in _DARK)


def _scale(largest: float, left: float, top: float) -> Iterator[Markup]:
    """Explain the shades."""
    yield text("mean share of a class:", left - 8, top + 10, anchor="end")
    for level in range(_LEVELS + 1):
        yield element(
            "rect", x=left + 26 + 5 * level, y=top, width=5, height=12, fill=_shade(level / _LEVELS)
        )
    yield element("rect", x=left + 26, y=top, width=5 * (_LEVELS + 1), height=12, fill="none", stroke="#bbb")
    yield text("0", left + 18, top + 10, anchor="end")
    yield text(f"{largest:.0%}", left + 34 + 5 * (_LEVELS + 1), top + 10)


def draw(path: Path, arms: Sequence[Arm], *, credit: str) -> None:
    """Write the figure."""
    largest = max(float(arm.means.max()) for arm in arms)  # one scale for both
    width = _LEFT + len(arms) * _PANEL + (len(arms) - 1) * _GAP + 16
    shown = max(len(arm.mapped) for arm in arms)
    bottom: float = _TOP + _HEAT + 36
    if shown:
        bottom += 2 * (_PANEL - (shown - 1) * 8) / shown + 8 + 16
    parts = [part for i, arm in enumerate(arms) for part in _arm(arm, _LEFT + i * (_PANEL + _GAP), largest)]
    classes = f"{len(arms[0].classes)} unseen classes"
    parts.append(text(classes, _LEFT - 14, _TOP + _HEAT / 2, anchor="middle", turned=True))
    if shown:
        side = (_PANEL - (shown - 1) * 8) / shown
        top = _TOP + _HEAT + 36
        parts.append(text("image", _LEFT - 14, top + side / 2, anchor="middle", turned=True))
        words = "map"
        parts.append(text(words, _LEFT - 14, top + 1.5 * side + 8, anchor="middle", turned=True))
    parts += _scale(largest, width - 230, bottom)
    if credit:
        parts.append(text(credit, _LEFT, bottom + 10, size=11, fill=GREY))
    label = " ".join(
        f"{arm.name}: MAP@R {arm.figures['map_at_r']:.1%}, MAP_c {arm.figures['map_c']:.1%},"
        f" MAP_x {arm.figures['map_x']:.1%}."
        for arm in arms
    )
    told = f"Mean histograms of {len(arms[0].classes)} unseen classes over prototypes. {label}"
    write_svg(path, *parts, width=width, height=bottom + 28, label=told)


def main(words: Sequence[str] | None = None) -> None:
    """Look at both runs, and write the figure and its numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("without", type=Path, help="run folder of the training without XML")
    parser.add_argument("with_xml", type=Path, metavar="with", help="run folder of the training with it")
    parser.add_argument("--data", type=Path, help="the images; the runs' own when not given")
    parser.add_argument("--out", type=Path, required=True, help="the .svg; the .csv lies beside it")
    parser.add_argument("--halvings", type=int, default=1000)
    parser.add_argument("--images", type=int, default=0, help="how many images are mapped")
    parser.add_argument("--credit", default="", help="whose the images are, and their licence")
    parser.add_argument("--names", nargs=2, default=("without XML", "with XML"))
    options = parser.parse_args(words)
    if options.images and not options.credit:
        parser.error("--images shows pictures: name whose they are, and their licence, by --credit")
    folders = (options.without, options.with_xml)
    arms = [
        look(name, folder, data=options.data, halvings=options.halvings, images=options.images)
        for name, folder in zip(options.names, folders, strict=True)
    ]
    with options.out.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arm", "seed", *FIGURES))
        for arm in arms:
            writer.writerow((arm.name, arm.seed, *(_told(arm.figures[key]) for key in FIGURES)))
    draw(options.out, arms, credit=options.credit)


def _told(value: float) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
