"""The FAISS file alone: exact scores whatever its type, whole or absent, refused when it is another."""

import gc
import hashlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.errors import BadSetting
from serving.gallery.checksum import file_checksum
from serving.gallery.directory import GalleryDirectory
from serving.gallery.index import index as module
from serving.gallery.index.builder import IndexBuilder
from serving.gallery.index.factory import full_type
from serving.gallery.index.gpu import GpuMatrix
from serving.gallery.index.index import SCORE_ERROR, Index
from serving.gallery.index.metadata import EXACT, IndexDamaged, IndexMetadata


def units(count: int, dimension: int, seed: int = 0) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((count, dimension))
    units: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return units


def built(folder: Path, vectors: NDArray[np.float32], seqs: NDArray[np.int64], type_: str = EXACT) -> Index:
    path = folder / "index-1.faiss"
    draft = IndexBuilder(vectors.shape[1], threads=1)
    half = len(seqs) // 2
    draft.add(seqs[:half], vectors[:half])
    draft.add(seqs[half:], vectors[half:])
    draft.become(full_type(type_, dimension=vectors.shape[1]))
    return Index(path, checksum=draft.save(path), dimension=vectors.shape[1], facts=IndexMetadata())


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 200), dimension=st.sampled_from([1, 3, 64]), queries=st.integers(1, 70))
def test_search_equals_brute_force(
    tmp_path_factory: pytest.TempPathFactory, count: int, dimension: int, queries: int
) -> None:
    vectors, asked = units(count, dimension), units(queries, dimension, 1)
    index = built(tmp_path_factory.mktemp("index"), vectors, np.arange(count) * 3 + 7)
    assert index.seqs.tolist() == [3 * i + 7 for i in range(count)]
    scores, positions = index.search(asked, count)
    exact = asked.astype(np.float64) @ vectors.T.astype(np.float64)
    assert np.array_equal(np.sort(positions, axis=1), np.tile(np.arange(count), (queries, 1)))
    assert np.abs(scores - np.take_along_axis(exact, positions, axis=1)).max() < SCORE_ERROR
    assert (np.diff(scores, axis=1) <= 0).all()
    assert index.exact
    assert np.array_equal(index.matrix, vectors)
    above = index.within(asked[0], 0.2)
    certain = set(np.flatnonzero(exact[0] > 0.2 + SCORE_ERROR))
    possible = set(np.flatnonzero(exact[0] > 0.2 - SCORE_ERROR))
    assert certain <= set(above.tolist()) <= possible


TYPES = [
    "PQ8x4fs",
    "HNSW8,Flat",
    "HNSW8,SQ8",
    "IVF8,Flat",
    "IVF8,PQ8x4fs,RFlat",
    "SQ8",
    "PCA8,SQ8",
    "PQ2x4,Refine(SQ8)",
]


@pytest.mark.parametrize("type_", TYPES)
def test_scores_are_exact_whatever_the_type(tmp_path: Path, type_: str) -> None:
    vectors = units(700, 16)
    seqs = np.arange(700) * 2 + 1
    index = built(tmp_path, vectors, seqs, type_)
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


def test_scores_are_the_same_however_many_queries_there_are(tmp_path: Path) -> None:
    """FAISS multiplies few queries and many in different ways; batches of any size are to find the same."""
    index, queries = built(tmp_path, units(3000, 32), np.arange(3000)), units(300, 32, seed=1)
    scores, found = index.search(queries, 5)
    for size in (1, 2, 19, 20, 64):
        few, same = index.search(queries[:size], 5)
        assert (same == found[:size]).all()
        assert np.abs(few - scores[:size]).max() <= 2e-6


def test_fewer_than_wanted_are_padded(tmp_path: Path) -> None:
    vectors = units(64, 8)
    index = built(tmp_path, vectors, np.arange(64), "IVF16,Flat")  # one list of sixteen is searched
    scores, positions = index.search(vectors[:5], 64)
    assert (positions == -1).any(axis=1).all()
    assert np.array_equal(positions == -1, scores == -np.inf)


