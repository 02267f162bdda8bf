"""Tiny data sets drawn on the spot, a training of seconds, how to cut it, and whether two are the same.

In a drawn data set a class is a colour and a shape, and an image adds noise and a shift.
"""

import csv
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import training.loop.fit
from training.loop.checkpoint import load_checkpoint

Train = Callable[..., dict[str, Any]]
"""Trains the small recipe into a folder, with settings changed, on the drawn images or others."""

SMALL = """
image_size: 16
dimension: 8
prototypes: 4
classes_per_batch: 3
images_per_class: 2
epochs: 3
split_train: 5
validation: 0.4
ema_decay: 0.9
crop_scale: 0.5
flip: 0.5
clip_norm: 5
threads: 1
"""
TINY = ("epochs=1", "classes_per_batch=2", "split_train=0.5", "validation=0", "ema_decay=0")
"""What makes the small recipe one epoch on half of the classes."""


@contextmanager
def cut_at(step: int) -> Iterator[None]:
    """Interrupt a training at that step, counted from 0."""

    def check(*_: object, **told: int) -> None:
        if told["step"] == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.loop.fit, "_check_finite", check)
        with pytest.raises(KeyboardInterrupt):
            yield


def equal_runs(first: Path, second: Path) -> None:
    """Compare the checkpoints of two runs, bit by bit."""
    for name in ("best.safetensors", "last.safetensors"):
        (ours, state), (theirs, told) = load_checkpoint(first / name), load_checkpoint(second / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
        for row in (*state.get("history", ()), *told.get("history", ())):
            for name in ("seconds", "waited"):  # of the wall clock
                row.pop(name, None)
        assert state == told


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


class NoThreads(ThreadPoolExecutor):
    """Does its work at once, so that what is decoded ahead can be counted."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
