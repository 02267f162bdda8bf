"""Tiny data sets drawn on the spot: a class is a colour and a shape, an image adds noise and a shift.

And batches of histograms and embeddings, and a pool of threads that has none, so that what is decoded ahead
can be counted.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor


def draw_folder(
    root: Path, *, classes: int = 6, images: int = 6, size: int = 20, below: str = "", suffix: str = ".png"
) -> Path:
    """Write `classes` folders of `images` pictures each below `root / below`."""
    for number in range(classes):
        folder = root / below / f"class{number:02d}"
        folder.mkdir(parents=True)
        rng = np.random.default_rng(number)
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        for i in range(images):
            noise = rng.integers(0, 128, (size, size, 3), dtype=np.uint8)
            image = Image.fromarray(noise)
            x, y = rng.integers(0, size // 2, 2).tolist()
            draw = ImageDraw.Draw(image)
            shape = draw.ellipse if number % 2 else draw.rectangle
            shape((x, y, x + size // 2, y + size // 2), fill=colour)
            image.save(folder / f"{i}{suffix}")
    return root


def draw_batch(
    count: int, prototypes: int, dimension: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Histograms (B, m) that differ, and embeddings (B, d)."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(count, prototypes, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    return scores.softmax(dim=1).to(dtype), embeddings.to(dtype)


class NoThreads:
    """A ThreadPoolExecutor that does its work at once."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> "NoThreads":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done
