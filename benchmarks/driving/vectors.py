"""Searches by vector: a gallery of drawn embeddings, its index in this process, and the same through gRPC."""

import itertools
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.embeddings import draw, split
from benchmarks.contenders.gallery import items
from benchmarks.driving import messages
from benchmarks.driving.client import Client, Target
from benchmarks.driving.figures import apart, percentile
from benchmarks.driving.served import Failed
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import RebuildPolicy
from serving.gallery.index.index import Index, IndexMetadata
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store
from serving.model.spec import ModelSpec
from serving.rpc.wire import bytes_of

__all__ = ["GALLERY", "MOST_EXTRA_MS", "bare", "compare", "fill"]

GALLERY: Final = "vectors"
MOST_EXTRA_MS: Final = 1.0
"""Bound on the latency through gRPC beyond that of FAISS alone."""
K: Final = 10
_MOST_APART: Final = 0.10


def fill(galleries: Path, spec: ModelSpec, work: Path, *, count: int, queries: int) -> NDArray[np.float32]:
    """Make a gallery of drawn vectors for a model and index it.

    Args:
        galleries: Folder of galleries.
        spec: The model's.
        work: Folder for files that are needed on the way.
        count: Items of the gallery.
        queries: Vectors that are held out.

    Returns:
        The vectors held out, float32 (queries, d).
    """
    draw(work / "drawn.npy", count + queries, spec.dimension)
    split(work / "drawn.npy", work / "items.npy", work / "queries.npy", held_out=queries)
    with GalleryDirectory(galleries, policy=RebuildPolicy(automatic=False)) as directory:
        gallery = directory.create(
            GALLERY, model_name=spec.name, fingerprint=spec.fingerprint, dimension=spec.dimension
        )
        for some in items(0, np.load(work / "items.npy", mmap_mode="r")):
            gallery.upsert(some)
        gallery.rebuild()
    held_out: NDArray[np.float32] = np.load(work / "queries.npy")
    return held_out


def bare(galleries: Path) -> Index:
    """Open the FAISS file of the gallery, with the search parameters that it was published with."""
    store = Store(galleries / GALLERY / FILE_NAME)
    try:
        with store.read() as reader:
            state = reader.state()
    finally:
        store.close()
    file, facts = galleries / GALLERY / state.index_file, IndexMetadata.from_json(state.index_facts)
    return Index(file, checksum=state.index_checksum, dimension=store.meta.dimension, facts=facts)


def compare(
    client: Client,
    address: str,
    index: Index,
    queries: NDArray[np.float32],
    work: Path,
    *,
    rounds: int,
    seconds: float,
) -> list[tuple[float, float]]:
    """Let FAISS in this process and the server take turns, one query after another.

    Returns:
        Medians of the milliseconds of a query, FAISS's and the server's, of each round that counts.

    Raises:
        Failed: A search failed.
    """
    asked = [messages.search(GALLERY, [bytes_of(query)], K) for query in queries]
    target = Target(address, messages.SEARCH, messages.write(work / "searches", asked))
    client.closed(target, in_flight=1, seconds=seconds)
    _alone(index, queries, seconds)
    found: list[tuple[float, float]] = []
    before = _alone(index, queries, seconds)
    for _ in range(3 * rounds):
        answer = client.closed(target, in_flight=1, seconds=seconds)
        after = _alone(index, queries, seconds)
        if set(answer["codes"]) != {"OK"}:
            raise Failed(f"searches by vector: {answer['said']}")
        if apart(before, after) <= _MOST_APART:
            found.append(((before + after) / 2, answer["latency_ms"]["OK"]["p50"]))
        before = after
        if len(found) == rounds:
            break
    return found


def _alone(index: Index, queries: NDArray[np.float32], seconds: float) -> float:
    """Return the median of the milliseconds that FAISS takes for a query."""
    taken: list[float] = []
    began = time.perf_counter()
    for number in itertools.cycle(range(len(queries))):
        start = time.perf_counter()
        index.search(queries[number : number + 1], K)
        taken.append(time.perf_counter() - start)
        if time.perf_counter() - began >= seconds:
            break
    return 1e3 * percentile(taken, 50)
