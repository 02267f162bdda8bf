"""Local features of a frozen backbone, computed once and kept on disk, so that a head trains in seconds.

A folder holds the views of many images as float16 (N, V, h, w, C), mapped into memory; its name is a digest
of the weights, the preprocessing and the contents of the images, so that another of any of these is another
folder. Any folder may be deleted at any time: it is made again. Letters: N images, V views, (h, w) places,
C channels, S pixels a side.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.catalog.catalog import Row
from serving.errors import BadData, BadSetting
from serving.progress import progress
from training.data.augment import Augmentation
from training.data.pictures import (
    Decoder,
    Stream,
    Unreadable,
    class_numbers,
    training_decoder,
    viewing_decoder,
)
from training.loop.whole_file import has_ended, write_file
from training.network.embedder import Embedder
from training.recipes.recipe import AUGMENTATION, Recipe

__all__ = ["FeatureBatches", "FeatureSet", "cache_features", "find_features"]

_FORMAT = 1
_BATCH = 16
"""Images whose views go through the backbone at a time."""
_ARRAY, _INDEX = "features.npy", "index.json"

_log = logging.getLogger(__name__)


class FeatureSet:
    """Readable images of `rows` as local features; offers what `training.data.pictures.Pictures` does.

    Args:
        rows: The images, readable ones alone.
        unreadable: Those that are left out.
        classes: Sorted, of both.
        features: float16 (M, V, h, w, C), mapped.
        places: Which of the M each row is, (N,).
    """

    def __init__(
        self,
        rows: Sequence[Row],
        unreadable: Sequence[Unreadable],
        classes: Sequence[str],
        features: NDArray[np.float16],
        places: NDArray[np.intp],
    ) -> None:
        self.rows = tuple(rows)
        self.unreadable = tuple(unreadable)
        self.classes = tuple(classes)
        self.labels = class_numbers(rows, self.classes)  # (N,)
        self._features = features
        self._places = places

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[NDArray[np.float16]]:
        """Give each image's map as the served model sees it, float16 (C, h, w)."""
        return (self._features[place, 0].transpose(2, 0, 1) for place in self._places)

    @property
    def views(self) -> int:
        """V, how many views of an image there are; the first is what the served model sees."""
        return int(self._features.shape[1])

    @property
    def locations(self) -> int:
        """How many places h · w a map has."""
        return int(self._features.shape[2] * self._features.shape[3])

    def only(self, rows: Sequence[Row]) -> "FeatureSet":
        """Give the set of some of the rows; those that could not be read stay out."""
        place = {row.key: place for row, place in zip(self.rows, self._places, strict=True)}
        kept = [row for row in rows if row.key in place]
        keys = {row.key for row in rows}
        return FeatureSet(
            kept,
            [bad for bad in self.unreadable if bad.key in keys],
            sorted({row.label for row in rows}),
            self._features,
            np.array([place[row.key] for row in kept], dtype=np.intp),
        )

    def share(self, rank: int, processes: int) -> "FeatureSet":
        """Give the run of images that falls to one of several processes."""
        mine = np.array_split(np.arange(len(self)), processes)[rank]
        return FeatureSet([self.rows[i] for i in mine], (), self.classes, self._features, self._places[mine])

    def draw(self, images: NDArray[np.intp], views: NDArray[np.intp], where: NDArray[np.intp]) -> Tensor:
        """Give some places of one view of each of B images, float16 (B, C, k, 1)."""
        n, v, h, w, c = self._features.shape
        flat = self._features.reshape(n, v, h * w, c)
        chosen = flat[self._places[images][:, None], views[:, None], where[None]]  # (B, k, C)
        return torch.from_numpy(chosen).permute(0, 2, 1)[..., None]