def test_parameters_are_set_once_and_raise_the_recall(tmp_path: Path) -> None:
    vectors = units(2000, 16)
    narrow = built(tmp_path, vectors, np.arange(2000), "IVF64,PQ8x4fs")
    path = tmp_path / "index-1.faiss"
    facts = IndexMetadata(parameters={"nprobe": 64, "k_factor_rf": 20})
    wide = Index(path, checksum=file_checksum(path), dimension=16, facts=facts)
    best = np.argsort(-(vectors[:50] @ vectors.T), axis=1)[:, :10]
    shares = [
        np.mean([len(set(a) & set(b)) for a, b in zip(best, index.search(vectors[:50], 10)[1], strict=True)])
        / 10
        for index in (narrow, wide)
    ]
    assert shares[0] < 0.6
    assert shares[1] > 0.95


def test_matrix_outlives_its_index(tmp_path: Path) -> None:
    vectors = units(3000, 32)
    matrix = built(tmp_path, vectors, np.arange(3000), "PQ16x4fs").matrix
    row = matrix[2999:]
    del matrix
    gc.collect()
    (tmp_path / "index-1.faiss").unlink()
    assert np.array_equal(row, vectors[2999:])


@pytest.mark.parametrize(
    ("type_", "parameters"),
    [
        ("exact", {}),
        ("PQ8x4fs", {"k_factor_rf": 64}),
        ("HNSW8,SQ8", {"efSearch": 64, "k_factor_rf": 2}),
        ("HNSW8,Flat", {"efSearch": 64}),
        ("IVF8,Flat", {"nprobe": 8}),
    ],
)
def test_file_that_was_read_can_be_added_to(tmp_path: Path, type_: str, parameters: dict[str, float]) -> None:
    vectors = units(900, 16)
    built(tmp_path, vectors[:600], np.arange(600), type_)
    path = tmp_path / "index-1.faiss"
    builder = IndexBuilder.read(path, checksum=file_checksum(path), dimension=16, threads=1)
    builder.add(np.arange(700, 1000), vectors[600:])
    facts = IndexMetadata(parameters=parameters)
    index = Index(path, checksum=builder.save(path), dimension=16, facts=facts)
    assert np.array_equal(index.matrix, vectors)
    assert index.seqs.tolist() == [*range(600), *range(700, 1000)]
    _, positions = index.search(vectors, 1)
    assert (positions[:, 0] == np.arange(900)).mean() > 0.98
    with pytest.raises(IndexDamaged):
        IndexBuilder.read(path, checksum="0" * 64, dimension=16, threads=1)


def test_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write"):
        IndexBuilder(4, threads=1).save(tmp_path / "absent" / "index")
    assert list(tmp_path.iterdir()) == []


def test_checksum_is_of_every_byte_whatever_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.gallery.checksum._BLOCK", 64)
    monkeypatch.setattr("serving.gallery.checksum._PIECE", 16)
    path = tmp_path / "file"
    content = np.random.default_rng(0).bytes(150)
    path.write_bytes(content)
    blocks = [hashlib.sha256(content[start : start + 64]).digest() for start in (0, 64, 128)]
    expected = hashlib.sha256(b"".join(blocks)).hexdigest()
    for cores in (1, 4):
        monkeypatch.setattr("serving.gallery.checksum.usable_cores", lambda cores=cores: cores)
        assert file_checksum(path) == expected
    for place in (0, 63, 64, 149):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert file_checksum(path) != expected


class _StandIn:
    """FAISS as it is where a GPU is: what is on the GPU may be touched by one thread alone."""

    StandardGpuResources = object
    threads: ClassVar[set[str]] = set()
    gpus = 1

    @classmethod
    def get_num_gpus(cls) -> int:
        return cls.gpus

    class GpuIndexFlatIP:
        def __init__(self, _: object, dimension: int) -> None:
            import faiss

            self._index = faiss.IndexFlatIP(dimension)

        def add(self, vectors: NDArray[np.float32]) -> None:
            _StandIn.threads.add(threading.current_thread().name)
            self._index.add(vectors)

        def search(self, queries: NDArray[np.float32], count: int) -> Any:
            _StandIn.threads.add(threading.current_thread().name)
            assert count <= 2048
            return self._index.search(queries, count)

        def __del__(self) -> None:
            _StandIn.threads.add(threading.current_thread().name)


