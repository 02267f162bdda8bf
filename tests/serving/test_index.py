"""The FAISS file alone: exact, whole or absent, refused when it is not what was published."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.errors import BadSetting
from serving.gallery import index as module
from serving.gallery.index import SCORE_ERROR, Index, IndexDamaged, build_index


def units(count: int, dimension: int, seed: int = 0) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((count, dimension))
    units: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return units


def built(folder: Path, vectors: NDArray[np.float32], seqs: NDArray[np.int64]) -> Index:
    path = folder / "index-1.faiss"
    half = len(seqs) // 2
    blocks = [(seqs[:half], vectors[:half]), (seqs[half:], vectors[half:])]
    result = build_index(path, blocks, dimension=vectors.shape[1])
    assert result is not None
    checksum, count = result
    assert count == len(seqs)
    return Index(path, checksum=checksum, dimension=vectors.shape[1])


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
    assert np.array_equal(index.vectors(positions[0]), vectors[positions[0]])
    above = index.within(asked[0], 0.2)
    certain = set(np.flatnonzero(exact[0] > 0.2 + SCORE_ERROR))
    possible = set(np.flatnonzero(exact[0] > 0.2 - SCORE_ERROR))
    assert certain <= set(above.tolist()) <= possible


def test_giving_up_leaves_nothing(tmp_path: Path) -> None:
    blocks = [(np.arange(3), units(3, 4))]
    assert build_index(tmp_path / "index", blocks, dimension=4, proceed=lambda: False) is None
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write"):
        build_index(tmp_path / "absent" / "index", [], dimension=4)
    assert list(tmp_path.iterdir()) == []


def test_a_search_uses_only_the_cores_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faiss = module._faiss()
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
    checksum = module._checksum(path)
    with pytest.raises(IndexDamaged, match="dimension"):
        Index(path, checksum=checksum, dimension=5)
    flipped = bytearray(whole)
    flipped[400] ^= 1
    for content in (whole[:-1], whole[:30], b"", bytes(flipped)):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(IndexDamaged, match="SHA-256"):
            Index(tmp_path / "other", checksum=checksum, dimension=4)
    with pytest.raises(IndexDamaged, match="cannot be read"):
        Index(tmp_path / "absent", checksum=checksum, dimension=4)


def test_missing_faiss_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    module._faiss.cache_clear()
    monkeypatch.setitem(sys.modules, "faiss", None)
    try:
        with pytest.raises(BadSetting, match=r"crossbatch\[cpu\].*crossbatch\[gpu\]"):
            module.require_faiss()
    finally:
        module._faiss.cache_clear()


def test_file_swept_while_it_is_loaded_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    path = tmp_path / "index-1.faiss"
    result = build_index(path, [(np.arange(4), units(4, 3))], dimension=3)
    assert result is not None
    read = faiss.read_index

    def read_and_lose(name: str, flags: int) -> object:
        found = read(name, flags)
        path.unlink()  # as the sweep of a newer publication does
        return found

    monkeypatch.setattr(faiss, "read_index", read_and_lose)
    with pytest.raises(IndexDamaged, match="cannot be read"):
        Index(path, checksum=result[0], dimension=3)