class FeatureBatches:
    """The batches of one epoch: a view of each image at random, of some of its places.

    Args:
        features: What is drawn from.
        batches: Image numbers of each batch.
        location_share: How many of the places a batch sees, the same ones of all its images.
        pooled: Give the mean of these places alone: all that a linear head needs where nothing looks at
            single places, and as many times less work.
        seed: Of the views and places.
        epoch: The same.
        rank: Which run of rows of each batch is this process's.
        processes: Of how many.
    """

    def __init__(
        self,
        features: FeatureSet,
        batches: Sequence[list[int]],
        *,
        location_share: float,
        pooled: bool,
        seed: int,
        epoch: int,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self._features = features
        self._batches = batches
        self._kept = max(1, round(location_share * features.locations))
        self._pooled = pooled
        self._entropy = (seed, epoch)
        self._rank, self._processes = rank, processes

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield maps, float16 (b, C, k, 1), or means, float32 (b, C, 1, 1), and class numbers, int64 (b,)."""
        draws = np.random.default_rng(self._entropy)
        for batch in self._batches:
            images = np.array(batch)
            views = draws.integers(self._features.views, size=len(images))
            where = np.sort(draws.permutation(self._features.locations)[: self._kept])
            mine = np.array_split(np.arange(len(images)), self._processes)[self._rank]
            labels = torch.from_numpy(self._features.labels[images[mine]])
            maps = self._features.draw(images[mine], views[mine], where)
            yield maps.float().mean(dim=2, keepdim=True) if self._pooled else maps, labels


def cache_features(
    rows: Sequence[Row],
    embedder: Embedder,
    recipe: Recipe,
    *,
    views: int,
    folder: Path | None,
) -> FeatureSet:
    """Read the features of images from the cache, or compute them and put them there.

    Args:
        rows: The images.
        embedder: Its backbone, on whatever device.
        recipe: Size, preprocessing and augmentation; every view but the first is augmented.
        views: V.
        folder: Where caches are kept; `$XDG_CACHE_HOME/crossbatch`, or `~/.cache/crossbatch`, when None.

    Raises:
        BadSetting: If they would be larger than the recipe's `cache_gib`, or than what is free on the disk.
        BadData: If not one image can be read, or the backbone gives what float16 does not hold.
    """
    place = _place(rows, embedder, recipe, views, folder)
    found = _read(rows, place)
    if found is None:
        _extract(rows, embedder, recipe, views=views, place=place)
        found = _read(rows, place)
    if found is None:
        raise BadData(f"the features in {place} were changed while they were written: try again")
    return found


def find_features(
    rows: Sequence[Row], embedder: Embedder, recipe: Recipe, *, views: int, folder: Path | None
) -> FeatureSet | None:
    """Read the features of images from the cache, as `cache_features` does; None where it lacks them."""
    return _read(rows, _place(rows, embedder, recipe, views, folder))


def _place(rows: Sequence[Row], embedder: Embedder, recipe: Recipe, views: int, folder: Path | None) -> Path:
    home = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossbatch"
    return home / "features" / _digest(rows, embedder, recipe, views)


def _read(rows: Sequence[Row], place: Path) -> FeatureSet | None:
    """Read a cache; None where there is none, or one that is not whole."""
    try:
        found = json.loads((place / _INDEX).read_text())
        features = np.load(place / _ARRAY, mmap_mode="r")
        reasons = {int(number): reason for number, reason in found["unreadable"]}
        whole = features.shape == tuple(found["shape"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    if not whole:
        return None
    kept = [row for number, row in enumerate(rows) if number not in reasons]
    bad = [Unreadable(rows[number].key, reason) for number, reason in reasons.items()]
    classes = sorted({row.label for row in rows})
    return FeatureSet(kept, bad, classes, features, np.arange(len(kept)))


def _extract(rows: Sequence[Row], embedder: Embedder, recipe: Recipe, *, views: int, place: Path) -> None:
    """Run all views of all images through the backbone; the index, written last, says that all are there."""
    height, width = embedder.grid
    shape = (len(rows), views, height, width, embedder.backbone.channels)
    _check_room(shape, recipe, place)
    _sweep(place.parent)
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    aside.mkdir(parents=True, exist_ok=True)
    try:
        array = np.lib.format.open_memmap(aside / _ARRAY, mode="w+", dtype=np.float16, shape=shape)
        _take_room(aside / _ARRAY)
        stream = Stream(rows, _views_decoder(recipe, views))
        device = embedder.codebook.device
        done, waiting = 0, list[NDArray[np.uint8]]()
        embedder.eval().to(memory_format=torch.channels_last)
        with progress(stream, "Features", total=len(rows), unit="image") as bar:
            for number, pixels in enumerate(bar, 1):
                waiting.append(pixels)
                if len(waiting) < _BATCH and number < len(rows):
                    continue
                done = _store(array, done, waiting, embedder, recipe, device)
                waiting.clear()
        if waiting:
            done = _store(array, done, waiting, embedder, recipe, device)
        if done == 0:
            first = stream.unreadable[0]
            raise BadData(f"none of the {len(rows)} images can be read (first: {first.key}: {first.reason})")
        array.flush()
        numbers = {row.key: number for number, row in enumerate(rows)}
        unreadable = [[numbers[bad.key], bad.reason] for bad in stream.unreadable]
        write_file(aside / _INDEX, json.dumps({"shape": shape, "unreadable": unreadable}).encode())
        if _read(rows, place) is None:  # another process may have been quicker
            shutil.rmtree(place, ignore_errors=True)
            aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@torch.no_grad()
def _store(
    array: NDArray[np.float16],
    done: int,
    waiting: Sequence[NDArray[np.uint8]],
    embedder: Embedder,
    recipe: Recipe,
    device: torch.device,
) -> int:
    """Put the maps of some images, uint8 (V, S, S, 3) each, behind the first `done`; returns how many now."""
    pixels = torch.from_numpy(np.concatenate(waiting)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16-mixed"):
        maps: Tensor = embedder.backbone(embedder.normalise(pixels))  # (B V, C, h, w)
    halves = maps.permute(0, 2, 3, 1).half().cpu()
    if not torch.isfinite(halves).all():
        raise BadData(
            f"features of the backbone {recipe.backbone} are too large for float16, in which they are cached:"
            " train with freeze set to none, or choose another backbone"
        )
    array[done : done + len(waiting)] = halves.numpy().reshape(len(waiting), *array.shape[1:])
    return done + len(waiting)


def _check_room(shape: tuple[int, ...], recipe: Recipe, place: Path) -> None:
    """Tell how large a cache will be, and refuse one that is too large, before it is made."""
    size = 2 * int(np.prod(shape)) / 2**30
    told = (
        f"features of {shape[0]:,} images, {shape[1]} views of {shape[2]} x {shape[3]} places and"
        f" {shape[4]:,} channels, take {size:.2f} GiB"
    )
    if size > recipe.cache_gib:
        raise BadSetting(
            f"{told}, but cache_gib is {recipe.cache_gib:g}: raise it, or lower views or image_size, or set"
            " freeze to none"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free / 2**30
    if size > free:
        raise BadSetting(
            f"{told}, but {place.parent} has {free:.2f} GiB free: give another folder by --cache"
        )
    _log.warning("%s in %s", told, place)


def _take_room(path: Path) -> None:
    """Take the room of a file on the disk, for a mapped page that finds none kills the process.

    Raises:
        OSError: If the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _sweep(folder: Path) -> None:
    """Take away what extractions left aside when they were killed."""
    for path in folder.iterdir():
        _, dot, process = path.name.partition(".")
        if dot and process.isdecimal() and has_ended(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _views_decoder(recipe: Recipe, views: int) -> Decoder:
    return functools.partial(
        _decode_views,
        view=viewing_decoder(recipe),
        whole=training_decoder(recipe),
        augment=Augmentation(recipe),
        views=views,
    )


def _decode_views(
    data: bytes, *, view: Decoder, whole: Decoder, augment: Augmentation, views: int
) -> NDArray[np.uint8]:
    """Decode an image as it is served and augmented; its own contents draw how, uint8 (V, S, S, 3)."""
    found = [view(data)]
    if views > 1:
        image, seed = whole(data), zlib.crc32(data)
        found += [augment(image, seed + number) for number in range(1, views)]
    return np.stack(found)


def _digest(rows: Sequence[Row], embedder: Embedder, recipe: Recipe, views: int) -> str:
    """Name a cache by all that its contents come from: weights, preprocessing, images."""
    settings = {"image_size", "crop_fraction", "resampling", "backbone", "precision"}
    settings |= AUGMENTATION - {"location_share"} if views > 1 else set()
    told = {"format": _FORMAT, "views": views} | {name: getattr(recipe, name) for name in sorted(settings)}
    digest = hashlib.sha256(json.dumps(told).encode())
    for name, value in embedder.backbone.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for row in rows:
        try:
            contents = hashlib.sha256(row.image.read_bytes()).digest()
        except OSError:  # the extraction tells why
            contents = b""
        digest.update(contents)
    return digest.hexdigest()[:32]
