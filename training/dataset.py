"""Images of a data set as pixels: decoded once, kept while they fit, unreadable ones set aside and named."""

import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from serving.catalog import Row
from serving.errors import BadData, BadImage
from serving.model.preprocess import MAX_BYTES, open_rgb, preprocess
from serving.progress import progress
from training.augment import Augmentation
from training.recipe import Recipe

__all__ = ["Decoder", "Draws", "Pictures", "TrainingSet", "Unreadable", "training_decoder", "viewing_decoder"]

_log = logging.getLogger(__name__)

# file contents to uint8 (H, W, 3), else BadImage; picklable, since worker processes may be handed it
Decoder = Callable[[bytes], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An image that was left out."""

    key: str
    reason: str


class Pictures:
    """The readable ones of `rows`, their pixels and their classes.

    Every file is decoded once at the start, so that a bad one is known before training; pixels are kept up to
    `keep` bytes, and what does not fit is decoded again at each use.
    """

    def __init__(self, rows: Sequence[Row], decode: Decoder, *, keep: float = math.inf, label: str) -> None:
        self._decode = decode
        self._pixels: list[NDArray[np.uint8] | None] = []
        readable: list[Row] = []
        unreadable: list[Unreadable] = []
        threads = min(os.cpu_count() or 1, 8)
        with (
            ThreadPoolExecutor(threads) as pool,
            progress(tuple[int, ...](), label, total=len(rows), unit="image") as bar,
        ):
            for start in range(0, len(rows), 64):  # a bounded number of decoded images waits to be kept
                part = rows[start : start + 64]
                for row, found in zip(part, pool.map(self._try, part), strict=True):
                    if isinstance(found, Unreadable):
                        unreadable.append(found)
                        _log.warning("skipped %s: %s", found.key, found.reason)
                        continue
                    keep -= found.nbytes
                    readable.append(row)
                    self._pixels.append(found if keep >= 0 else None)
                bar.update(len(part))
        self.rows = tuple(readable)
        self.unreadable = tuple(unreadable)
        self.classes = tuple(sorted({row.label for row in rows}))
        number = {name: i for i, name in enumerate(self.classes)}
        self.labels = np.array([number[row.label] for row in readable], dtype=np.int64)  # (N,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Give the pixels of one image, uint8 (H, W, 3).

        Raises:
            BadData: If the file has become unreadable since the start.
        """
        pixels = self._pixels[index]
        if pixels is not None:
            return pixels
        found = self._try(self.rows[index])
        if isinstance(found, Unreadable):
            raise BadData(f"{self.rows[index].image} could be read before, but now cannot: {found.reason}")
        return found

    def check_classes(self) -> None:
        """Refuse a class without one readable image.

        Raises:
            BadData: Names the class.
        """
        counts = np.bincount(self.labels, minlength=len(self.classes))
        empty = [name for name, count in zip(self.classes, counts, strict=True) if count == 0]
        if empty:
            raise BadData(
                f"the class {empty[0]!r} has no readable image: repair its files or take it out"
                f" ({len(empty)} such classes, {len(self.unreadable)} unreadable images)"
            )

    def _try(self, row: Row) -> NDArray[np.uint8] | Unreadable:
        try:
            return self._decode(_read(row.image))
        except BadImage as error:
            return Unreadable(row.key, str(error))
        except OSError as error:
            return Unreadable(row.key, error.strerror or str(error))


class TrainingSet(Dataset[tuple[Tensor, int]]):
    """Augmented draws of `pictures`; asked for as (image number, number of the draw in the epoch)."""

    def __init__(self, pictures: Pictures, augmentation: Augmentation, *, seed: int, epoch: int) -> None:
        self._pictures = pictures
        self._augmentation = augmentation
        self._seed = seed
        self._epoch = epoch

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        """Give uint8 (S, S, 3) and the class number."""
        index, draw = item
        entropy = np.random.SeedSequence((self._seed, self._epoch, draw))
        view = self._augmentation(self._pictures[index], int(entropy.generate_state(1)[0]))
        return torch.from_numpy(view.copy()), int(self._pictures.labels[index])


class Draws(Sampler[list[tuple[int, int]]]):
    """Numbers the draws of a batch sampler, so that an image drawn twice in an epoch is augmented twice."""

    def __init__(self, batches: Sampler[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        draw = itertools.count()
        for batch in self._batches:
            yield [(index, next(draw)) for index in batch]

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def training_decoder(recipe: Recipe) -> Decoder:
    """Decode for augmentation: the whole image, its shorter side at most 2 S, so that crops stay sharp."""
    return functools.partial(
        _decode_whole, least=2 * recipe.image_size, resampling=Image.Resampling[recipe.resampling.upper()]
    )


def viewing_decoder(recipe: Recipe) -> Decoder:
    """Decode as the served model does."""
    return functools.partial(
        preprocess,
        size=recipe.image_size,
        crop_fraction=recipe.crop_fraction,
        resampling=recipe.resampling,
    )


def _decode_whole(data: bytes, *, least: int, resampling: Image.Resampling) -> NDArray[np.uint8]:
    """Decode and shrink to a shorter side of `least`, where it is longer; uint8 (H, W, 3)."""
    image = open_rgb(data, least=least)
    factor = least / min(image.size)
    if factor < 1:
        width, height = (max(1, round(side * factor)) for side in image.size)
        image = image.resize((width, height), resampling)
    return np.array(image)


def _read(path: Path) -> bytes:
    """Read a file, but no more than one byte past what `open_rgb` accepts."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
