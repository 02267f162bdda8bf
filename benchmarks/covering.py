"""The first figure of the paper, on drawn points: `python benchmarks/covering.py [--out docs/figures]`.

Local features of an image are points of a plane, and prototypes are fitted to the points of many images. The
nearest prototypes, weighted by their shares of the features, rebuild the mean of these to within the covering
radius δ (Lemma 1). Writes covering.svg, and covering.csv with δ and the discrepancy for other images and
numbers of prototypes.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.svg import BLUE, GREEN, GREY, VERMILION, Markup, element, text, write_svg
from training.method.histogram import assign, covering_radius, exact_histogram

__all__ = ["Cover", "cover", "main"]

Points = NDArray[np.float64]  # (n, 2)

ROOT = Path(__file__).resolve().parent.parent
COUNTS = (2, 4, 8, 16, 32)
SHOWN = (4, 8, 16)
SEEDS = 20
_SEED = 1
_LOCATIONS = 49
_SIDE, _GAP, _TOP, _BOTTOM = 276, 14, 64, 70
_REACH = 3.6
"""Half the width of the plane that a panel shows."""


@dataclass(frozen=True)
class Cover:
    """An image's n local features and m prototypes that cover them."""

    locations: Points
    prototypes: Points
    chosen: NDArray[np.int64]
    """Nearest prototype of each feature, (n,)."""
    pooled: Points
    """y, the mean of the features (GAP), (2,)."""
    rebuilt: Points
    """Σ z_i ν_i, (2,)."""
    radius: float
    """δ, the largest distance of a feature from its prototype."""

    @property
    def discrepancy(self) -> float:
        """‖Σ z_i ν_i − y‖."""
        return float(np.linalg.norm(self.rebuilt - self.pooled))


def cover(count: int, *, seed: int) -> Cover:
    """Draw an image, and fit prototypes to many others like it.

    Args:
        count: m.
        seed: Of all that is drawn.
    """
    rng = np.random.default_rng(seed)
    parts = rng.uniform(-2.1, 2.1, (6, 2))  # what images are made of: centres of clusters
    pool = _features(rng, parts, 600, shares=np.full(6, 1 / 6))
    locations = _features(rng, parts, _LOCATIONS, shares=rng.dirichlet(np.full(6, 2.0)))
    prototypes = _fitted(pool, count)
    x, v = torch.from_numpy(locations)[None], torch.from_numpy(prototypes)
    return Cover(
        locations=locations,
        prototypes=prototypes,
        chosen=assign(x, v)[0].numpy(),
        pooled=locations.mean(axis=0),
        rebuilt=(exact_histogram(x, v) @ v)[0].numpy(),
        radius=float(covering_radius(x, v)),
    )


def _features(rng: np.random.Generator, parts: Points, count: int, *, shares: Points) -> Points:
    places = rng.choice(len(parts), count, p=shares)
    return parts[places] + rng.normal(scale=0.38, size=(count, 2))


def _fitted(pool: Points, count: int) -> Points:
    """Fit prototypes: greedy k-centre, then twenty rounds of k-means."""
    chosen = [pool[0]]
    while len(chosen) < count:
        distances = np.linalg.norm(pool[:, None] - np.array(chosen), axis=2).min(axis=1)
        chosen.append(pool[distances.argmax()])
    found = np.array(chosen)
    for _ in range(20):
        nearest = np.linalg.norm(pool[:, None] - found, axis=2).argmin(axis=1)
        found = np.array(
            [pool[nearest == i].mean(axis=0) if (nearest == i).any() else found[i] for i in range(count)]
        )
    return found


