"""What JPEGs cost, and what another decoder would change: `python benchmarks/decode.py MODEL.onnx DATA`.

From a file to uint8 (S, S, 3), by serving's own `preprocess` and by others that are installed (the first line
tells which are not). Photos are made of the images of DATA, the classes of which the model has not seen:

- to compare speed and pixels, mosaics of them, enlarged 1.5 times, so that there is detail all over;
- for scores, each by itself, enlarged to that size, with noise of 3 levels: nobody has 12-megapixel photos of
  these classes. They lack the detail of photos of that size, so scores move less than those of photos would.

Decoders take turns on one thread, on the same files, in orders drawn anew; what counts is processor time, of
which others on the machine take little. Printed, and written as CSV, are images a second, their ratio to
serving's in the same round (median and quartiles), the mean absolute difference of a pixel from serving's (of
255 levels), and R@1 and MAP@R of the model.
"""

import argparse
import csv
import importlib
import io
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VIPS_CONCURRENCY"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from benchmarks.driving.figures import median, quartiles
from serving.catalog.catalog import read, select
from serving.model.encoder import Encoder
from serving.model.spec import ModelSpec
from training.evaluation.metrics import RetrievalMetrics, retrieval_metrics

__all__ = ["PHOTOS", "decoders", "main", "mosaic"]

Pixels = NDArray[np.uint8]
Decode = Callable[[bytes], Pixels]
"""The bytes of a JPEG to uint8 (S, S, 3), RGB."""

PHOTOS: Mapping[str, tuple[int, int]] = {
    "phone, 4032 x 3024": (4032, 3024),
    "1600 x 1200": (1600, 1200),
    "product, 500 x 500": (500, 500),
}
OURS = "Pillow, as served"
_QUALITY = 90
_FIELDS = (
    "photos", "decoder", "images_per_second", "ratio", "first_quartile", "third_quartile", "difference",
    "recall_at_1", "map_at_r", "images",
)  # fmt: skip


def decoders(encoder: Encoder) -> tuple[dict[str, Decode], list[str]]:
    """Return the ways to decode that are there, serving's own first, and the packages that are missing."""
    spec = encoder.spec
    found: dict[str, Decode] = {OURS: encoder.preprocess}
    for margin in (1.0, 1.5):
        found[f"Pillow, draft at {margin:g} times the size"] = partial(_pillow, spec, margin=margin)
    found["Pillow, reducing_gap=2"] = partial(_pillow, spec, margin=2, gap=2.0)
    found["Pillow, YCbCr resized"] = partial(_pillow, spec, margin=2, mode="YCbCr")
    missing = []
    for package, name, make in (
        ("simplejpeg", "simplejpeg", _simplejpeg),
        ("torchvision", "torchvision", _torchvision),
        ("imagecodecs", "imagecodecs", _imagecodecs),
        ("pyvips", "pyvips", _pyvips),
        ("cv2", "OpenCV", _opencv),
    ):
        try:
            found[name] = make(importlib.import_module(package), spec)
        except ImportError:
            missing.append(package)
    return found, missing


def _pillow(
    spec: ModelSpec, data: bytes, *, margin: float, gap: float | None = None, mode: str | None = None
) -> Pixels:
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    needed = margin * _needed(spec)
    image.draft(mode, (int(needed), int(needed)))
    return _cut(image, spec, gap)


def _simplejpeg(simplejpeg: Any, spec: ModelSpec) -> Decode:
    """Scales in eighths while it decodes, to twice what is needed as serving does; Pillow resizes."""
    least = 2 * _needed(spec)

    def decode(data: bytes) -> Pixels:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        scaled = {"min_height": least, "min_width": least} if min(height, width) > least else {}
        return _cut(Image.fromarray(simplejpeg.decode_jpeg(data, **scaled)), spec)

    return decode


def _imagecodecs(imagecodecs: Any, spec: ModelSpec) -> Decode:
    """Decodes the whole; Pillow resizes."""
    return lambda data: _cut(Image.fromarray(imagecodecs.jpeg8_decode(data)), spec)


def _torchvision(_: Any, spec: ModelSpec) -> Decode:
    """Decodes the whole, and resizes by itself."""
    import torch
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)

    def decode(data: bytes) -> Pixels:
        # What `decode_jpeg` calls, which warns at each call that it will be gone; 3 is RGB.
        image = torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), 3, False)
        side = round(min(image.shape[1:]) * spec.crop_fraction)
        square = functional.center_crop(image, [side, side])
        sides = [spec.image_size, spec.image_size]
        small = functional.resize(square, sides, functional.InterpolationMode.BICUBIC, antialias=True)
        found: Pixels = small.permute(1, 2, 0).numpy()
        return found

    return decode


def _pyvips(pyvips: Any, spec: ModelSpec) -> Decode:
    """Scales while it decodes, to twice what is needed; resizes by Lanczos, its only filter here.

    It crops what is resized, to whole pixels, and so is off by up to half a pixel where sides differ.
    """
    needed, size = _needed(spec), spec.image_size

    def decode(data: bytes) -> Pixels:
        small = pyvips.Image.thumbnail_buffer(data, needed, height=needed, crop="centre")
        left = (needed - size) // 2
        return np.ascontiguousarray(small.crop(left, left, size, size).numpy())

    return decode


