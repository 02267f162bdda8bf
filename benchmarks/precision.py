"""Images a second in int8 beside fp32, with R@1 and MAP@R: `python benchmarks/precision.py NAME=RUN ...`.

Each run is exported in both precisions, as `crossbatch export` does, whatever it loses; the figures are those
that it measures on the run's test images. `NAME=BACKBONE@SIDE` takes a backbone with random weights instead,
for its speed alone. Both files embed the same random pixels by turns, --turns times: whatever else the
machine does falls on both; a turn takes about --seconds a file. Printed are medians of the turns' ratios with
their quartiles; --csv keeps each turn. Bound, on a CPU with VNNI: 3 times fp32, for at most half a point.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from serving.model.encoder import Encoder, cpu_flags
from serving.model.spec import fingerprint, read_model, write_spec
from training import export
from training.network.embedder import build_embedder
from training.quantise import FIGURES, overflows, to_int8
from training.recipes.recipe import Recipe

__all__ = ["COLUMNS", "main", "measure"]

COLUMNS = (
    "model", "threads", "batch", "turn", "fp32_images_s", "int8_images_s", "ratio", "recall_at_1_change",
    "map_at_r_change",
)  # fmt: skip
Row = dict[str, Any]


class Pair(NamedTuple):
    """A model in both precisions, and by how much int8 finds more; nothing where its weights are random."""

    fp32: Path
    int8: Path
    changes: dict[str, float]


def _of_run(run: Path, folder: Path) -> Pair:
    pair = Pair(folder / "fp32.onnx", folder / "int8.onnx", {})
    export.run(export.Settings(run_dir=run, model=pair.fp32))
    told = export.run(export.Settings(run_dir=run, model=pair.int8, precision="int8", max_loss=100))
    found = told["against_fp32"]
    return pair._replace(changes={name: found["own"][name] - found["fp32"][name] for name in FIGURES})


def _of_backbone(name: str, side: int, folder: Path) -> Pair:
    pair = Pair(folder / "fp32.onnx", folder / "int8.onnx", {})
    pixels = _pixels(16, side)
    photos = [folder / f"{i}.png" for i in range(len(pixels))]
    for photo, each in zip(photos, pixels, strict=True):
        Image.fromarray(each).save(photo)
    embedder = build_embedder(Recipe(backbone=name, image_size=side, dimension=512))
    fields = {"name": name, "crop_fraction": 1.0, "resampling": "bicubic"}
    images = [photo.read_bytes() for photo in photos]
    export.export_model(embedder, fields, pair.fp32, images, explains=False)
    data, spec = read_model(pair.fp32)
    model = to_int8(onnx.load_model_from_string(data), pixels, reduce_range=overflows())
    write_spec(model, spec.model_copy(update={"fingerprint": fingerprint(model), "precision": "int8"}))
    pair.int8.write_bytes(model.SerializeToString())
    return pair


def measure(name: str, pair: Pair, given: argparse.Namespace) -> Iterator[Row]:
    """Time a pair by turns, for each number of threads and each batch, and give each turn's row."""
    for threads in given.threads:
        encoders = [Encoder(path, threads=threads) for path in (pair.fp32, pair.int8)]
        for batch in given.batches:
            images = _pixels(batch, encoders[0].spec.image_size)
            counts = [max(1, round(given.seconds / _seconds(each, images, 2))) for each in encoders]
            for turn in range(given.turns):
                rates = [
                    batch / _seconds(each, images, count)
                    for each, count in zip(encoders, counts, strict=True)
                ]
                yield {
                    "model": name,
                    "threads": threads,
                    "batch": batch,
                    "turn": turn,
                    "fp32_images_s": round(rates[0], 2),
                    "int8_images_s": round(rates[1], 2),
                    "ratio": round(rates[1] / rates[0], 4),
                    **{f"{figure}_change": round(change, 6) for figure, change in pair.changes.items()},
                }


def _seconds(encoder: Encoder, images: NDArray[np.uint8], count: int) -> float:
    """Embed a batch that many times; the mean time of one."""
    started = time.perf_counter()
    for _ in range(count):
        encoder.encode(images)
    return (time.perf_counter() - started) / count


def _pixels(count: int, side: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def _tell(rows: Sequence[Row]) -> None:
    """Print the table's line of one model, number of threads and batch."""
    low, ratio, high = statistics.quantiles([row["ratio"] for row in rows], n=4)
    row = rows[0]
    rates = (statistics.median(each[name] for each in rows) for name in ("fp32_images_s", "int8_images_s"))
    changes = [row.get(f"{name}_change") for name in FIGURES]
    told = [f"{100 * change:+.2f}" if change is not None else "-" for change in changes]
    print(
        f"{row['model']:12}{row['threads']:8}{row['batch']:6}{next(rates):9.1f}{next(rates):9.1f}"
        f"{ratio:8.2f} ({low:.2f} to {high:.2f}){told[0]:>8}{told[1]:>8}",
        flush=True,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="NAME=RUN", help="or NAME=BACKBONE@SIDE")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(words)
    print(f"CPU: {' '.join(cpu_flags()) or 'none of the flags that matter'}")
    kept = list[Row]()
    for word in given.models:
        name, _, source = word.partition("=")
        backbone, _, side = source.partition("@")
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            pair = _of_backbone(backbone, int(side), folder) if side else _of_run(Path(source), folder)
            if not kept:
                print("model        threads batch     fp32     int8   ratio (quartiles)       R@1   MAP@R")
            for row in measure(name, pair, given):
                kept.append(row)
                if row["turn"] == given.turns - 1:
                    _tell(kept[-given.turns :])
    if given.csv:
        with given.csv.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
