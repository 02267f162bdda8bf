"""What runs a model how fast: `python benchmarks/providers.py MODEL.onnx [MODEL.onnx ...]`.

Each of ONNX Runtime's providers that is installed and can be started runs the same batches as the CPU
provider, in turns and in changing order, on as many threads. Printed, and written as CSV, are images a
second, their ratio to the CPU provider's in the same round (median and quartiles), and the largest difference
of a component of an embedding. The images are noise: what they show makes none faster.
"""

import argparse
import csv
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.driving.figures import median, quartiles
from serving.errors import BadSetting
from serving.model.encoder import Encoder, offered_providers

__all__ = ["main"]

_FIELDS = (
    "model", "threads", "batch", "provider", "images_per_second", "ratio", "first_quartile", "third_quartile",
    "difference", "rounds",
)  # fmt: skip


def started(path: Path, threads: int) -> dict[str, Encoder]:
    """Load a model for each provider that can be started, the CPU's first; tell which cannot."""
    found: dict[str, Encoder] = {}
    for provider in offered_providers():
        try:
            found[provider] = Encoder(path, threads=threads, provider=provider)
        except BadSetting as error:
            print(f"{provider}: {error}")
    return found


def turns(encoders: Mapping[str, Encoder], images: NDArray[np.uint8], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each takes for a batch, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for turn in range(rounds):
        for name in list(encoders)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            encoders[name].encode(images)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main(words: Sequence[str]) -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description="What runs a model how fast.")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--rounds", type=int, default=10, help="of batches of 8 and more")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/providers.csv"))
    given = parser.parse_args(words)
    print("| " + " | ".join(_FIELDS) + " |\n|" + " --- |" * len(_FIELDS))
    with given.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(_FIELDS)
        for path in given.models:
            for threads in given.threads:
                encoders = started(path, threads)
                side = encoders["cpu"].spec.image_size
                for batch in given.batches:
                    images = np.random.default_rng(0).integers(0, 256, (batch, side, side, 3), np.uint8)
                    first = {name: each.encode(images) for name, each in encoders.items()}
                    rounds = max(given.rounds, given.rounds * 8 // batch)
                    seconds = turns(encoders, images, rounds)
                    for name, own in seconds.items():
                        ratios = [cpu / each for cpu, each in zip(seconds["cpu"], own, strict=True)]
                        away = float(np.abs(first[name] - first["cpu"]).max())
                        figures = (batch / median(own), median(ratios), *quartiles(ratios), away)
                        told = [f"{figure:.4g}" for figure in figures]
                        line = [path.stem, threads, batch, name, *told, rounds]
                        table.writerow(line)
                        print("| " + " | ".join(map(str, line)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
