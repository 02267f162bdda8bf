"""What the XML term costs in a training step: `python benchmarks/train_step.py [--size small]`.

Steps with and without the term alternate in one process, on one network and one batch, so that whatever else
the machine does falls on both. A step without it computes no histograms either. Printed are the medians, the
cost as the median of the pairs' ratios with its quartiles, and the loss, which must be a number.
Bounds: 2 % for ResNet-50 at 224 pixels, 5 % for ResNet-20 at 32 (with the eight prototypes and the batch of
the recipe cifar10-contrastive-xml, and with 64 prototypes). `--device cuda` measures it on a GPU.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.driving.figures import write_csv
from training.loop.processes import start_processes
from training.loop.trainee import build_optimizer
from training.losses.objective import Objective
from training.network.embedder import Embedder, build_embedder
from training.recipes.recipe import Recipe


@dataclass(frozen=True)
class Case:
    """A network, its batch and the bound on the cost."""

    name: str
    recipe: Recipe
    bound: float


def _case(
    backbone: str, *, side: int, batch: tuple[int, int], dimension: int, prototypes: int, bound: float
) -> Case:
    classes, images = batch
    recipe = Recipe(
        backbone=backbone,
        image_size=side,
        dimension=dimension,
        prototypes=prototypes,
        classes_per_batch=classes,
        images_per_class=images,
    )
    about = f"{backbone} at {side} px, batch {classes} x {images}, d {dimension}, m {prototypes}"
    return Case(about, recipe, bound)


CASES = {
    "full": [
        _case("resnet50", side=224, batch=(8, 4), dimension=512, prototypes=64, bound=0.02),
        _case("resnet20", side=32, batch=(10, 12), dimension=64, prototypes=8, bound=0.05),
        _case("resnet20", side=32, batch=(16, 4), dimension=128, prototypes=64, bound=0.05),
    ],
    "small": [_case("resnet20", side=32, batch=(4, 2), dimension=16, prototypes=8, bound=0.05)],
}


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, (median without, median with), and the share that the term adds, by quartiles."""

    seconds: tuple[float, float]
    quartiles: tuple[float, float, float]
    first: float
    """Loss with the term at the first step."""
    loss: float
    """And at the last."""


def measure(recipe: Recipe, pairs: int, *, device: str = "cpu") -> Cost:
    """Time `pairs` steps with the term and as many without, in turns, in the recipe's precision."""
    torch.manual_seed(0)
    fabric = start_processes(device, recipe)
    embedder = build_embedder(recipe).to(fabric.device).to(memory_format=torch.channels_last).train()
    size, rows = recipe.image_size, recipe.classes_per_batch * recipe.images_per_class
    pixels = torch.randint(256, (rows, size, size, 3), dtype=torch.uint8)
    labels = torch.arange(recipe.classes_per_batch).repeat_interleave(recipe.images_per_class)
    pixels, labels = pixels.to(fabric.device), labels.to(fabric.device)
    objective = Objective(recipe, classes=recipe.classes_per_batch).to(fabric.device)
    _, optimizer = fabric.setup(embedder, build_optimizer(embedder, objective, recipe))
    halves = torch.Generator().manual_seed(0)

    def with_term() -> Tensor:
        with fabric.autocast():
            features = embedder(embedder.normalise(pixels))
        terms = objective(
            features.embeddings.float(),
            features.histograms,
            labels,
            step=0,
            weight=recipe.xml_weight,
            halves=halves,
        )
        return terms.total  # type: ignore[no-any-return]

    def without() -> Tensor:
        with fabric.autocast():
            embeddings = _embed(embedder, pixels)
        return objective.loss(embeddings.float(), labels)  # type: ignore[no-any-return]

    def step(loss: Callable[[], Tensor]) -> tuple[float, float]:
        started = time.perf_counter()
        found = loss()
        fabric.backward(found)
        optimizer.step()
        optimizer.zero_grad()
        value = float(found.detach())  # waits for the device, which has all of the step to do before
        return time.perf_counter() - started, value

    _, start = step(with_term)  # both warm up
    step(without)
    taken: list[tuple[float, float]] = []
    last = float("nan")
    for first in itertools.islice(itertools.cycle((True, False)), pairs):  # neither always goes first
        order = (with_term, without) if first else (without, with_term)
        told = {each: step(each) for each in order}
        taken.append((told[without][0], told[with_term][0]))
        last = told[with_term][1]
    low, middle, high = statistics.quantiles([more / less - 1 for less, more in taken], n=4)
    medians = tuple(statistics.median(column) for column in zip(*taken, strict=True))
    return Cost((medians[0], medians[1]), (low, middle, high), start, last)


def _embed(embedder: Embedder, pixels: Tensor) -> Tensor:
    """Embed a batch as one would who knows no histograms, (B, d)."""
    maps: Tensor = embedder.head(embedder.backbone(embedder.normalise(pixels)))  # (B, d, h, w)
    return maps.mean(dim=(2, 3))


def main(words: Sequence[str]) -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=CASES, default="full")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of steps; 0: 15, or 200 for a small net")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--csv", type=Path, help="file that a row a case is added to")
    options = parser.parse_args(words)
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    for case in CASES[options.size]:
        pairs = options.pairs or (15 if case.recipe.image_size > 100 else 200)
        cost = measure(case.recipe, pairs, device=options.device)
        low, middle, high = (100 * share for share in cost.quartiles)
        print(
            f"{case.name}: {1e3 * cost.seconds[0]:.1f} ms without, {1e3 * cost.seconds[1]:.1f} ms with XML;"
            f" cost {middle:+.2f} % (quartiles {low:+.2f} to {high:+.2f}; bound {100 * case.bound:.0f} %),"
            f" loss {cost.loss:.4f}"
        )
        if options.csv:
            figures = {"without_ms": 1e3 * cost.seconds[0], "with_ms": 1e3 * cost.seconds[1]}
            quartiles = dict(zip(("first_quartile", "cost", "third_quartile"), cost.quartiles, strict=True))
            about = {"case": case.name, "device": options.device, "threads": torch.get_num_threads()}
            write_csv(options.csv, [about | {"pairs": pairs} | figures | quartiles | {"bound": case.bound}])


if __name__ == "__main__":
    main(sys.argv[1:])
