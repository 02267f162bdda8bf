"""An index in the making: vectors come block by block, types are built over them, a file is written."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from serving.gallery.checksum import file_checksum
from serving.gallery.disk import is_full, written_aside
from serving.gallery.index.index import exact_storage, load_faiss, matrix_of, nearest, set_parameters
from serving.gallery.index.kind import EXACT, IndexDamaged

__all__ = ["Draft", "GivenUp", "Untrainable"]

_BLOCK = 8192  # vectors added at once: a second or so of the slowest type
_TRAINING = 1 << 16  # vectors to train on; a type of many lists takes more
_PER_LIST = 40
_INNER = ("base_index", "index", "storage")  # by which FAISS's wrappers name what they wrap


class GivenUp(Exception):
    """The work was told to stop."""


class Untrainable(Exception):
    """FAISS cannot train the type on the vectors that there are."""


class Draft:
    """An index that is not published yet; of one thread. Without a type it is exact."""

    def __init__(self, dimension: int, *, threads: int) -> None:
        """Begin without vectors; FAISS works on them with so many threads, and on one query with one."""
        faiss = load_faiss()
        self.threads = threads
        self._flat = faiss.IndexFlatIP(dimension)
        self._index = self._flat
        self._owner: Any = self._flat
        self._seqs = [np.empty(0, np.int64)]

    @classmethod
    def of(cls, rows: NDArray[np.float32], *, threads: int) -> Self:
        """Begin with vectors (n, d), numbered from 0."""
        draft = cls(rows.shape[1], threads=threads)
        draft.add(np.arange(len(rows)), rows)
        return draft

    @classmethod
    def read(cls, path: Path, *, checksum: str, dimension: int, threads: int) -> Self:
        """Begin with a published file, read into memory.

        Raises:
            IndexDamaged: It is missing, or not what was published.
        """
        draft = cls(dimension, threads=threads)
        faiss = load_faiss()
        try:
            if file_checksum(path) != checksum:
                raise IndexDamaged(f"{path} is not the index that was published")
            draft._owner = faiss.read_index(str(path))
        except (OSError, RuntimeError) as error:
            raise IndexDamaged(f"{path} cannot be read: {error}") from error
        draft._index = faiss.downcast_index(draft._owner.index)
        draft._flat = exact_storage(draft._index)
        draft._seqs = [faiss.vector_to_array(draft._owner.id_map)]
        return draft

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        """The length d of its vectors."""
        return int(self._flat.d)

    @property
    def seqs(self) -> NDArray[np.int64]:
        """The seqs of its vectors, int64 (n,), in the order in which they came."""
        if len(self._seqs) > 1:
            self._seqs = [np.concatenate(self._seqs)]
        return self._seqs[0]

    @property
    def matrix(self) -> NDArray[np.float32]:
        """Its exact vectors, float32 (n, d), read-only; not to be kept beyond the next `add`."""
        return matrix_of(self._flat, (self._flat, self._owner))

    @property
    def knobs(self) -> frozenset[str]:
        """The names of the search parameters that its type has."""
        space = load_faiss().ParameterSpace()
        space.initialize(self._index)
        ranges = space.parameter_ranges
        return frozenset(ranges.at(i).name for i in range(ranges.size()))

    def add(self, seqs: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add unit vectors (b, d), whose seqs (b,) are above all before."""
        load_faiss().omp_set_num_threads(self.threads)
        self._index.add(vectors)
        self._seqs.append(seqs)

    def become(self, type_: str, advance: Callable[[str, int, int], None] = lambda *_: None) -> float:
        """Index the vectors anew by another type; returns the seconds it took.

        Args:
            type_: "exact", or a factory string that `factory.full_type` returned.
            advance: Called with stage, done and total; what it raises ends the work.

        Raises:
            Untrainable: There are too few vectors for it.
        """
        began = time.monotonic()
        self._index = self._flat
        if type_ == EXACT:
            return 0.0
        faiss = load_faiss()
        matrix = self.matrix
        refined = type_.endswith(",RFlat")
        advance("train", 0, len(matrix))
        # But for that of lists, training is many short steps, for which threads only wait on one another.
        faiss.omp_set_num_threads(self.threads if "IVF" in type_ else 1)
        with _named(type_, len(matrix)):
            base = faiss.index_factory(
                matrix.shape[1], type_.removesuffix(",RFlat"), faiss.METRIC_INNER_PRODUCT
            )
            base.train(_spread(matrix, _training_size(base)))
            made = faiss.IndexRefineFlat(base) if refined else base
        faiss.omp_set_num_threads(self.threads)
        for start in range(0, len(matrix), _BLOCK):
            advance("add", start, len(matrix))
            with _named(type_, len(matrix)):
                base.add(matrix[start : start + _BLOCK])
        advance("add", len(matrix), len(matrix))
        if refined:  # by the vectors that are here already: FAISS offers only to add them once more
            owned = self._flat.thisown
            made.refine_index, made.own_refine_index, made.ntotal = self._flat, False, base.ntotal
            self._flat.thisown = (
                owned  # which the wrapper gives up at such an assignment, and would never free
            )
        self._index = made
        return time.monotonic() - began

    def set_parameters(self, parameters: Mapping[str, float]) -> None:
        """Set search parameters; those not named stay."""
        set_parameters(self._index, parameters)

    def search(
        self, queries: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the `count` nearest as the published index would; see `index.nearest`."""
        load_faiss().omp_set_num_threads(self.threads if len(queries) > 1 else 1)
        return nearest(self._index, queries, count)

    def exact(
        self, queries: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the `count` nearest by comparing every vector."""
        load_faiss().omp_set_num_threads(self.threads)
        return nearest(self._flat, queries, count)

    def save(self, path: Path) -> str:
        """Write the file at `path`, on disk when this returns; it appears whole or not at all.

        Returns:
            Its checksum.

        Raises:
            OSError: The file cannot be written.
        """
        faiss = load_faiss()
        empty = faiss.IndexFlatIP(self._index.d)
        whole = faiss.IndexIDMap(empty)  # which refuses an index that is not empty
        owned = self._index.thisown
        whole.index, whole.ntotal = self._index, self._index.ntotal
        self._index.thisown = owned  # as in `become`
        faiss.copy_array_to_vector(self.seqs, whole.id_map)
        with written_aside(path) as aside:
            try:
                faiss.write_index(whole, str(aside))
            except RuntimeError as error:
                if is_full(path.parent):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name) from error
                # FAISS's own text names its source lines, and no cause.
                raise OSError(errno.EIO, "FAISS cannot write it", path.name) from error
            checksum = file_checksum(aside)
        return checksum  # noqa: RET504 - only once the file is in its place


@contextmanager
def _named(type_: str, count: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise Untrainable(f"{type_} cannot be trained on {count} vectors") from error


def _training_size(index: Any) -> int:
    """Return how many vectors to train on, and keep FAISS from writing to the terminal if they are few."""
    faiss = load_faiss()
    size = _TRAINING
    inner = faiss.downcast_index(index)
    while True:
        if isinstance(inner, faiss.IndexIVF):
            inner.cp.min_points_per_centroid = 1
            size = max(size, _PER_LIST * inner.nlist)
        if hasattr(inner, "pq"):
            inner.pq.cp.min_points_per_centroid = 1
        below = next((name for name in _INNER if hasattr(inner, name)), None)
        if below is None:
            return size
        inner = faiss.downcast_index(getattr(inner, below))


def _spread(matrix: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Return at most `count` rows of a matrix (n, d), evenly spread over it."""
    if len(matrix) <= count:
        return matrix
    return matrix[np.linspace(0, len(matrix) - 1, count).astype(np.int64)]
