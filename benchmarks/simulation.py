"""Servers by load, parts of a gallery, a lost server, all simulated: `python benchmarks/simulation.py`.

Discrete events (SimPy) with times that were measured: of a search by image by benchmarks/replicas.py
(parts.csv), of a search by vector by the size of the gallery (sizes.csv). A server has what the real one
has: permits, a queue that refuses calls which would come too late, batches of what waits, threads that share
cores. The balancer asks the one of two that has fewer calls, makes broken calls again and throws servers out
as deploy/envoy/replicas.yaml says. Times are drawn from lognormal laws of the mean and spread that were
measured. tests/serving/test_simulation.py holds the simulator against what theory can solve.

Its rows are benchmarks/results/simulation.csv. Those of the scenario `beside` are the servers, loads and
cores of replicas.csv, and stand beside what was measured there. With --draw nothing is simulated, and
docs/figures/simulation.svg is made of the rows that there are.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.driving.figures import write_csv
from benchmarks.simulating.figure import draw
from benchmarks.simulating.scenarios import MACHINES, Row, beside, losses, replicas, shards
from benchmarks.simulating.times import largest, measured_parts, search_parts

__all__ = ["main", "rows"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)


def rows(results: Path = RESULTS) -> Iterator[Row]:
    """Simulate everything; yields its rows."""
    parts = measured_parts(results / "parts.csv")
    yield from beside(parts, results / "replicas.csv", seconds=30)
    yield from replicas(parts, (1, 3, 6), LOADS)
    sizes = results / "sizes.csv"
    items = largest(sizes)
    whole = {
        count: search_parts(sizes, items / count, handling=parts.handling) for count in (1, 2, 4, MACHINES)
    }
    yield from shards(whole, LOADS[:6])
    yield from losses(parts, 3, (0.5, 0.6, 0.75))


def main(words: Sequence[str] | None = None) -> None:
    """Write the rows and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw the rows that there are, simulate nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/simulation.svg")
    given = parser.parse_args(words)
    path = RESULTS / "simulation.csv"
    if not given.draw:
        path.unlink(missing_ok=True)
        write_csv(path, list(rows()))
    with path.open(encoding="utf-8", newline="") as file:
        draw(list(csv.DictReader(file)), given.out)


if __name__ == "__main__":
    main()
