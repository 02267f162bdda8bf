"""Building the FAISS file of a gallery: vectors come by blocks, a type is built over them, it is written."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from serving.gallery.disk import file_checksum, is_full, written_aside
from serving.gallery.index.index import EXACT, Found, exact_storage, load_faiss, matrix_of, nearest, published

__all__ = ["Advance", "GivenUp", "IndexBuilder", "Untrainable"]

Advance = Callable[[str, int, int], None]
"""Called with stage, done and total as work goes on; what it raises ends the work."""

_BLOCK = 8192  # vectors added at once: a second or so of the slowest type
_TRAINING = 1 << 16  # vectors to train on; a type of many lists takes more
_PER_LIST = 40
_INNER = ("base_index", "index", "storage")  # by which FAISS's wrappers name what they wrap


class GivenUp(Exception):
    """The work was told to stop."""


class Untrainable(Exception):
    """FAISS cannot train the type on the vectors that there are."""


class IndexBuilder:
    """An index that is not published yet; of one thread. Without a type it is exact."""

    def __init__(self, dimension: int, *, threads: int) -> None:
        self.threads = threads  # of FAISS; on one query it is one
        self._exact = self.index = load_faiss().IndexFlatIP(dimension)
        self._file = _with_ids(self.index, np.empty(0, np.int64))  # what is written

    @classmethod
    def of(cls, rows: NDArray[np.float32], *, threads: int) -> Self:
        """Begin with vectors (n, d), numbered from 0."""
        builder = cls(rows.shape[1], threads=threads)
        builder.add(np.arange(len(rows)), rows)
        return builder

    @classmethod
    def read(cls, path: Path, *, checksum: str, dimension: int, threads: int) -> Self:
        """Begin with a published file, read into memory; IndexDamaged if it is another, or missing."""
        builder = cls(dimension, threads=threads)
        faiss = load_faiss()
        with published(path, checksum):
            builder._file = faiss.read_index(str(path))
            builder.index = faiss.downcast_index(builder._file.index)
        builder._exact = exact_storage(builder.index)
        return builder

    def __len__(self) -> int:
        return int(self._file.ntotal)

    @property
    def matrix(self) -> NDArray[np.float32]:
        """Its exact vectors, float32 (n, d), read-only; not to be kept beyond the next `add`."""
        return matrix_of(self._exact, (self._exact, self._file))

    def add(self, seqs: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add unit vectors (b, d), whose seqs (b,) are above all before."""
        load_faiss().omp_set_num_threads(self.threads)
        self._file.add_with_ids(vectors, seqs)

    def become(self, type_: str, advance: Advance = lambda *_: None) -> float:
        """Index the vectors anew by "exact" or a string of `full_type`; returns the seconds it took."""
        began = time.monotonic()
        faiss, made, matrix = load_faiss(), self._exact, self.matrix
        if type_ != EXACT:
            advance("train", 0, len(matrix))
            try:
                made = self._trained(type_.removesuffix(",RFlat"))
                faiss.omp_set_num_threads(self.threads)
                for start in range(0, len(matrix), _BLOCK):
                    advance("add", start, len(matrix))
                    made.add(matrix[start : start + _BLOCK])
            except (RuntimeError, MemoryError) as error:
                raise Untrainable(f"{type_} cannot be trained on {len(matrix)} vectors") from error
            advance("add", len(matrix), len(matrix))
            if type_.endswith(",RFlat"):
                made = faiss.IndexRefine(made, self._exact)  # which shares the vectors that are here
        self._file = _with_ids(made, faiss.vector_to_array(self._file.id_map))
        self.index = made
        return time.monotonic() - began

    def search(self, queries: NDArray[np.float32], count: int, *, exact: bool = False) -> Found:
        """Find the `count` nearest, as the published index would or exactly; see `index.nearest`."""
        load_faiss().omp_set_num_threads(self.threads if len(queries) > 1 else 1)
        return nearest(self._exact if exact else self.index, queries, count)

    def save(self, path: Path) -> str:
        """Write the file, on disk when this returns, whole or not at all; returns its checksum."""
        with written_aside(path) as aside:
            try:
                load_faiss().write_index(self._file, str(aside))
            except RuntimeError as error:  # whose text names FAISS's source lines, and no cause
                if is_full(path.parent):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name) from error
                raise OSError(errno.EIO, "FAISS cannot write it", path.name) from error
            checksum = file_checksum(aside)
        return checksum  # noqa: RET504 - only once the file is in its place

    def _trained(self, base: str) -> Any:
        faiss, matrix = load_faiss(), self.matrix
        # But for that of lists, training is many short steps, for which threads only wait on one another.
        faiss.omp_set_num_threads(self.threads if "IVF" in base else 1)
        made = faiss.index_factory(matrix.shape[1], base, faiss.METRIC_INNER_PRODUCT)
        size = min(len(matrix), _training_size(made))
        rows = matrix[np.linspace(0, len(matrix) - 1, size).astype(np.int64)]
        # PCA takes the mean off, which changes the order of inner products: let there be none.
        if base.startswith("PCA"):
            rows[1::2] = -rows[: size - size % 2 : 2]
        made.train(rows)
        return made


def _with_ids(index: Any, seqs: NDArray[np.int64]) -> Any:
    """Return an index whose positions are known by seqs; FAISS offers that only for an empty one."""
    faiss = load_faiss()
    index.ntotal = 0
    whole = faiss.IndexIDMap(index)
    index.ntotal = whole.ntotal = len(seqs)
    faiss.copy_array_to_vector(seqs, whole.id_map)
    return whole


def _training_size(index: Any) -> int:
    """Return how many vectors to train on, and keep FAISS from writing to the terminal if they are few."""
    faiss, size = load_faiss(), _TRAINING
    while index is not None:
        index = faiss.downcast_index(index)
        if isinstance(index, faiss.IndexIVF):
            index.cp.min_points_per_centroid = 1
            size = max(size, _PER_LIST * index.nlist)
        if hasattr(index, "pq"):
            index.pq.cp.min_points_per_centroid = 1
        if hasattr(index, "do_polysemous_training"):
            index.do_polysemous_training = False  # of no use here, and minutes long
        index = next((getattr(index, name) for name in _INNER if hasattr(index, name)), None)
    return size
