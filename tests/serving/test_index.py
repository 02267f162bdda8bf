"""The FAISS file alone: exact scores whatever its type, whole or absent, refused when it is another."""

import gc
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.errors import BadSetting
from serving.gallery.directory import GalleryDirectory
from serving.gallery.disk import file_checksum
from serving.gallery.index import index as module
from serving.gallery.index.builder import IndexBuilder
from serving.gallery.index.choice import full_type
from serving.gallery.index.index import (
    EXACT,
    SCORE_ERROR,
    GpuMatrix,
    Index,
    IndexDamaged,
    IndexMetadata,
    load_faiss,
)
from tests.serving.vectors import units

TYPES = ["PQ8x4fs", "HNSW8,Flat", "HNSW8,SQ8", "IVF8,Flat", "SQ8", "PCA8,SQ8", "PQ2x4,Refine(SQ8)"]


def opened(path: Path, dimension: int, *, checksum: str = "", **more: Any) -> Index:
    given = {"facts": IndexMetadata(), **more}
    return Index(path, checksum=checksum or file_checksum(path), dimension=dimension, **given)


def built(folder: Path, vectors: NDArray[np.float32], seqs: NDArray[np.int64], type_: str = EXACT) -> Path:
    """Write an index, given in two blocks; its checksum is right."""
    path, half, dimension = folder / "index-1.faiss", len(seqs) // 2, vectors.shape[1]
    builder = IndexBuilder(dimension, threads=1)
    builder.add(seqs[:half], vectors[:half])
    builder.add(seqs[half:], vectors[half:])
    builder.become(full_type(type_, dimension=dimension))
    assert builder.save(path) == file_checksum(path)
    return path


@settings(max_examples=25)
@given(count=st.integers(1, 200), dimension=st.sampled_from([1, 3, 64]), queries=st.integers(1, 70))
def test_search_equals_brute_force(
    tmp_path_factory: pytest.TempPathFactory, count: int, dimension: int, queries: int
) -> None:
    vectors, asked = units(count, dimension), units(queries, dimension, 1)
    index = opened(built(tmp_path_factory.mktemp("i"), vectors, np.arange(count) * 3 + 7), dimension)
    assert index.seqs.tolist() == [3 * i + 7 for i in range(count)]
    scores, positions = index.search(asked, count)
    exact = asked.astype(np.float64) @ vectors.T.astype(np.float64)
    assert np.array_equal(np.sort(positions, axis=1), np.tile(np.arange(count), (queries, 1)))
    assert np.abs(scores - np.take_along_axis(exact, positions, axis=1)).max() < SCORE_ERROR
    assert (np.diff(scores, axis=1) <= 0).all()
    assert index.exact
    assert np.array_equal(index.matrix, vectors)
    above = set(index.within(asked[0], 0.2).tolist())
    assert set(np.flatnonzero(exact[0] > 0.2 + SCORE_ERROR)) <= above
    assert above <= set(np.flatnonzero(exact[0] > 0.2 - SCORE_ERROR))


@pytest.mark.parametrize("type_", TYPES)
def test_scores_are_exact_whatever_the_type(tmp_path: Path, type_: str) -> None:
    vectors, seqs = units(700, 16), np.arange(700) * 2 + 1
    index = opened(built(tmp_path, vectors, seqs, type_), 16)
    assert not index.exact
    assert np.array_equal(index.matrix, vectors)
    assert np.array_equal(index.seqs, seqs)
    assert not index.matrix.flags.writeable
    for count in (1, 10, 300):  # more than a graph's default breadth
        scores, positions = index.search(vectors[:40], count)
        found = positions >= 0
        assert found[:, 0].all()
        exact = np.take_along_axis(vectors[:40] @ vectors.T, np.where(found, positions, 0), axis=1)
        assert np.abs(scores - exact)[found].max() < SCORE_ERROR
        assert (scores[~found] == -np.inf).all()
        assert (scores[:, 1:] <= scores[:, :-1]).all()
        assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in positions)
    exact_row = vectors[3] @ vectors.T
    assert set(index.within(vectors[3], 0.3).tolist()) == set(np.flatnonzero(exact_row > 0.3).tolist())


def test_matrix_outlives_its_index(tmp_path: Path) -> None:
    vectors = units(3000, 32)
    matrix = opened(built(tmp_path, vectors, np.arange(3000), "PQ16x4fs"), 32).matrix
    row = matrix[2999:]
    del matrix
    gc.collect()
    (tmp_path / "index-1.faiss").unlink()
    assert np.array_equal(row, vectors[2999:])


