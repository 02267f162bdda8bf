"""Images of a data set as pixels: a bounded number at a time, unreadable ones set aside and named."""

import copy
import functools
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.catalog.catalog import Row
from serving.errors import BadData, BadImage
from serving.model.preprocess import open_rgb, preprocess
from serving.progress import progress
from training.recipes.recipe import Recipe

if TYPE_CHECKING:
    from training.data.feature_cache import FeatureSet

__all__ = [
    "Decoder", "Embed", "Pictures", "QuarterTurns", "Stream", "Unreadable", "check_classes", "check_pairs",
    "class_numbers", "embed_pictures", "first_of", "read_pictures", "tell_unreadable", "training_decoder",
    "viewing_decoder",
]  # fmt: skip

_AHEAD = 64  # most decoded images that wait to be used
_LONGEST = 16  # a training image is at most so many times longer than wide; its ends are left out
_TOLD = 10  # most unreadable images that are told by name

# file contents to uint8 (H, W, 3), else BadImage; picklable, since worker processes may be handed it
Decoder = Callable[[bytes], NDArray[np.uint8]]
Embed = Callable[[NDArray[Any]], NDArray[np.float32]]


class Unreadable(NamedTuple):
    """An image that was left out."""

    key: str
    reason: str


class Stream:
    """The readable ones of `rows`, decoded in order, a few ahead; `unreadable` is known at the end."""

    def __init__(self, rows: Sequence[Row], decode: Decoder) -> None:
        self._from, self._decode = rows, decode
        self.rows: list[Row] = []
        self.unreadable: Sequence[Unreadable] = []

    def __len__(self) -> int:
        """How many rows there are, readable or not."""
        return len(self._from)

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the pixels of each readable row, uint8 (H, W, 3)."""
        self.rows, bad = [], list[Unreadable]()
        self.unreadable = bad
        torch = sys.modules.get("torch")  # which may have been told how many threads to take
        threads = torch.get_num_threads() if torch else os.cpu_count() or 1
        with ThreadPoolExecutor(min(threads, 8)) as pool:
            rest = ((row, pool.submit(_try, row, self._decode)) for row in self._from)
            waiting = deque(itertools.islice(rest, _AHEAD))
            while waiting:
                row, decoded = waiting.popleft()
                found = decoded.result()
                waiting.extend(itertools.islice(rest, 1))
                if isinstance(found, Unreadable):
                    bad.append(found)
                else:
                    self.rows.append(row)
                    yield found


class Pictures:
    """The readable ones of `rows`, decoded once at the start, their pixels and their classes.

    Pixels are kept up to `keep` bytes, of which `room` is left; what does not fit is decoded at each use.
    """

    def __init__(self, rows: Sequence[Row], decode: Decoder, *, keep: float, label: str) -> None:
        self._decode, self.room = decode, keep
        self._pixels: list[NDArray[np.uint8] | None] = []
        stream, full = Stream(rows, decode), False
        for found in progress(stream, label, unit="image"):
            full = full or found.nbytes > self.room
            self.room -= 0 if full else found.nbytes
            self._pixels.append(None if full else found)
        self.rows = tuple(stream.rows)
        self.unreadable: Sequence[Unreadable] = tuple(stream.unreadable)
        self.classes = tuple(sorted({row.label for row in rows}))
        self.labels = class_numbers(self.rows, self.classes)  # (N,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Give the pixels of one image, uint8 (H, W, 3); `BadData` if its file has become unreadable."""
        kept = self._pixels[index]
        found = kept if kept is not None else _try(self.rows[index], self._decode)
        if isinstance(found, Unreadable):
            raise BadData(f"{self.rows[index].image} could be read before, but now cannot: {found.reason}")
        return found

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return (self[i] for i in range(len(self)))

    def share(self, rank: int, processes: int) -> "Pictures":
        """Give the run of pictures that falls to one of several processes."""
        mine, part = np.array_split(np.arange(len(self)), processes)[rank], copy.copy(self)
        part.rows, part.unreadable = tuple(self.rows[i] for i in mine), ()
        part._pixels, part.labels = [self._pixels[i] for i in mine], self.labels[mine]
        return part


class QuarterTurns:
    """Pictures four times over, turned left by 0 to 270 degrees: a turn of a class is a class.

    As for characters by Santoro et al., "Meta-Learning with Memory-Augmented Neural Networks", ICML 2016.
    """

    def __init__(self, pictures: Pictures) -> None:
        self._pictures, classes = pictures, len(pictures.classes)
        self.labels = np.concatenate([pictures.labels + turn * classes for turn in range(4)])  # (4 N,)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Give the pixels of one image, turned, uint8 (H, W, 3)."""
        turn, image = divmod(index, len(self._pictures))
        return np.rot90(self._pictures[image], turn)