def test_gpu_is_used_by_one_thread_and_answers_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = units(2500, 8)
    path = tmp_path / "index-1.faiss"
    built(tmp_path, vectors, np.arange(2500), "PQ4x4fs")
    monkeypatch.setattr(module, "GpuMatrix", lambda _, matrix: GpuMatrix(_StandIn, matrix))
    monkeypatch.setattr(module, "check_gpu", lambda _: None)
    index = Index(path, checksum=file_checksum(path), dimension=8, facts=IndexMetadata(), device="cuda")
    assert index.exact
    _check_from_threads(index, vectors)
    del index
    gc.collect()
    GpuMatrix(_StandIn, vectors[:1])  # its jobs come after the one that gave back the memory
    assert len(_StandIn.threads) == 1
    assert threading.current_thread().name not in _StandIn.threads


def _check_from_threads(index: Index, vectors: NDArray[np.float32]) -> None:
    best = np.argsort(-(vectors[:9] @ vectors.T), axis=1, kind="stable")
    for count in (10, 2400):  # the GPU returns no more than 2048: the rest comes from the CPU, as exact
        with ThreadPoolExecutor(4) as callers:
            found = list(callers.map(lambda _: index.search(vectors[:9], count)[1], range(4)))  # noqa: B023
        for positions in found:
            assert (positions[:, :10] == best[:, :10]).all()
            assert positions.shape == (9, count)


def test_gpu_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSetting, match=r"crossbatch\[gpu\]"):
        GpuMatrix(object(), units(3, 4))
    monkeypatch.setattr(_StandIn, "gpus", 0)
    with pytest.raises(BadSetting, match="finds none"):
        GpuMatrix(_StandIn, units(3, 4))
    built(tmp_path, units(3, 4), np.arange(3))
    path = tmp_path / "index-1.faiss"
    for device, text in (("cuda", "GPU"), ("tpu", "no device 'tpu'")):
        with pytest.raises(BadSetting, match=text):
            Index(path, checksum=file_checksum(path), dimension=4, facts=IndexMetadata(), device=device)
        with pytest.raises(BadSetting, match=text):
            GalleryDirectory(tmp_path, device=device)


def test_a_search_uses_only_the_cores_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faiss = module.load_faiss()
    index, found = built(tmp_path, units(50, 4), np.arange(50)), list[int]()
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    monkeypatch.setattr(faiss, "omp_set_num_threads", found.append)
    for queries in (1, 2, 70):
        index.search(units(queries, 4), 1)
    assert found == [1, 2, 3]


def test_damage_is_found(tmp_path: Path) -> None:
    built(tmp_path, units(50, 4), np.arange(50))
    path = tmp_path / "index-1.faiss"
    whole = path.read_bytes()
    checksum = file_checksum(path)
    with pytest.raises(IndexDamaged, match="dimension"):
        Index(path, checksum=checksum, dimension=5, facts=IndexMetadata())
    flipped = bytearray(whole)
    flipped[400] ^= 1
    for content in (whole[:-1], whole[:30], b"", bytes(flipped)):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(IndexDamaged, match="published was"):
            Index(tmp_path / "other", checksum=checksum, dimension=4, facts=IndexMetadata())
    with pytest.raises(IndexDamaged, match="cannot be read"):
        Index(tmp_path / "absent", checksum=checksum, dimension=4, facts=IndexMetadata())


def test_missing_faiss_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    module.load_faiss.cache_clear()
    monkeypatch.setitem(sys.modules, "faiss", None)
    try:
        with pytest.raises(BadSetting, match=r"crossbatch\[cpu\].*crossbatch\[gpu\]"):
            module.require_faiss()
    finally:
        module.load_faiss.cache_clear()


def test_file_swept_while_it_is_loaded_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    path = tmp_path / "index-1.faiss"
    checksum = IndexBuilder.of(units(4, 3), threads=1).save(path)
    read = faiss.read_index

    def read_and_lose(name: str, flags: int) -> object:
        found = read(name, flags)
        path.unlink()  # as the sweep of a newer publication does
        return found

    monkeypatch.setattr(faiss, "read_index", read_and_lose)
    with pytest.raises(IndexDamaged, match="cannot be read"):
        Index(path, checksum=checksum, dimension=3, facts=IndexMetadata())