def test_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write"):
        IndexBuilder(4, threads=1).save(tmp_path / "absent" / "index")
    assert list(tmp_path.iterdir()) == []


def test_checksum_is_of_all_bytes_whatever_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gallery.disk._HASHED", 64)
    monkeypatch.setattr("serving.gallery.disk._PIECE", 16)
    path, content = tmp_path / "file", np.random.default_rng(0).bytes(150)
    path.write_bytes(content)
    blocks = [hashlib.sha256(content[start : start + 64]).digest() for start in (0, 64, 128)]
    for cores in (1, 4):
        monkeypatch.setattr("serving.gallery.disk.usable_cores", lambda cores=cores: cores)
        assert file_checksum(path) == hashlib.sha256(b"".join(blocks)).hexdigest()


class _StandIn:
    """FAISS as it is where a GPU is: what is on the GPU may be touched by one thread at a time."""

    StandardGpuResources = object
    turn = threading.Lock()
    touched = 0
    gpus = 1

    @classmethod
    def get_num_gpus(cls) -> int:
        return cls.gpus

    class GpuIndexFlatIP:
        def __init__(self, _: object, dimension: int) -> None:
            self._index = load_faiss().IndexFlatIP(dimension)

        def add(self, vectors: NDArray[np.float32]) -> None:
            _StandIn.touch(self._index.add, vectors)

        def search(self, queries: NDArray[np.float32], count: int) -> Any:
            assert count <= 2048
            return _StandIn.touch(self._index.search, queries, count)

        def __del__(self) -> None:
            _StandIn.touch(str)

    @classmethod
    def touch(cls, work: Callable[..., Any], *given: Any) -> Any:
        assert cls.turn.acquire(blocking=False)
        cls.touched += 1
        time.sleep(0.01)
        found = work(*given)
        cls.turn.release()
        return found


def test_gpu_is_used_by_one_at_a_time_and_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = units(2500, 8)
    path = built(tmp_path, vectors, np.arange(2500), "PQ4x4fs")
    monkeypatch.setattr(module, "GpuMatrix", lambda _, matrix: GpuMatrix(_StandIn, matrix))
    monkeypatch.setattr(module, "check_gpu", lambda _: None)
    index = opened(path, 8, device="cuda")
    assert index.exact
    best = np.argsort(-(vectors[:9] @ vectors.T), axis=1, kind="stable")
    with ThreadPoolExecutor(4) as callers:
        for count in (10, 2400):  # the GPU returns no more than 2048: the rest comes from the CPU, as exact
            for _, found in callers.map(index.search, [vectors[:9]] * 4, [count] * 4):
                assert (found[:, :10] == best[:, :10]).all()
                assert found.shape == (9, count)
    touched = _StandIn.touched
    del index
    gc.collect()
    assert _StandIn.touched == touched + 1  # the memory is given back


def test_gpu_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSetting, match=r"crossbatch\[gpu\]"):
        GpuMatrix(object(), units(3, 4))
    monkeypatch.setattr(_StandIn, "gpus", 0)
    with pytest.raises(BadSetting, match="finds none"):
        GpuMatrix(_StandIn, units(3, 4))
    path = built(tmp_path, units(3, 4), np.arange(3))
    for device, text in (("cuda", "GPU"), ("tpu", "no device 'tpu'")):
        with pytest.raises(BadSetting, match=text):
            opened(path, 4, device=device)
        with pytest.raises(BadSetting, match=text):
            GalleryDirectory(tmp_path, device=device)


def test_a_search_uses_only_the_cores_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, found = opened(built(tmp_path, units(50, 4), np.arange(50)), 4), list[int]()
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    monkeypatch.setattr(load_faiss(), "omp_set_num_threads", found.append)
    for queries in (1, 2, 70):
        index.search(units(queries, 4), 1)
    assert found == [1, 2, 3]


def test_damage_is_found(tmp_path: Path) -> None:
    path = built(tmp_path, units(50, 4), np.arange(50))
    with pytest.raises(IndexDamaged, match="dimension"):
        opened(path, 5)
    for content in (path.read_bytes()[:30], b""):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(IndexDamaged, match="published was"):
            opened(tmp_path / "other", 4, checksum=file_checksum(path))
    with pytest.raises(IndexDamaged, match="cannot be read"):
        opened(tmp_path / "absent", 4, checksum="0")
    with pytest.raises(IndexDamaged, match="published was"):
        IndexBuilder.read(path, checksum="0", dimension=4, threads=1)
