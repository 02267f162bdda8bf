"""A drawn catalogue: made-up products composed of parts, for the demo, the docs and the tests.

A product is a shape, a texture, a colour and a badge in one of several places, numbered in random order, so
that a split by sorted class names leaves unseen classes which are new combinations of parts that were seen.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["Product", "draw_catalogue", "draw_product", "products"]

Grid = NDArray[np.float64]  # (S, S), or (S, S, 3) for colours in 0..1

# Shape: the boundary's radius at angle t (radians), about 1.
_SHAPES: dict[str, Callable[[Grid], Grid]] = {
    "disc": np.ones_like,
    "triangle": lambda t: _polygon(t, 3) * 1.25,
    "square": lambda t: _polygon(t, 4) * 1.15,
    "hexagon": lambda t: _polygon(t, 6) * 1.05,
    "star": lambda t: 0.55 + 0.6 * np.abs(((t * 5 / (2 * np.pi)) % 1) * 2 - 1),
    "flower": lambda t: 0.85 + 0.2 * np.cos(6 * t),
    "gear": lambda t: np.where(np.cos(9 * t) > 0, 1.05, 0.8),
    "cross": lambda t: 0.62 + 0.5 * np.abs(np.cos(2 * t)) ** 3,
}
# Texture: how much of the second colour (0..1) at body coordinates u, v in about -1..1.
_TEXTURES: dict[str, Callable[[Grid, Grid], Grid]] = {
    "plain": lambda u, v: np.zeros_like(u),
    "striped": lambda u, v: _wave(u * 2.0),
    "dotted": lambda u, v: _step(0.28 - np.hypot((u * 2.5) % 1 - 0.5, (v * 2.5) % 1 - 0.5)),
    "checked": lambda u, v: np.abs(_wave(u * 1.5) - _wave(v * 1.5)),
    "ringed": lambda u, v: _wave(np.hypot(u, v) * 2.2),
    "zigzag": lambda u, v: _wave(u * 2.5 + 0.8 * np.abs((v * 2.5) % 2 - 1)),
}
# Colour: body and texture in RGB, 0..1.
_COLOURS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "red": ((0.82, 0.16, 0.18), (0.97, 0.75, 0.66)),
    "orange": ((0.95, 0.52, 0.10), (0.45, 0.20, 0.05)),
    "yellow": ((0.94, 0.82, 0.20), (0.55, 0.42, 0.05)),
    "green": ((0.20, 0.58, 0.26), (0.75, 0.92, 0.60)),
    "teal": ((0.08, 0.55, 0.58), (0.02, 0.22, 0.28)),
    "blue": ((0.16, 0.32, 0.78), (0.68, 0.82, 0.98)),
    "violet": ((0.50, 0.22, 0.68), (0.88, 0.72, 0.95)),
    "grey": ((0.45, 0.46, 0.48), (0.85, 0.85, 0.86)),
}
# Placement: the badge's centre in body coordinates; None for a product without one.
_PLACEMENTS: dict[str, tuple[float, float] | None] = {
    "bare": None,
    "centre": (0.0, 0.0),
    "left": (-0.5, 0.0),
    "right": (0.5, 0.0),
    "top": (0.0, -0.5),
    "bottom": (0.0, 0.5),
}


class Product(NamedTuple):
    """One class of the catalogue: the names of its parts."""

    shape: str
    texture: str
    colour: str
    placement: str


def products(count: int, *, seed: int = 0) -> list[Product]:
    """Draw `count` different products at random, from the 2304 that the parts allow."""
    combinations = [Product(*parts) for parts in itertools.product(_SHAPES, _TEXTURES, _COLOURS, _PLACEMENTS)]
    chosen = np.random.default_rng(seed).permutation(len(combinations))[:count]
    return [combinations[i] for i in chosen]


def draw_product(product: Product, rng: np.random.Generator, *, size: int = 64) -> Image.Image:
    """Photograph a product once, `size` pixels square: random scale, angle, place, light and background."""
    y, x = np.mgrid[0:size, 0:size] * (2 / (size - 1)) - 1.0
    scene = _background(x, y, rng)
    angle, scale = rng.uniform(-0.6, 0.6), rng.uniform(0.6, 0.9)
    dx, dy = rng.uniform(-0.15, 0.15, size=2)
    u = (np.cos(angle) * (x - dx) + np.sin(angle) * (y - dy)) / scale
    v = (np.cos(angle) * (y - dy) - np.sin(angle) * (x - dx)) / scale
    inside = _step(_SHAPES[product.shape](np.arctan2(v, u)) - np.hypot(u, v), size * scale / 2)
    first, second = (np.array(colour) for colour in _COLOURS[product.colour])
    body = _mix(np.broadcast_to(first, scene.shape), second, _TEXTURES[product.texture](u, v))
    place = _PLACEMENTS[product.placement]
    if place is not None:
        distance = np.hypot(u - place[0], v - place[1])
        body = _mix(body, np.array([0.98, 0.98, 0.95]), _step(0.3 - distance, size * scale / 2))
        body = _mix(body, np.array([0.08, 0.08, 0.10]), _step(0.16 - distance, size * scale / 2))
    light = rng.uniform(0.65, 1.2) + rng.uniform(-0.25, 0.25) * x + rng.uniform(-0.25, 0.25) * y
    tint = rng.uniform(0.88, 1.12, size=3)
    picture = _mix(scene, body, inside) * light[..., None] * tint + rng.normal(0, 0.02, size=scene.shape)
    return Image.fromarray((np.clip(picture, 0, 1) * 255).round().astype(np.uint8), "RGB")


def draw_catalogue(
    root: Path, *, classes: int = 200, images: int = 24, size: int = 64, seed: int = 0
) -> list[Product]:
    """Draw pictures of products as `root/<number-and-parts>/<number>.jpg`, and give the products in order."""
    chosen = products(classes, seed=seed)
    for number, product in enumerate(chosen):
        folder = root / f"{number:04d}-{'-'.join(product)}"
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([seed, number])
        for i in range(images):
            draw_product(product, rng, size=size).save(folder / f"{i:03d}.jpg", quality=92)
    return chosen


def _background(x: Grid, y: Grid, rng: np.random.Generator) -> Grid:
    """Two muted colours (S, S, 3) in a slanted gradient, with a few blobs to draw the eye away."""
    one, two = rng.uniform(0.15, 0.9, size=(2, 3))
    slant = rng.uniform(0, 2 * np.pi)
    scene = _mix(np.broadcast_to(one, (*x.shape, 3)), two, (np.cos(slant) * x + np.sin(slant) * y + 1.5) / 3)
    for _ in range(rng.integers(1, 5)):
        cx, cy, radius = *rng.uniform(-1, 1, size=2), rng.uniform(0.1, 0.35)
        blob = _step(radius - np.hypot(x - cx, y - cy), x.shape[0] / 4)
        scene = _mix(scene, rng.uniform(0.05, 0.95, size=3), 0.7 * blob)
    return scene


def _mix(below: Grid, above: Grid, share: Grid) -> Grid:
    return below + (above - below) * share[..., None]


def _polygon(t: Grid, sides: int) -> Grid:
    """Boundary of a regular polygon whose corners lie on the unit circle."""
    turn = 2 * np.pi / sides
    radius: Grid = np.cos(turn / 2) / np.cos(t % turn - turn / 2)
    return radius


def _step(depth: Grid, sharpness: float = 12.0) -> Grid:
    """0 outside (depth < 0), 1 inside, with an edge about one pixel wide."""
    return np.clip(0.5 + depth * sharpness, 0, 1)


def _wave(phase: Grid) -> Grid:
    """Bands of equal width, 0 and 1 in turn, a pair for each unit of `phase`."""
    return _step(np.sin(2 * np.pi * phase), 2.0)
