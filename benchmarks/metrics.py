"""Exact MAP@R and R@k beside pytorch-metric-learning: seconds, memory, and whether the figures agree.

    python benchmarks/metrics.py [--size 1.0] [--threads 2] [--repeats 2] [--csv FILE]

At size 1 the sets have the sizes of Stanford Online Products, searched in itself, and of In-Shop, queries in
a gallery. Each measurement is a process of its own, the two packages take turns, and the best of their
repeats counts. Memory is what the process grows by at its peak, beyond packages and embeddings, as Linux
tells it. Where two images are equally near to within float32, the figures may differ by a query: at the size
of SOP by one of 60,502, of which float64 says that crossbatch ranks it right.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.driving.figures import write_csv

__all__ = ["CASES", "Case", "compare", "rows", "table"]

PACKAGES: Final = ("crossbatch", "pytorch-metric-learning")
FIGURES: Final = ("R@1", "R-precision", "MAP@R")
_DIMENSION: Final = 512

Measure = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """A data set's size."""

    classes: int
    queries: int
    gallery: int = 0
    """Images that queries are searched in; each is searched among the others when 0."""


CASES: Final[Mapping[str, Case]] = {"sop": Case(11_316, 60_502), "inshop": Case(3_985, 14_218, 12_612)}


def compare(case: str, *, size: float = 1.0, threads: int = 2, repeats: int = 2) -> dict[str, dict[str, Any]]:
    """Measure both packages on one case, in turns.

    Returns:
        By package: `seconds` (the least), `mebibytes` (the most), and its `figures`, by their names in 0..1.
    """
    found: dict[str, list[dict[str, Any]]] = {package: [] for package in PACKAGES}
    for _ in range(repeats):
        for package in PACKAGES:
            found[package].append(_in_a_process(package, case, size, threads))
    return {
        package: {
            "seconds": min(one["seconds"] for one in some),
            "mebibytes": max(one["mebibytes"] for one in some),
            "figures": some[0]["figures"],
        }
        for package, some in found.items()
    }


def table(case: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out what `compare` gave."""
    lines = [f"{case:<26}{'seconds':>9}{'MiB':>8}" + "".join(f"{name:>13}" for name in FIGURES)]
    for package, one in found.items():
        figures = "".join(f"{100 * one['figures'][name]:11.3f} %" for name in FIGURES)
        lines.append(f"  {package:<24}{one['seconds']:9.2f}{one['mebibytes']:8.0f}{figures}")
    ours, theirs = (found[package] for package in PACKAGES)
    difference = max(abs(ours["figures"][name] - theirs["figures"][name]) for name in FIGURES)
    times = theirs["seconds"] / ours["seconds"]
    lines.append(f"  {times:.2f} times as fast; the figures differ by at most {difference:.1e}")
    return "\n".join(lines)


def rows(case: str, found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """Give a row a package, with how many times as fast as pytorch-metric-learning it is."""
    slowest = found[PACKAGES[1]]["seconds"]
    return [
        {"case": case, "package": package, "times": slowest / one["seconds"]}
        | {name: one[name] for name in ("seconds", "mebibytes")}
        | one["figures"]
        for package, one in found.items()
    ]


def main(words: Sequence[str]) -> None:
    """Print a table for each case, or with --package one measurement as JSON."""
    parser = argparse.ArgumentParser(description="Exact retrieval metrics beside pytorch-metric-learning.")
    parser.add_argument("--size", type=float, default=1.0, help="share of the images and of the classes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", choices=CASES, help="this one only")
    parser.add_argument("--package", choices=PACKAGES, help="measure this one once, in this process")
    parser.add_argument("--csv", type=Path, help="file that a row a package is added to")
    given = parser.parse_args(words)
    if given.package:
        print(json.dumps(_measure(given.package, CASES[given.case], given.size)))
        return
    for case in [given.case] if given.case else CASES:
        found = compare(case, size=given.size, threads=given.threads, repeats=given.repeats)
        print(table(case, found))
        if given.csv:
            write_csv(given.csv, rows(case, found))


def _in_a_process(package: str, case: str, size: float, threads: int) -> dict[str, Any]:
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["--package", package, "--case", case, "--size", str(size)]
    output = subprocess.run(
        [sys.executable, __file__, *words],
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    measured: dict[str, Any] = json.loads(output)
    return measured


def _measure(package: str, case: Case, size: float) -> dict[str, Any]:
    measure = {"crossbatch": _ours, "pytorch-metric-learning": _theirs}[package]()
    queries, labels = _draw(case, round(case.queries * size), size, seed=0)
    gallery, gallery_labels = None, None
    if case.gallery:
        gallery, gallery_labels = _draw(case, round(case.gallery * size), size, seed=1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of what was resident starts anew from here
    before = _peak()
    started = time.perf_counter()
    figures = measure(queries, labels, gallery, gallery_labels)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "mebibytes": _peak() - before, "figures": figures}


def _peak() -> float:
    """Most memory that this process had resident, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status does not tell VmHWM")


def _draw(case: Case, count: int, size: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw unit embeddings, float32 (count, d), about a centre a class, and their classes in order."""
    classes = max(1, round(case.classes * size))
    centres = torch.randn(classes, _DIMENSION, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(count) * classes // count
    vectors = torch.randn(count, _DIMENSION, generator=torch.Generator().manual_seed(seed))
    for rows in torch.split(torch.arange(count), 1024):
        vectors[rows] = functional.normalize(3 * vectors[rows] + centres[labels[rows]], dim=1)
    return vectors, labels


def _ours() -> Measure:
    from training.evaluation.metrics import retrieval_metrics

    def measure(
        queries: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None
    ) -> dict[str, float]:
        roles = None
        if gallery is not None and gallery_labels is not None:
            roles = ["query"] * len(queries) + ["gallery"] * len(gallery)
            queries, labels = torch.cat((queries, gallery)), torch.cat((labels, gallery_labels))
        found = retrieval_metrics(queries, labels, roles=roles)
        return dict(zip(FIGURES, (found.recall_at[1], found.r_precision, found.map_at_r), strict=True))

    return measure


def _theirs() -> Measure:
    import faiss  # noqa: F401  loaded on the first search otherwise, which would count it
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=names, k="max_bin_count", device=torch.device("cpu"))

    def measure(
        queries: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None
    ) -> dict[str, float]:
        itself = gallery is None
        found = calculator.get_accuracy(
            queries,
            labels,
            queries if itself else gallery,
            labels if itself else gallery_labels,
            ref_includes_query=itself,
        )
        return {ours: float(found[theirs]) for ours, theirs in zip(FIGURES, names, strict=True)}

    return measure


if __name__ == "__main__":
    main(sys.argv[1:])
