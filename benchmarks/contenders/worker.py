"""The process of one contender: `python -m benchmarks.contenders.worker NAME FOLDER --cores N`.

It reads a request a line on standard input, as JSON, and answers each by a line. What libraries print goes
to standard error. NAME is `module` or `module=argument`; `make(folder, argument)` of that module gives the
contender.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contender import Contender
from benchmarks.driving.served import family

__all__ = ["Worker", "main"]

_AT_ONCE = 64  # queries that are answered together where nothing is timed


class Worker:
    """Answers requests about one contender; each method is a request."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self._contender = contender
        self._folder = folder
        self._queries: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def build(self, vectors: str, count: int) -> dict[str, Any]:
        """Store and index the first `count` vectors of a file."""
        built = self._contender.build(np.load(vectors, mmap_mode="r")[:count])
        self._contender.close()
        return asdict(built) | {"disk_bytes": _size(self._folder)}

    def open(self, queries: str) -> dict[str, Any]:
        """Open what was built and answer the first query."""
        self._queries = np.load(queries)
        self._contender.open()
        self._contender.search(self._queries[:1], 1, None)
        return {"ladder": list(self._contender.ladder)}

    def set(self, value: int) -> dict[str, Any]:
        """Take a value of the ladder."""
        self._contender.set(value)
        return {}

    def answer(self, k: int, below: int | None = None) -> dict[str, Any]:
        """Answer every query, untimed."""
        found = [
            numbers
            for start in range(0, len(self._queries), _AT_ONCE)
            for numbers in self._contender.search(self._queries[start : start + _AT_ONCE], k, below)
        ]
        return {"found": found}

    def time(self, k: int, batch: int, seconds: float, below: int | None = None) -> dict[str, Any]:
        """Search in calls of `batch` queries, one after another, for so long or a little longer."""
        taken: list[float] = []
        batches = self._batches(batch)
        began = time.perf_counter()
        while not taken or time.perf_counter() - began < seconds:
            queries = next(batches)
            started = time.perf_counter()
            self._contender.search(queries, k, below)
            taken.append(time.perf_counter() - started)
        return {
            "queries_per_second": batch * len(taken) / sum(taken),
            "p50_ms": 1e3 * float(np.percentile(taken, 50)),
            "p99_ms": 1e3 * float(np.percentile(taken, 99)),
        }

    def change(self, vectors: str, first: int, count: int, deleted: list[int]) -> dict[str, Any]:
        """Add `count` of a file's vectors from number `first` on, and delete some items."""
        more = np.load(vectors, mmap_mode="r")[first : first + count]
        started = time.perf_counter()
        self._contender.change(first, more, deleted)
        return {"seconds": time.perf_counter() - started}

    def memory(self) -> dict[str, Any]:
        """Tell what is resident of this process, its children and its servers, pages shared counted once."""
        anonymous = mapped = 0
        for process in family(os.getpid(), *self._contender.servers()):
            found = _rollup(process)
            anonymous += found.get("Pss_Anon", 0) + found.get("Pss_Shmem", 0)
            mapped += found.get("Pss_File", 0)
        return {"anonymous_bytes": 1024 * anonymous, "mapped_bytes": 1024 * mapped}

    def close(self) -> dict[str, Any]:
        """Let go of everything."""
        self._contender.close()
        return {}

    def _batches(self, batch: int) -> Iterator[NDArray[np.float32]]:
        start = 0
        while True:
            rows = np.arange(start, start + batch) % len(self._queries)
            yield np.ascontiguousarray(self._queries[rows])
            start += batch


def main(words: list[str]) -> None:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser(description="The process of one contender.")
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cores", type=int, default=0, help="cores it and its servers may use; 0: all")
    given = parser.parse_args(words)
    if given.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, argument = given.name.partition("=")
    given.folder.mkdir(parents=True, exist_ok=True)
    contender = importlib.import_module(f"benchmarks.contenders.{module}").make(given.folder, argument)
    worker = Worker(contender, given.folder)
    for line in sys.stdin:
        request: Mapping[str, Any] = json.loads(line)
        options = {name: value for name, value in request.items() if name != "do"}
        answers.write(json.dumps(getattr(worker, request["do"])(**options)) + "\n")
        answers.flush()


def _size(folder: Path) -> int:
    """Return the bytes on disk of a folder's files."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def _rollup(process: int) -> dict[str, int]:
    """Return the kibibytes that Linux tells of a process's resident memory, by name."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    pairs = (line.split()[:2] for line in lines)
    return {name.rstrip(":"): int(value) for name, value in pairs}


if __name__ == "__main__":
    main(sys.argv[1:])
