"""The FAISS file of a gallery as it is searched: verified, memory-mapped, never changed; what is known of it.

The file is derived from the store and may be lost at any time. It is an `IDMap` over an exact inner-product
index, over a graph whose nodes are the vectors, or over any index refined by the exact vectors: they are
always in it, so every score is exact, and what an approximate type can miss is candidates. The ids are the
items' seqs, ascending, so a position in the index is a position in `seqs`. `builder` makes it.
Its type and what was measured are not in it: they are its metadata.
"""

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from serving.cores import usable_cores
from serving.errors import BadSetting, Unavailable
from serving.gallery.disk import file_checksum

__all__ = [
    "AUTOMATIC", "EXACT", "MEASURED_K", "SCORE_ERROR", "SPARE", "SPARSE", "Found", "GpuMatrix", "Index",
    "IndexDamaged", "IndexMetadata", "Trial", "check_gpu", "exact_storage", "inner_products", "load_faiss",
    "matrix_of", "nearest", "published", "require_faiss", "set_parameters",
]  # fmt: skip

AUTOMATIC = "auto"
EXACT = "exact"
MEASURED_K = 10  # the recall of an index is that of the 10 nearest
SPARE = 16  # fetched beyond those that are wanted, for ties, where recall is measured and in each search
SPARSE = 3  # an index finds badly what passes where, near a query, less than 1 / SPARSE of its share does
SCORE_ERROR = 1e-5  # float32 inner products of unit vectors are off by less, in any order of summation

Found = tuple[NDArray[np.float32], NDArray[np.int64]]  # scores and positions (Q, count), best first

_MOST_ON_GPU = 2048  # results of one query (faiss#2103)
_COPIED = 1 << 16  # vectors copied to the GPU at once
_team = threading.Lock()  # held by the one search that may use every core
_gpu = threading.RLock()  # held by whoever uses the GPU: what all indexes share is of one thread at a time


class IndexDamaged(Exception):
    """The published index is missing, is not the one that was published, or cannot be made sense of."""