def _opencv(cv2: Any, spec: ModelSpec) -> Decode:
    """Scales to a half, a quarter or an eighth, at least twice what is needed, and averages areas."""
    cv2.setNumThreads(1)
    flags = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}
    least = 2 * _needed(spec)

    def decode(data: bytes) -> Pixels:
        shorter = min(Image.open(io.BytesIO(data)).size)
        flag = next((flag for by, flag in flags.items() if shorter >= by * least), cv2.IMREAD_COLOR)
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
        side = round(min(image.shape[:2]) * spec.crop_fraction)
        top, left = ((length - side) // 2 for length in image.shape[:2])
        square = image[top : top + side, left : left + side]
        small = cv2.resize(square, (spec.image_size, spec.image_size), interpolation=cv2.INTER_AREA)
        found: Pixels = cv2.cvtColor(small, cv2.COLOR_BGR2RGB)
        return found

    return decode


def _needed(spec: ModelSpec) -> int:
    """Return the pixels of the shorter side that the model's square is cut from."""
    return int(np.ceil(spec.image_size / spec.crop_fraction))


def _cut(image: Image.Image, spec: ModelSpec, gap: float | None = None) -> Pixels:
    """Resample the centred square as serving does."""
    side = min(image.size) * spec.crop_fraction
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    resampling = Image.Resampling[spec.resampling.upper()]
    small = image.resize((spec.image_size,) * 2, resampling, box=box, reducing_gap=gap)
    return np.asarray(small if small.mode == "RGB" else small.convert("RGB"))


def mosaic(files: Sequence[Path], width: int, height: int, draw: random.Random) -> bytes:
    """Make a JPEG of this size out of images drawn from `files`, enlarged 1.5 times."""
    canvas = Image.new("RGB", (round(width / 1.5), round(height / 1.5)))
    left, top, tallest = 0, 0, 0
    while top < canvas.height:
        with Image.open(draw.choice(files)) as tile:
            canvas.paste(tile.convert("RGB"), (left, top))
            left, tallest = left + tile.width, max(tallest, tile.height)
        if left >= canvas.width:
            left, top, tallest = 0, top + tallest, 0
    return _jpeg(canvas.resize((width, height), Image.Resampling.LANCZOS))


def _enlarged(file: Path, side: int, noise: NDArray[np.int8]) -> bytes:
    """Make a JPEG of the centred square of one image, so many pixels a side, with that much of the noise."""
    with Image.open(file) as image:
        square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
    noisy = np.clip(np.asarray(square, np.int16) + noise[:side, :side], 0, 255)
    return _jpeg(Image.fromarray(noisy.astype(np.uint8)))


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def turns(
    ways: Mapping[str, Decode], photos: Sequence[bytes], rounds: int, draw: random.Random
) -> dict[str, list[float]]:
    """Return the seconds of processor time that each takes for all photos, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in draw.sample(list(ways), len(ways)):
            began = time.process_time()
            for photo in photos:
                ways[name](photo)
            seconds[name].append(time.process_time() - began)
    return seconds


def apart(way: Decode, ours: Decode, photos: Sequence[bytes]) -> float:
    """Return the mean absolute difference of the pixels of two ways, of 255 levels."""
    pairs = [(way(photo).astype(np.float64), ours(photo)) for photo in photos]
    return float(np.mean([np.abs(one - other).mean() for one, other in pairs]))


def scores(
    ways: Mapping[str, Decode], encoder: Encoder, photos: Iterator[bytes], labels: Sequence[int]
) -> dict[str, RetrievalMetrics]:
    """Return what the model's embeddings of so decoded photos are worth."""
    vectors: dict[str, list[NDArray[np.float32]]] = {name: [] for name in ways}
    for few in iter(lambda: list(itertools.islice(photos, 8)), []):
        for name, decode in ways.items():
            vectors[name].append(encoder.encode(np.stack([decode(photo) for photo in few])))
    return {name: retrieval_metrics(np.concatenate(own), labels) for name, own in vectors.items()}


def main(words: Sequence[str]) -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description="What decoders cost and change.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--classes", type=int, default=20, help="of the test's, for the scores")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--photos", type=int, default=4, help="mosaics of each size")
    parser.add_argument("--scale", type=float, default=1, help="of the sides of the photos; less is shorter")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.csv"))
    given = parser.parse_args(words)
    encoder = Encoder(given.model)
    ways, missing = decoders(encoder)
    print(f"not installed: {', '.join(missing) or 'none'}\n")
    rows = select(read(given.data), "test", encoder.spec.split)
    classes = sorted({row.label for row in rows})[: given.classes]
    chosen = [row for row in rows if row.label in classes]
    labels = [classes.index(row.label) for row in chosen]
    files, draw = [Path(str(row.image)) for row in chosen], random.Random(0)
    print("| " + " | ".join(_FIELDS) + " |\n|" + " --- |" * len(_FIELDS))
    with given.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(_FIELDS)
        for kind, sides in PHOTOS.items():
            width, height = (max(1, round(side * given.scale)) for side in sides)
            photos = [mosaic(files, width, height, draw) for _ in range(given.photos)]
            seconds = turns(ways, photos, given.rounds, draw)
            drawn = np.random.default_rng(0).normal(0, 3, (height, height, 3)).round().astype(np.int8)
            enlarged = (_enlarged(each, height, drawn) for each in files)
            for name, found in scores(ways, encoder, enlarged, labels).items():
                ratios = [ours / own for ours, own in zip(seconds[OURS], seconds[name], strict=True)]
                speed = len(photos) / median(seconds[name])
                difference = apart(ways[name], ways[OURS], photos)
                figures = (speed, median(ratios), *quartiles(ratios), difference)
                figures += (found.recall_at[1], found.map_at_r)
                line = [kind, name, *(f"{figure:.5g}" for figure in figures), len(files)]
                table.writerow(line)
                print("| " + " | ".join(map(str, line)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
