"""The FAISS file of a gallery: built aside, put in place at once, read with its checksum verified.

The file is derived from the store and may be lost at any time. It is an `IDMap` over an exact inner-product
index; the ids are the items' seqs, ascending, so a position in the index is a position in `seqs`.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.cores import usable_cores
from serving.errors import BadSetting
from serving.gallery.disk import is_full, sync

__all__ = ["SCORE_ERROR", "Index", "IndexDamaged", "build_index", "require_faiss"]

SCORE_ERROR = 1e-5  # float32 inner products of unit vectors are off by less, in any order of summation

_team = threading.Lock()  # held by the one search that may use every core


class IndexDamaged(Exception):
    """The FAISS file is missing, or is not the one that was published."""


def require_faiss() -> None:
    """Check that FAISS is installed.

    Raises:
        BadSetting: It is not.
    """
    _faiss()


def build_index(
    path: Path,
    blocks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]],
    *,
    dimension: int,
    proceed: Callable[[], bool] = lambda: True,
) -> tuple[str, int] | None:
    """Build an exact index and put it at `path`, on disk when this returns.

    Args:
        path: The file to make; it appears whole or not at all.
        blocks: Seqs int64 (b,), ascending over all blocks, and unit vectors float32 (b, d).
        dimension: d.
        proceed: Asked before each block; False gives up.

    Returns:
        The file's SHA-256 and the number of vectors, or None where `proceed` said no.

    Raises:
        OSError: The file cannot be written.
    """
    faiss = _faiss()
    index = faiss.IndexIDMap(faiss.IndexFlatIP(dimension))
    for seqs, vectors in blocks:
        if not proceed():
            return None
        index.add_with_ids(vectors, seqs)
    aside = path.with_name(f"{path.name}.tmp")
    try:
        _write(index, aside)
        checksum = _checksum(aside)
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    sync(path.parent)
    return checksum, int(index.ntotal)


class Index:
    """A published FAISS file, memory-mapped, never changed; safe to search from several threads.

    Mapped, an index larger than the memory can be searched, and several processes share one copy. In return
    nobody may write to a published file or shorten it: the kernel ends a process that reads a page which is
    no longer there (SIGBUS), and a change in place goes unseen. Crossbatch itself never does: a new index is
    a new file, and the old one is unlinked, which leaves it whole for who has it mapped. Whoever copies a
    gallery into the place of one that is served has to put its folder there by a rename.
    """

    def __init__(self, path: Path, *, checksum: str, dimension: int) -> None:
        """Verify and map the file.

        Raises:
            IndexDamaged: It is missing, differs from what was published, or cannot be read.
        """
        faiss = _faiss()
        try:
            found = _checksum(path)  # first of all: mapping a truncated file ends the process (SIGSEGV)
            if found != checksum:
                raise IndexDamaged(f"{path} has SHA-256 {found}, published was {checksum}")
            # FAISS before 1.11 has no mapping of flat indexes: it reads the file into memory.
            self._map = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
            self._index = faiss.downcast_index(self._map.index)
            self.bytes = path.stat().st_size  # a newer publication may sweep the file at any moment
        except (OSError, RuntimeError, AttributeError, ValueError) as error:  # NUL in a name: ValueError
            raise IndexDamaged(f"{path} cannot be read: {error}") from error
        if self._index.d != dimension:
            raise IndexDamaged(f"{path} is of dimension {self._index.d}, the gallery of {dimension}")
        self.seqs: NDArray[np.int64] = faiss.vector_to_array(self._map.id_map)  # (n,), ascending

    def __len__(self) -> int:
        return len(self.seqs)

    def search(
        self, queries: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the `count` <= n nearest of each query (Q, d), best first.

        Returns:
            Scores float32 (Q, count), to within `SCORE_ERROR`, and positions int64 (Q, count).
        """
        faiss = _faiss()
        # The number of threads is a setting of the calling thread. One search at a time may use all cores;
        # the others stay on their own thread: a server's threads do not each start a team (faiss#422).
        alone = len(queries) > 1 and _team.acquire(blocking=False)
        try:
            faiss.omp_set_num_threads(min(len(queries), usable_cores()) if alone else 1)
            scores, positions = self._index.search(queries, count)
        finally:
            if alone:
                _team.release()
        return scores, positions

    def within(self, query: NDArray[np.float32], least: float) -> NDArray[np.int64]:
        """Find all whose score with one query (d,) is above `least`; returns positions int64 (c,)."""
        faiss = _faiss()
        faiss.omp_set_num_threads(1)
        _, _, positions = self._index.range_search(query[None], least)
        return np.asarray(positions, np.int64)

    def vectors(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors at positions (c,), float32 (c, d)."""
        rows: NDArray[np.float32] = self._index.reconstruct_batch(positions)
        return rows


@cache
def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise BadSetting(
            f"FAISS, which searches galleries, cannot be loaded ({error}); "
            "install crossbatch[cpu], or crossbatch[gpu] on a machine with an NVIDIA GPU, and not both"
        ) from error
    return faiss


def _write(index: Any, path: Path) -> None:
    try:
        _faiss().write_index(index, str(path))
    except RuntimeError as error:
        if is_full(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        # FAISS's own text names its source lines, and no cause.
        raise OSError(errno.EIO, "FAISS cannot write it", str(path)) from error
    sync(path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