@contextmanager
def published(path: Path, checksum: str) -> Iterator[None]:
    """Read a file that was published with this checksum; IndexDamaged where that cannot be done."""
    try:
        found = file_checksum(path)  # first of all: mapping a truncated file ends the process (SIGSEGV)
        if found != checksum:
            raise IndexDamaged(f"{path} has the checksum {found}, published was {checksum}")
        yield
    except (OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:  # NUL: ValueError
        raise IndexDamaged(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Trial:
    """What a type did on a sample of the gallery."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    type: str
    recall: float
    latency_ms: float
    build_seconds: float


@dataclass(frozen=True, slots=True)
class IndexMetadata:
    """How an index was chosen, built and measured."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    type: str = EXACT  # or the FAISS factory string it was made by
    wanted: str = AUTOMATIC  # the type that was asked for: "auto", "exact" or a factory string
    wanted_recall: float = 0.99
    recall: float = 1.0  # the share of the 10 nearest that it finds
    queries: int = 0  # that the recall was measured with; 0 where nothing was
    latency_ms: float = 0.0  # median of one query on one thread
    parameters: Mapping[str, float] = field(default_factory=dict)  # nprobe, efSearch, k_factor_rf
    trials: tuple[Trial, ...] = ()
    note: str = ""  # why it is not of the type wanted; empty where it is
    count: int = 0  # of items when it was last built whole
    build_seconds: float = 0.0
    extended: int = 0  # items added since
    columns_checksum: str = ""  # of the file of its labels and metadata

    def to_json(self) -> str:
        """Return the JSON object that is stored beside the index's name."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "IndexMetadata":
        """Read what `to_json` wrote; an empty object stands for an index of which nothing is known."""
        try:
            return _STORED.validate_json(text)
        except ValueError as error:
            raise IndexDamaged(f"what is known of the index cannot be read: {error}") from error


_STORED = TypeAdapter(IndexMetadata)


def require_faiss(device: str = "cpu") -> None:
    """Raise BadSetting unless FAISS is installed and can search on a device: "cpu" or "cuda"."""
    if device not in ("cpu", "cuda"):
        raise BadSetting(f"there is no device {device!r} to search on; give cpu or cuda")
    faiss = load_faiss()
    if device == "cuda":
        check_gpu(faiss)


@cache
def load_faiss() -> Any:
    """Return the module `faiss`, or raise BadSetting; only this file imports it."""
    try:
        import faiss
    except ImportError as error:
        raise BadSetting(
            f"FAISS, which searches galleries, cannot be loaded ({error}); "
            "install crossbatch[cpu], or crossbatch[gpu] on a machine with an NVIDIA GPU, and not both"
        ) from error
    return faiss


def exact_storage(index: Any) -> Any:
    """Return the flat index with the exact vectors that is within an index, or None where there is none."""
    faiss = load_faiss()
    found = faiss.downcast_index(index)  # which keeps nothing alive: that `index` does
    if isinstance(found, faiss.IndexRefine):
        found = faiss.downcast_index(found.refine_index)
    elif isinstance(found, faiss.IndexHNSW):
        found = faiss.downcast_index(found.storage)
    return found if isinstance(found, faiss.IndexFlat) else None


def matrix_of(flat: Any, owner: Any) -> NDArray[np.float32]:
    """Return the vectors of a flat index, float32 (n, d), read-only: a view that keeps `owner` alive."""
    if not flat.ntotal:
        return np.empty((0, flat.d), np.float32)
    rows = load_faiss().rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d).reshape(flat.ntotal, flat.d)
    return np.asarray(_Lent(rows, owner))


def set_parameters(index: Any, parameters: Mapping[str, float]) -> None:
    """Set search parameters, by FAISS's names for them, in the index that has them."""
    space = load_faiss().ParameterSpace()
    for name, value in parameters.items():
        space.set_index_parameter(index, name, value)


def nearest(index: Any, queries: NDArray[np.float32], count: int) -> Found:
    """Search an index without ids; where fewer are found, the position is -1, the score minus infinity."""
    scores, positions = index.search(queries, count)
    scores[positions < 0] = -np.inf  # FAISS leaves the least float there
    return scores, positions


def inner_products(
    query: NDArray[np.float32], matrix: NDArray[np.float32], positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the scores (c,) of a query (d,) with the rows of a matrix (n, d) at positions (c,).

    It takes this thread alone: those of NumPy's library wait for one another where cores are few or busy.
    """
    faiss, scores = load_faiss(), np.empty(len(positions), np.float32)
    faiss.omp_set_num_threads(1)
    if len(positions) == len(matrix):
        faiss.fvec_inner_products_ny(*map(faiss.swig_ptr, (scores, query, matrix)), len(query), len(matrix))
    else:
        pointers = map(faiss.swig_ptr, (scores, query, matrix, positions))
        faiss.fvec_inner_products_by_idx(*pointers, len(query), 1, len(positions))
    return scores


class _Lent:
    """An array whose memory belongs to `owner`: NumPy keeps this object alive with every view of it."""

    def __init__(self, rows: NDArray[np.float32], owner: Any) -> None:
        interface = rows.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], True)}
        self._owner = owner


class Index:
    """A published FAISS file, memory-mapped, never changed; safe to search from several threads.

    Nobody may write to a published file or shorten it: the kernel ends a process that reads a page which is
    no longer there (SIGBUS). Crossbatch never does: a new index is a new file, and the old one is
    unlinked, which leaves it whole for who has it mapped.
    """

    def __init__(
        self, path: Path, *, checksum: str, dimension: int, facts: IndexMetadata, device: str = "cpu"
    ) -> None:
        """Verify and map the file, and set the search parameters that its metadata tells.

        On the device "cuda" searches compare every vector on the first GPU.
        """
        require_faiss(device)
        faiss = load_faiss()
        with published(path, checksum):
            # FAISS before 1.11 has no such mapping: it reads the file into memory.
            self._map = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
            self._index = faiss.downcast_index(self._map.index)
            set_parameters(self._index, facts.parameters)
            self.bytes = path.stat().st_size  # here, as a newer publication may sweep the file at any moment
        self._flat = exact_storage(self._index)
        if self._flat is None:
            raise IndexDamaged(f"{path} holds no exact vectors")
        if self._index.d != dimension:
            raise IndexDamaged(f"{path} is of dimension {self._index.d}, the gallery of {dimension}")
        self.facts = facts
        self.seqs: NDArray[np.int64] = faiss.vector_to_array(self._map.id_map)  # of its items (n,), ascending
        self.matrix = matrix_of(self._flat, self._map)  # their exact vectors (n, d), mapped
        self._gpu = GpuMatrix(faiss, self.matrix) if device == "cuda" else None
        # Whether a search misses none of the nearest.
        self.exact = self._gpu is not None or isinstance(self._index, faiss.IndexFlat)
        refined = isinstance(self._index, faiss.IndexRefine)
        self._base = faiss.downcast_index(self._index.base_index) if refined else self._index
        # What can be walked for some items alone.
        self.graph: Any = None if self.exact else _graph_of(self._base)

    def __len__(self) -> int:
        return len(self.seqs)

    def search(
        self, queries: NDArray[np.float32], count: int, allowed: NDArray[np.bool_] | None = None
    ) -> Found:
        """Find the `count` nearest of each query (Q, d) as `nearest` does; exact to within `SCORE_ERROR`.

        Where some are `allowed` (n,), which only a graph takes, it is those among the `count`, and the search
        is as much wider than it is set to; of a query with few of them near it (`SPARSE`), it is none.
        """
        if self._gpu is not None and count <= _MOST_ON_GPU:
            return nearest(self._gpu, queries, count)
        # The number of threads is a setting of the calling thread. One search at a time may use all cores;
        # the others stay on their own thread: a server's threads do not each start a team (faiss#422).
        alone = len(queries) > 1 and _team.acquire(blocking=False)
        try:
            threads = min(len(queries), usable_cores()) if alone else 1
            load_faiss().omp_set_num_threads(threads)
            if allowed is not None:
                return self._among(queries, count, allowed)
            return nearest(self._index if self._gpu is None else self._flat, queries, count)
        finally:
            if alone:
                _team.release()

    def _among(self, queries: NDArray[np.float32], count: int, allowed: NDArray[np.bool_]) -> Found:
        faiss, share = load_faiss(), np.count_nonzero(allowed) / len(allowed)
        width = math.ceil(self.graph.hnsw.efSearch * count / (MEASURED_K + SPARE))
        selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        options = faiss.SearchParametersHNSW(sel=selector, efSearch=min(width, len(allowed)))
        if isinstance(self._base, faiss.IndexPreTransform):
            options = faiss.SearchParametersPreTransform(index_params=options)
        if self._base is not self._index:
            factor = self._index.k_factor
            options = faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=options)
        scores, positions = self._index.search(queries, math.ceil(share * count), params=options)
        _, near = self._base.search(queries, math.ceil(count * MEASURED_K / (MEASURED_K + SPARE)))
        positions[SPARSE * (allowed[near] & (near >= 0)).mean(axis=1) < share] = -1
        scores[positions < 0] = -np.inf
        return scores, positions

    def within(self, query: NDArray[np.float32], least: float) -> NDArray[np.int64]:
        """Find all whose score with one query (d,) is above `least`, exactly: positions int64 (c,)."""
        load_faiss().omp_set_num_threads(1)
        _, _, positions = self._flat.range_search(query[None], least)
        return np.asarray(positions, np.int64)


def _graph_of(index: Any) -> Any:
    """Return the HNSW graph by which an index finds candidates, None where it has none."""
    faiss = load_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    return index if isinstance(index, faiss.IndexHNSW) else None


def check_gpu(faiss: Any) -> None:
    """Raise BadSetting where there is no GPU, or FAISS cannot use it."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise BadSetting("a GPU was asked for and this FAISS cannot use one; install crossbatch[gpu]")
    if not faiss.get_num_gpus():
        raise BadSetting("a GPU was asked for and FAISS finds none; check nvidia-smi, or take the CPU")


class GpuMatrix:
    """Vectors on the first GPU; safe to search from several threads, which wait for one another."""

    def __init__(self, faiss: Any, matrix: NDArray[np.float32]) -> None:
        """Copy the vectors (n, d) there; Unavailable where its memory is too small, or in use."""
        check_gpu(faiss)
        try:
            with _gpu:
                self._index = faiss.GpuIndexFlatIP(_resources(faiss), matrix.shape[1])
                for start in range(0, len(matrix), _COPIED):
                    self._index.add(matrix[start : start + _COPIED])
        except RuntimeError as error:
            raise Unavailable(
                f"{matrix.nbytes / 1e6:.0f} MB of vectors cannot be put on the GPU: its memory is too small "
                "or in use; search on the CPU"
            ) from error

    def search(self, queries: NDArray[np.float32], count: int) -> Found:
        """Find the `count` <= 2048 nearest of each query (Q, d)."""
        with _gpu:
            scores, positions = self._index.search(queries, count)
        return scores, positions

    def __del__(self) -> None:
        with _gpu:  # it gives memory back, whichever thread lets go of it last
            self.__dict__.clear()


@cache
def _resources(faiss: Any) -> Any:
    """Return what all indexes share: each of them would take more than a gigabyte."""
    return faiss.StandardGpuResources()
