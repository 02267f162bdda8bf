"""Trying a FAISS factory string in a process of its own: what ends or fills that one harms nobody.

python -m serving.gallery.index.trial TYPE DIMENSION
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

__all__ = ["TrialFailed", "full_type_by_trial", "reason_of"]

_SECONDS = 20  # of work
_PATIENCE = 60.0  # seconds until it has come to work so long, on a busy machine
_MEMORY = 2 << 30  # bytes, beside what is loaded
_SIZES = (1, 60, 2000)  # vectors
_MOST_COMPONENTS = 1 << 24
_LISTS = "IVF16"  # so few that they can be trained on so few vectors
_REASON = re.compile(r"Error: '.*' failed: (.+)", re.DOTALL)


class TrialFailed(Exception):
    """The type cannot be used; the message says why."""


def full_type_by_trial(wanted: str, dimension: int) -> str:
    """Return the factory string that an index of a type is made by, with the exact vectors in it.

    Raises:
        TrialFailed: FAISS makes no such index of this dimension, or could not build and search a small one.
    """
    command = [sys.executable, "-m", __name__, wanted, str(dimension)]
    # The same code as here, on one core.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TrialFailed("it takes too long to build") from error
    if done.returncode < 0:
        raise TrialFailed(f"FAISS dies of it, by signal {-done.returncode}, or does not end")
    try:
        told = json.loads(done.stdout)
        if "type" in told:
            return str(told["type"])
        reason = str(told["reason"])
    except (ValueError, KeyError, TypeError):
        reason = f"a trial ended with status {done.returncode}"
    raise TrialFailed(reason)


def reason_of(message: str) -> str:
    """Return what FAISS says in an error, without its function and line."""
    found = _REASON.search(message)
    text = found[1] if found else message.rsplit(": ", 1)[-1]
    if "metric == METRIC_L2" in text or "METRIC_L2" in message:
        text = "it does not search by inner product"
    return " ".join(text.split()).rstrip(".")[:200]


def _main(wanted: str, dimension: int) -> dict[str, str]:
    """Build small indexes of the type as a rebuild would, and search them as a gallery would."""
    from serving.gallery.index.index import exact_storage, load_faiss

    faiss = load_faiss()
    _bound()
    try:
        made = faiss.index_factory(dimension, wanted, faiss.METRIC_INNER_PRODUCT)
        full = wanted if exact_storage(made) is not None else f"{wanted},RFlat"
        faiss.index_factory(dimension, full, faiss.METRIC_INNER_PRODUCT)
        for size in _SIZES:
            _use(re.sub(r"IVF\d+", _LISTS, full), min(size, max(1, _MOST_COMPONENTS // dimension)), dimension)
    except (RuntimeError, MemoryError, TypeError, ValueError) as error:
        return {"reason": reason_of(str(error)) or "it wants too much memory"}
    return {"type": full}


def _use(type_: str, size: int, dimension: int) -> None:
    from serving.gallery.index.draft import Draft, Untrainable
    from serving.gallery.index.index import Index
    from serving.gallery.index.kind import Facts
    from serving.gallery.index.tuning import prepared, tuned

    rows = np.random.default_rng(0).standard_normal((size + 40, dimension)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    draft = Draft.of(rows[:size], threads=1)
    try:
        draft.become(type_)
    except Untrainable:
        return
    parameters = tuned(draft, prepared(draft), 0.9).parameters
    draft.add(np.arange(size, size + 40), rows[size:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.faiss"
        checksum = draft.save(path)
        index = Index(
            path, checksum=checksum, dimension=dimension, facts=Facts(type=type_, parameters=parameters)
        )
        for queries in (rows[:1], rows[:40]):
            index.search(queries, min(26, len(index)))
            index.search(queries, len(index))


def _bound() -> None:
    """Let this process take so much memory and time and no more, and leave no trace when it dies."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
    statm = Path("/proc/self/statm")
    if statm.exists():
        loaded = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (loaded + _MEMORY, loaded + _MEMORY))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_main(sys.argv[1], int(sys.argv[2]))))
