"""What indexing costs beside decoding and encoding: `python benchmarks/indexing.py MODEL.onnx DATA`.

Three things take turns in one process, on the same images with the same number of threads, so that whatever
else the machine does falls on all: a plain loop, which decodes in a pool of threads, encodes batches and
stores nothing; indexing into a new gallery, hashing and SQLite included; and the same with the index made at
the end. Printed are images a second and the ratio to the plain loop of the same round, as medians with
quartiles. Bound: indexing reaches 0.95 of the plain loop.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.driving.figures import write_csv
from serving.catalog.catalog import Catalog, Row, read
from serving.cores import usable_cores
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import RebuildPolicy
from serving.indexing.pipeline import index_rows
from serving.indexing.target import Target
from serving.model.encoder import Encoder

__all__ = ["INDEXED", "PLAIN", "STORED", "compare", "ratios"]

PLAIN, STORED, INDEXED = "decode + ONNX Runtime alone", "indexing", "indexing and its index"
_BATCH = 32


def compare(
    encoder: Encoder, catalog: Catalog, rows: Sequence[Row], *, threads: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds that each of the three took, round by round."""
    runs: Mapping[str, Callable[[], int]] = {
        PLAIN: lambda: _plain(encoder, rows, threads=threads),
        STORED: lambda: _indexed(encoder, catalog, rows, threads=threads, rebuild=False),
        INDEXED: lambda: _indexed(encoder, catalog, rows, threads=threads, rebuild=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        order = list(runs)[:: 1 if turn % 2 else -1]  # nobody always goes first
        for name in order:
            began = time.perf_counter()
            done = runs[name]()
            seconds[name].append(time.perf_counter() - began)
            if done != len(rows):
                raise SystemExit(f"{name} embedded {done} of {len(rows)} images; give data without bad ones")
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Return the speed of `name` over that of the plain loop in each round."""
    return [plain / taken for plain, taken in zip(seconds[PLAIN], seconds[name], strict=True)]


def _plain(encoder: Encoder, rows: Sequence[Row], *, threads: int) -> int:
    """Decode and encode, as fast as it goes; returns how many images."""
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[NDArray[np.uint8]]] = deque()
        batch = []
        for row in rows:
            waiting.append(pool.submit(_decoded, encoder, row))
            if len(waiting) > 2 * _BATCH:
                batch.append(waiting.popleft().result())
            if len(batch) == _BATCH:
                done += len(encoder.encode(np.stack(batch)))
                batch = []
        batch += [each.result() for each in waiting]
        for start in range(0, len(batch), _BATCH):
            done += len(encoder.encode(np.stack(batch[start : start + _BATCH])))
    return done


def _decoded(encoder: Encoder, row: Row) -> NDArray[np.uint8]:
    return encoder.preprocess(row.image.read_bytes())


def _indexed(encoder: Encoder, catalog: Catalog, rows: Sequence[Row], *, threads: int, rebuild: bool) -> int:
    """Fill a new gallery; returns how many items it holds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        GalleryDirectory(Path(folder), policy=RebuildPolicy(automatic=False)) as directory,
    ):
        target = Target(directory, "new", encoder.spec)
        report = index_rows(encoder, catalog, rows, target, batch=_BATCH, threads=threads)
        if rebuild:
            target.made().rebuild()
        return report.stored


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=0, help="the first so many; 0: all")
    parser.add_argument("--csv", type=Path, help="file that all rounds are added to")
    given = parser.parse_args()
    catalog = read(given.data)
    rows = catalog.rows[: given.images or None]
    encoder = Encoder(given.model, threads=given.threads)
    encoder.encode(np.zeros((_BATCH, *[encoder.spec.image_size] * 2, 3), np.uint8))  # the first is slower
    seconds = compare(encoder, catalog, rows, threads=given.threads, rounds=given.rounds)
    print(
        f"{encoder.spec.name}, {len(rows)} images, {given.threads} threads, {given.rounds} rounds: "
        "medians (quartiles)"
    )
    for name, taken in seconds.items():
        low, middle, high = _quartiles([len(rows) / each for each in taken])
        line = f"{name:<28} {middle:8.1f} images/s ({low:.1f} to {high:.1f})"
        if name != PLAIN:
            low, middle, high = _quartiles(ratios(seconds, name))
            line += f"   ratio {middle:.3f} ({low:.3f} to {high:.3f})"
        print(line)
        if given.csv:
            about = {"model": encoder.spec.name, "what": name, "images": len(rows), "threads": given.threads}
            rounds = zip(taken, ratios(seconds, name), strict=True)
            write_csv(
                given.csv,
                [
                    about | {"round": number, "images_per_second": len(rows) / each, "ratio": ratio}
                    for number, (each, ratio) in enumerate(rounds)
                ],
            )


if __name__ == "__main__":
    main()