def _panel(found: Cover, left: float) -> Iterator[Markup]:
    """Draw a cover, with its figures above it."""
    middle = left + _SIDE / 2
    yield text(f"m = {len(found.prototypes)} prototypes", middle, 26, size=15, anchor="middle", weight="600")
    told = f"δ = {found.radius:.2f},  discrepancy {found.discrepancy:.2f}"
    yield text(told, middle, 48, size=13, anchor="middle")
    scale = _SIDE / (2 * _REACH)
    frame = f"panel-{len(found.prototypes)}"
    square = element("rect", x=left, y=_TOP, width=_SIDE, height=_SIDE)
    yield element("clipPath", square, id=frame)

    def place(point: Points) -> tuple[float, float]:
        x, y = (point * (1, -1) * scale + _SIDE / 2).tolist()
        return left + x, _TOP + y

    used = set(found.chosen.tolist())
    inside = [_disc(place(found.prototypes[i]), found.radius * scale, BLUE, fill_opacity=0.07,
                    stroke=BLUE, stroke_opacity=0.55) for i in sorted(used)]  # fmt: skip
    for point, i in zip(found.locations, found.chosen.tolist(), strict=True):
        (x1, y1), (x2, y2) = place(point), place(found.prototypes[i])
        inside.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=GREY, stroke_width=0.6))
    inside += [_disc(place(point), 2.4, "#666") for point in found.locations]
    inside += [_prototype(place(point), i in used) for i, point in enumerate(found.prototypes)]
    inside += [_rebuilt(place(found.rebuilt)), _pooled(place(found.pooled))]
    yield element("g", *inside, clip_path=f"url(#{frame})")
    yield element("rect", x=left, y=_TOP, width=_SIDE, height=_SIDE, fill="none", stroke="#bbb")


def _disc(place: tuple[float, float], radius: float, fill: str, **more: str | float) -> Markup:
    return element("circle", cx=place[0], cy=place[1], r=radius, fill=fill, **more)


def _prototype(place: tuple[float, float], used: bool) -> Markup:
    x, y = place
    return element(
        "rect", x=x - 5, y=y - 5, width=10, height=10, rx=1.5,
        fill=BLUE if used else "#fff", stroke="#fff" if used else BLUE, stroke_width=1.4,
    )  # fmt: skip


def _pooled(place: tuple[float, float]) -> Markup:
    return _disc(place, 9, "none", stroke=VERMILION, stroke_width=3)


def _rebuilt(place: tuple[float, float]) -> Markup:
    x, y = place
    return element(
        "path", d=f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z", fill=GREEN, stroke="#fff", stroke_width=1
    )


def _legend(width: float) -> Iterator[Markup]:
    """Explain the marks, in two rows of three."""
    top = _TOP + _SIDE + 26
    entries: list[tuple[Callable[[tuple[float, float]], Markup], str]] = [
        (lambda at: _disc(at, 2.4, "#666"), "local feature, with its nearest prototype"),
        (lambda at: _prototype(at, True), "prototype that features are nearest to"),
        (lambda at: _disc(at, 8, BLUE, fill_opacity=0.07, stroke=BLUE), "what lies within δ of it"),
        (_pooled, "mean of the local features (GAP), y"),
        (_rebuilt, "combination of prototypes, Σ z ν"),
        (lambda at: _prototype(at, False), "prototype that none is nearest to"),
    ]
    for i, (mark, words) in enumerate(entries):
        x, y = 24 + (i % 3) * width / 3, top + (i // 3) * 24
        yield mark((x, y))
        yield text(words, x + 16, y + 4.5, size=12.5)


def main(words: Sequence[str] | None = None) -> None:
    """Write the figure and its numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures")
    out = parser.parse_args(words).out
    with (out / "covering.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("m", "seed", "radius", "discrepancy"))
        for count in COUNTS:
            for seed in range(SEEDS):
                found = cover(count, seed=seed)
                writer.writerow((count, seed, f"{found.radius:.4f}", f"{found.discrepancy:.4f}"))
    shown = [cover(count, seed=_SEED) for count in SHOWN]
    width = len(SHOWN) * (_SIDE + _GAP) + _GAP
    panels = [part for i, found in enumerate(shown) for part in _panel(found, _GAP + i * (_SIDE + _GAP))]
    write_svg(
        out / "covering.svg",
        *panels,
        *_legend(width),
        width=width,
        height=_TOP + _SIDE + _BOTTOM,
        label="Local features of an image and prototypes that cover them. "
        + " ".join(
            f"{len(found.prototypes)} prototypes: radius {found.radius:.2f}, the mean rebuilt to within"
            f" {found.discrepancy:.2f}."
            for found in shown
        ),
    )


if __name__ == "__main__":
    main()
