"""Graphs and shortlists beside hnswlib: the time of one query on one core, at recall@10 of --recall.

    RIVALS/bin/python benchmarks/graphs.py --count 1000000 --dimension 512 --csv graphs.csv
    RIVALS/bin/python benchmarks/graphs.py --count 10000 --dimension 64 --kinds hnswlib PCA32,HNSW32,SQ8,RFlat

Each kind is a FAISS factory string, `hnswlib`, `symphonyqg` (that of RaBitQ's own package) or `panorama`
(FAISS's HNSW over vectors that are compared piece by piece). It is built on all cores, in a process of its
own that is given --patience seconds, and then asked one query at a time on one core with the lowest breadth
that reaches the recall; the time is the processor's, and the median of --rounds rounds over all queries. What
ends in RFlat ranks a shortlist by the exact vectors, three times as long as what is wanted. Embeddings are
those of benchmarks/search.py. There is no store, no filter and no item behind any of them: what is compared
is the search alone. Memory is what the process has more after building than with the vectors alone.

The Python wants `pip install numpy faiss-cpu hnswlib rabitqlib`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.embeddings import draw, nearest, recall, split
from benchmarks.driving.figures import write_csv
from benchmarks.driving.log import tell

__all__ = ["KINDS", "main", "measure"]

KINDS = (
    "hnswlib", "symphonyqg", "panorama", "HNSW16,SQ8,RFlat", "HNSW32,SQ8,RFlat", "PCA64,HNSW32,SQ8,RFlat",
    "PCA128,HNSW32,SQ8,RFlat", "NSG32,SQ8,RFlat",
)  # fmt: skip
_BREADTHS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
_HELD_OUT = 1_000
_DEGREE, _CONSTRUCTION = 16, 200

Search = Callable[[NDArray[np.float32], int], NDArray[np.int64]]
"""Returns the numbers of the 10 nearest to a query (1, d), as a graph of some breadth has them."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure each kind in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--recall", type=float, default=0.99)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=1800)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a kind, in such a process
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.one:
        print(json.dumps(measure(given.one, given.work, given.recall, given.rounds)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        draw(work / "drawn.npy", given.count + _HELD_OUT, given.dimension)
        split(work / "drawn.npy", work / "items.npy", work / "queries.npy", held_out=_HELD_OUT)
        (work / "drawn.npy").unlink()
        for kind in given.kinds:
            tell(f"{kind} over {given.count:,} x {given.dimension}")
            command = [sys.executable, __file__, "--one", kind, "--work", name]
            command += ["--recall", str(given.recall), "--rounds", str(given.rounds)]
            told: dict[str, Any] = {"items": given.count, "dimension": given.dimension, "kind": kind}
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, timeout=given.patience, check=True)
                told |= json.loads(done.stdout.splitlines()[-1])
            except subprocess.TimeoutExpired:
                told["note"] = f"not built in {given.patience:g} s"
            except subprocess.CalledProcessError as error:
                told["note"] = f"ended with {error.returncode}"
            rows.append(told)
    for row in rows:
        print(" | ".join(f"{name} {_told(value)}" for name, value in row.items()))
    if given.csv:
        write_csv(given.csv, rows)
    return 0


def measure(kind: str, work: Path, least: float, rounds: int) -> dict[str, Any]:
    """Build one kind and return its figures."""
    vectors: NDArray[np.float32] = np.load(work / "items.npy")
    queries: NDArray[np.float32] = np.load(work / "queries.npy")
    wanted = nearest(vectors, queries, np.ones(len(vectors), np.bool_), k=10)
    before, began = _memory(), time.monotonic()
    search = _built(kind, vectors)
    figures: dict[str, Any] = {"build_seconds": time.monotonic() - began}
    figures["memory_mb"] = (_memory() - before) / 1e6
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for breadth in _BREADTHS:
        found = [search(query[None], breadth).ravel().tolist() for query in queries]
        if (reached := recall(found, vectors, queries, wanted)) >= least:
            break
    else:
        return figures | {"recall": reached, "note": f"{least:g} is not reached"}
    times = []
    for _ in range(rounds):
        began = time.process_time()
        for query in queries:
            search(query[None], breadth)
        times.append((time.process_time() - began) / len(queries) * 1e6)
    return figures | {"breadth": breadth, "recall": reached, "microseconds": statistics.median(times)}


def _told(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _memory() -> int:
    """Return how many bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _built(kind: str, vectors: NDArray[np.float32]) -> Search:
    dimension, cores = vectors.shape[1], len(os.sched_getaffinity(0))
    if kind == "hnswlib":
        import hnswlib

        graph = hnswlib.Index("ip", dimension)
        graph.init_index(len(vectors), M=_DEGREE, ef_construction=_CONSTRUCTION)
        graph.add_items(vectors, num_threads=cores)

        def by_hnswlib(query: NDArray[np.float32], breadth: int) -> NDArray[np.int64]:
            graph.set_ef(breadth)
            return np.asarray(graph.knn_query(query, 10, num_threads=1)[0])

        return by_hnswlib
    if kind == "symphonyqg":
        import rabitqlib

        made = rabitqlib.SymqgIndex(dimension, 2 * _DEGREE, "ip")
        made.build(vectors, _CONSTRUCTION, num_threads=cores)
        return lambda query, breadth: np.asarray(made.search(query, 10, breadth, num_threads=1)[0])
    import faiss

    space = faiss.ParameterSpace()
    if kind == "panorama":  # takes distances alone, which order vectors of unit norm as cosines do
        index = faiss.IndexHNSWFlatPanorama(dimension, _DEGREE, 8)
    else:
        index = faiss.index_factory(dimension, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:: max(1, len(vectors) // 100_000)])
    index.add(vectors)
    faiss.omp_set_num_threads(1)
    if kind.endswith("RFlat"):
        space.set_index_parameter(index, "k_factor_rf", 3)

    def by_faiss(query: NDArray[np.float32], breadth: int) -> NDArray[np.int64]:
        if "NSG" in kind:
            faiss.downcast_index(index.base_index).nsg.search_L = breadth
        else:
            space.set_index_parameter(index, "efSearch", breadth)
        return np.asarray(index.search(query, 10)[1])

    return by_faiss


if __name__ == "__main__":
    sys.exit(main())