def read_pictures(
    train: Sequence[Row], validation: Sequence[Row], recipe: Recipe, *, keep: float
) -> tuple[Pictures, Pictures | None]:
    """Decode the images to train on and those to validate on, both within `keep` bytes."""
    pictures = Pictures(train, training_decoder(recipe), keep=keep, label="Reading images")
    if not validation:
        return pictures, None
    view, label = viewing_decoder(recipe), "Reading validation images"
    return pictures, Pictures(validation, view, keep=pictures.room, label=label)


def check_classes(images: "Pictures | FeatureSet") -> None:
    """Refuse a class without one readable image, with a `BadData` that names it."""
    counts = np.bincount(images.labels, minlength=len(images.classes))
    empty = [name for name, count in zip(images.classes, counts, strict=True) if count == 0]
    if empty:
        raise BadData(
            f"the class {empty[0]!r} has no readable image: repair its files or take it out"
            f" ({len(empty)} such classes, {len(images.unreadable)} unreadable images)"
        )


def check_pairs(images: "Pictures | FeatureSet") -> None:
    """Refuse, with a `BadData`, images no class of which has two that can be read: nothing could be found."""
    if not len(images.labels) or np.bincount(images.labels).max() < 2:
        raise BadData(
            f"none of the {len(images.classes)} validation classes has two images that can be read, and"
            f" {len(images.unreadable)} images cannot{first_of(images.unreadable)}: repair them, or set"
            " validation or folds to 0 to keep the last epoch"
        )


def embed_pictures(
    embed: Embed, images: "Stream | Pictures | FeatureSet", *, batch: int = 64, label: str = "Embedding"
) -> NDArray[np.float32]:
    """Embed images of one size, `batch` at a time: float32 (N, d), in order; `BadData` if none can be read.

    `embed` is given pixels, uint8 (B, S, S, 3), or features, float16 (B, C, h, w).
    """
    parts = []
    with progress(images, label, total=len(images), unit="image") as bar:
        arrays: Any = iter(bar)
        while some := list(itertools.islice(arrays, batch)):
            parts.append(embed(np.stack(some)))
    if not parts:
        bad = images.unreadable
        raise BadData(f"none of the {len(bad)} images can be read{first_of(bad)}: repair or replace them")
    return np.concatenate(parts)


def training_decoder(recipe: Recipe) -> Decoder:
    """Decode for augmentation: the whole image, its shorter side at most 2 S, so that crops stay sharp."""
    resampling = Image.Resampling[recipe.resampling.upper()]
    return functools.partial(_decode_whole, least=2 * recipe.image_size, resampling=resampling)


def viewing_decoder(recipe: Recipe) -> Decoder:
    """Decode as the served model does."""
    return functools.partial(
        preprocess, size=recipe.image_size, crop_fraction=recipe.crop_fraction, resampling=recipe.resampling
    )


def _decode_whole(data: bytes, *, least: int, resampling: Image.Resampling) -> NDArray[np.uint8]:
    image = open_rgb(data, least=least)
    most = _LONGEST * min(image.size)
    if max(image.size) > most:  # resized by its shorter side it would fill the memory
        left, top = (max(0, side - most) // 2 for side in image.size)
        image = image.crop((left, top, image.width - left, image.height - top))
    factor = least / min(image.size)
    if factor < 1:
        width, height = (max(1, round(side * factor)) for side in image.size)
        image = image.resize((width, height), resampling)
    return np.array(image)


def class_numbers(rows: Sequence[Row], classes: Sequence[str]) -> NDArray[np.int64]:
    """Give each row's place in `classes`, (N,)."""
    number = {name: i for i, name in enumerate(classes)}
    return np.array([number[row.label] for row in rows], dtype=np.int64)


def tell_unreadable(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Give a line for each of the first few `key` and `reason`, and one for how many there are."""
    lines = [f"skipped {bad['key']}: {bad['reason']}" for bad in found[:_TOLD]]
    rest = f", of which the first {_TOLD} are named" if len(found) > _TOLD else ""
    return [*lines, f"{len(found)} images cannot be read and were left out{rest}."] if found else []


def first_of(unreadable: Sequence[Unreadable]) -> str:
    """Name the first of them for a message, where there is one."""
    return f" (first: {unreadable[0].key}: {unreadable[0].reason})" if unreadable else ""


def _try(row: Row, decode: Decoder) -> NDArray[np.uint8] | Unreadable:
    try:
        return decode(row.image.read_bytes())
    except BadImage as error:
        return Unreadable(row.key, str(error))
    except OSError as error:
        return Unreadable(row.key, error.strerror or str(error))
