"""Local features of a frozen backbone, computed once and kept on disk, so that a head trains in seconds.

A folder holds the views of many images as float16 (N, V, h, w, C), mapped into memory; its name is a digest
of weights, preprocessing and images' contents. Letters: N images, V views, (h, w) places, C channels.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.catalog.catalog import Row
from serving.errors import BadData, BadSetting
from serving.progress import progress
from training.data import pictures
from training.data.augment import Augmentation
from training.data.pictures import Stream, Unreadable
from training.loop.checkpoint import locked, write_file
from training.network.embedder import Embedder
from training.recipes.recipe import AUGMENTATION, Recipe

__all__ = ["FeatureSet", "cache_features", "feature_batches", "find_features"]

_FORMAT = 1
_BATCH = 16  # images whose views go through the backbone at a time
_ARRAY, _INDEX, _PART = "features.npy", "index.json", ".part"

Share = Callable[[list[int]], list[int]]  # of a batch, what falls to one of several processes

_log = logging.getLogger(__name__)


class FeatureSet:
    """Readable images of `rows` as features, float16 (M, V, h, w, C); `places` (N,) says which of the M."""

    def __init__(
        self,
        rows: Sequence[Row],
        unreadable: Sequence[Unreadable],
        classes: Sequence[str],
        features: NDArray[np.float16],
        places: NDArray[np.intp],
    ) -> None:
        self.rows, self.classes = tuple(rows), tuple(classes)
        self.unreadable: Sequence[Unreadable] = tuple(unreadable)
        self.labels = pictures.class_numbers(rows, self.classes)  # (N,)
        self.views = int(features.shape[1])  # V; the first is what the served model sees
        self.locations = int(features.shape[2] * features.shape[3])  # h · w
        self._features, self._places = features, places

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[NDArray[np.float16]]:
        """Give each image's map as the served model sees it, float16 (C, h, w)."""
        return (self._features[place, 0].transpose(2, 0, 1) for place in self._places)

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


def feature_batches(
    features: FeatureSet, batches: Iterable[list[int]], recipe: Recipe, *, epoch: int, mine: Share = list
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw the batches of an epoch: a view of each image at random, of the recipe's share of its places.

    Where nothing looks at single places, their mean alone: all that a linear head needs, and less work.
    Gives maps, float16 (b, C, k, 1), or means, float32 (b, C, 1, 1), and class numbers, int64 (b,), of those
    rows of each batch that are `mine`.
    """
    kept = max(1, round(recipe.location_share * features.locations))
    pooled = recipe.pooling == "gap" and not recipe.learns_prototypes
    draws = np.random.default_rng((recipe.seed, epoch))
    for batch in batches:
        images, rows = np.array(batch), mine([*range(len(batch))])
        views = draws.integers(features.views, size=len(images))
        where = np.sort(draws.permutation(features.locations)[:kept])
        maps = features.draw(images[rows], views[rows], where)
        labels = torch.from_numpy(features.labels[images[rows]])
        yield maps.float().mean(dim=2, keepdim=True) if pooled else maps, labels


def cache_features(
    rows: Sequence[Row], embedder: Embedder, recipe: Recipe, *, views: int, folder: Path | None
) -> FeatureSet:
    """Read the features of V views of images from the cache, or compute them and put them there.

    Every view but the first is augmented. The `folder` of caches is `$XDG_CACHE_HOME/crossbatch`, or
    `~/.cache/crossbatch`, when None.
    """
    place = _place(rows, embedder, recipe, views, folder)
    if (found := _read(rows, place)) is not None:
        return found
    shape = (len(rows), views, *embedder.grid, embedder.backbone.channels)
    _check_room(shape, recipe, place.parent)
    with locked(place.parent, wait=True):  # so that what is half made is what a killed process left
        for left in place.parent.glob(f"*{_PART}"):
            shutil.rmtree(left, ignore_errors=True)
        if (found := _read(rows, place)) is not None:  # another process has made it meanwhile
            return found
        part = place.with_name(place.name + _PART)
        part.mkdir()
        try:
            _extract(rows, embedder, recipe, shape=shape, part=part)
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
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
    home = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossbatch"
    return home / "features" / digest.hexdigest()[:32]


def _read(rows: Sequence[Row], place: Path) -> FeatureSet | None:
    """Read a cache; None where there is none, or one that is not whole."""
    try:
        found = json.loads((place / _INDEX).read_text())
        features = np.load(place / _ARRAY, mmap_mode="r")
        reasons = {int(number): reason for number, reason in found["unreadable"]}
        if features.shape != tuple(found["shape"]):
            return None
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    kept = [row for number, row in enumerate(rows) if number not in reasons]
    bad = [Unreadable(rows[number].key, reason) for number, reason in reasons.items()]
    classes = sorted({row.label for row in rows})
    return FeatureSet(kept, bad, classes, features, np.arange(len(kept)))


def _extract(
    rows: Sequence[Row], embedder: Embedder, recipe: Recipe, *, shape: tuple[int, ...], part: Path
) -> None:
    """Run all views of all images through the backbone; the index, written last, says that all are there."""
    array = np.lib.format.open_memmap(part / _ARRAY, mode="w+", dtype=np.float16, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a mapped page that finds no room on the disk kills the process
        with (part / _ARRAY).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, (part / _ARRAY).stat().st_size)
    view, whole = pictures.viewing_decoder(recipe), pictures.training_decoder(recipe)
    augment = Augmentation(recipe)

    def decode(data: bytes) -> NDArray[np.uint8]:  # (V, S, S, 3); the image's own contents draw its views
        views = [view(data)]
        if shape[1] > 1:
            image, seed = whole(data), zlib.crc32(data)
            views += [augment(image, seed + number) for number in range(1, shape[1])]
        return np.stack(views)

    stream = Stream(rows, decode)
    embedder.eval().to(memory_format=torch.channels_last)
    done = 0
    with progress(stream, "Features", total=len(rows), unit="image") as bar:
        images: Any = iter(bar)
        while some := list(itertools.islice(images, _BATCH)):
            maps = _maps(np.concatenate(some), embedder, recipe)
            array[done : done + len(some)] = maps.reshape(len(some), *shape[1:])
            done += len(some)
    array.flush()
    numbers = {row.key: number for number, row in enumerate(rows)}
    unreadable = [[numbers[bad.key], bad.reason] for bad in stream.unreadable]
    write_file(part / _INDEX, json.dumps({"shape": shape, "unreadable": unreadable}).encode())


@torch.no_grad()
def _maps(pixels: NDArray[np.uint8], embedder: Embedder, recipe: Recipe) -> NDArray[np.float16]:
    """Run the backbone on pixels, uint8 (B, S, S, 3), to maps (B, h, w, C)."""
    images = torch.from_numpy(pixels).to(embedder.codebook.device)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision == "bf16-mixed"):
        maps: Tensor = embedder.backbone(embedder.normalise(images))  # (B, C, h, w)
    found = maps.permute(0, 2, 3, 1).half().cpu()
    if not torch.isfinite(found).all():
        raise BadData(
            f"features of the backbone {recipe.backbone} are too large for float16, in which they are cached:"
            " train with freeze set to none, or choose another backbone"
        )
    return found.numpy()


def _check_room(shape: tuple[int, ...], recipe: Recipe, folder: Path) -> None:
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
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / 2**30
    if size > free:
        raise BadSetting(f"{told}, but {folder} has {free:.2f} GiB free: make room there")
    _log.warning("%s in %s", told, folder)
