"""Rebuilds: when one is due, what it adds to and what it makes whole, what it leaves when it fails."""

import logging
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.errors import Unavailable
from serving.gallery.gallery import Gallery, GalleryItem, RebuildPolicy
from serving.gallery.index.builder import IndexBuilder
from serving.gallery.index.choice import build_index
from serving.gallery.index.index import IndexMetadata
from serving.gallery.search.filter import Range
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Replaced, Store
from serving.gallery.verify import verify
from tests.serving.rpc_fakes import until
from tests.serving.vectors import MANUAL, created, flip, units
from tests.test_fixtures import FIXTURES

DIMENSION = 16


def items(prefix: str, rows: NDArray[np.float32]) -> list[GalleryItem]:
    return [GalleryItem(f"{prefix}{i}", row, str(i % 3), metadata={"i": i}) for i, row in enumerate(rows)]


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    with closing(created(tmp_path / "a", DIMENSION)) as gallery:
        yield gallery


def facts_at(path: Path) -> IndexMetadata:
    with closing(Store(path / FILE_NAME)) as store, store.read() as reader:
        return IndexMetadata.from_json(reader.state().index_facts)


def extend(gallery: Gallery, **policy: Any) -> None:
    with closing(Gallery.open(gallery.path, policy=RebuildPolicy(automatic=False, **policy))) as other:
        other.rebuild(whole=False)


def files(gallery: Gallery) -> list[str]:
    return sorted(path.name for path in gallery.path.glob("index-*"))


@pytest.mark.parametrize("type_", ["auto", "PQ8x4fs", "HNSW8,SQ8", "IVF8,Flat"])
def test_adding_gives_what_a_whole_rebuild_gives(gallery: Gallery, type_: str) -> None:
    rows, queries = units(450), units(20, seed=1)
    gallery.upsert(items("k", rows[:300]))
    gallery.rebuild(type_)
    gallery.delete([f"k{i}" for i in range(50)])
    gallery.upsert(items("n", rows[300:]))
    gallery.upsert([GalleryItem("k60", rows[0]), GalleryItem("n5", rows[1])])
    gallery.delete(["n7"])
    before, first = gallery.search(queries, 10), files(gallery)
    extend(gallery)
    info, facts = gallery.info(), facts_at(gallery.path)
    assert (info.items, info.fresh, info.deleted, info.generation) == (399, 0, 51, 2)
    assert (info.index_items, facts.extended, facts.count) == (450, 150, 300)
    assert not set(first) & set(files(gallery))
    assert len(files(gallery)) == 2
    added = gallery.search(queries, 10)
    gallery.rebuild()
    info, facts = gallery.info(), facts_at(gallery.path)
    assert (info.items, info.deleted, info.index_items, facts.extended) == (399, 0, 399, 0)
    for found in (added, gallery.search(queries, 10)):
        if type_ == "auto":
            assert found == before
        pairs = zip(found, before, strict=True)
        shares = [len({hit.key for hit in some} & {hit.key for hit in best}) / 10 for some, best in pairs]
        assert np.mean(shares) > 0.95


@pytest.mark.parametrize("change", ["deleted", "grown", "wanted", "facts", "of another kind", "none"])
def test_what_must_be_whole_is_so(gallery: Gallery, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = units(900)
    gallery.upsert(items("k", rows[:300]))
    gallery.rebuild()
    if change == "deleted":
        gallery.delete([f"k{i}" for i in range(100)])
    gallery.upsert(items("n", rows[300 : 900 if change == "grown" else 310]))
    if change == "of another kind":
        missed = Mock(return_value=IndexMetadata(recall=0.1))
        monkeypatch.setattr("serving.gallery.index.rebuild.measure_again", missed)
    with gallery._store.write() as writer:
        if change == "wanted":
            writer.want("PQ8x4fs", 0.9)
        if change == "facts":
            seen = writer.reader.state()
            named: dict[str, Any] = {"index_file": seen.index_file, "checksum": seen.index_checksum}
            writer.publish(seen, count=300, facts="[]", covers_removal=seen.covers_removal, **named)
    extend(gallery, least=50)
    facts, info = facts_at(gallery.path), gallery.info()
    assert (facts.extended == 0) == (change != "none")
    assert (info.items, info.fresh, info.deleted) == (info.index_items, 0, 0)
    assert info.index_type == ("PQ8x4fs,RFlat" if change == "wanted" else "exact")


def test_emptied_gallery_has_no_file(gallery: Gallery) -> None:
    gallery.upsert(items("k", units(30)))
    gallery.rebuild("PQ8x4fs", 0.9)
    assert len(files(gallery)) == 2
    gallery.delete([f"k{i}" for i in range(30)])
    gallery.rebuild()
    assert files(gallery) == []
    info = gallery.info()
    assert (info.index_items, info.wanted_index, info.wanted_recall) == (0, "PQ8x4fs", 0.9)
    gallery.upsert(items("k", units(30)))
    extend(gallery)
    assert gallery.info().index_items == 30


def test_missed_recall_is_logged(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    gallery.upsert(items("k", units(100)))
    with caplog.at_level(logging.WARNING):
        gallery.rebuild("IVF256,Flat")
    assert "gallery a is of type exact" in caplog.text
    assert "cannot be trained on 100 vectors" in caplog.text


@pytest.mark.parametrize("last", ["read", "measure", "write"])
def test_progress_that_raises_leaves_the_old_index_and_what_is_wanted(gallery: Gallery, last: str) -> None:
    gallery.upsert(items("k", units(100)))
    gallery.rebuild()
    before = files(gallery)
    gallery.upsert(items("n", units(100)))

    def stop(stage: str, *_: int) -> None:
        if stage == last:
            raise InterruptedError(stage)

    with pytest.raises(Unavailable):
        gallery.rebuild("exact", 0.5, progress=stop)
    assert files(gallery) == before
    info = gallery.info()
    assert (info.index_items, info.generation) == (100, 1)
    assert (info.wanted_index, info.wanted_recall) == ("exact", 0.5)
    gallery.rebuild()
    assert (gallery.info().index_items, gallery.info().generation) == (200, 2)


@pytest.mark.parametrize("moment", ["read", "write"])
def test_folder_that_loses_its_name_meanwhile_leaves_no_file_in_another(
    gallery: Gallery, tmp_path: Path, moment: str
) -> None:
    with closing(created(tmp_path / "b", DIMENSION)) as other:
        other.upsert(items("o", units(10, seed=3)))
        other.rebuild()
        theirs = files(other)
    gallery.upsert(items("k", units(50)))

    def swap(stage: str, *_: int) -> None:
        if stage == moment and (tmp_path / "b").exists():
            (tmp_path / "a").rename(tmp_path / "c")
            (tmp_path / "b").rename(tmp_path / "a")

    with pytest.raises(Replaced, match="replaced"):
        gallery.rebuild(progress=swap)
    assert files(gallery) == theirs  # under the name that it had
    assert list((tmp_path / "c").glob("index-*")) == []


def test_when_a_rebuild_is_due(gallery: Gallery) -> None:
    with gallery._store.read() as reader:
        empty = reader.state()
    policy = RebuildPolicy(least=100, share=0.1, most=1000)
    for most, count in ((100, 0), (500, 5000), (1000, 10**6)):
        for fresh in (most, most + 1):
            state = replace(empty, last_seq=fresh, index_count=count)
            assert policy.is_due(state) == (fresh > most)
            assert not policy.is_worn(state)
    worn = replace(empty, last_removal=501, index_count=5000)
    assert policy.is_worn(worn)
    assert policy.is_due(worn)
    assert not policy.is_due(replace(worn, last_removal=500))


@pytest.mark.parametrize(("cores", "threads"), [(7, 3), (1, 1)])
def test_background_rebuild_takes_its_share_of_the_machine_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    seen: list[tuple[int, int, str]] = []
    published = threading.Event()

    def watched(builder: IndexBuilder, **more: Any) -> IndexMetadata:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.append((builder.threads, nice, threading.current_thread().name))
        published.set()
        return build_index(builder, **more)

    monkeypatch.setattr("serving.gallery.index.rebuild.build_index", watched)
    monkeypatch.setattr("serving.gallery.index.rebuild.usable_cores", lambda: cores)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    policy = RebuildPolicy(least=5, share=0.0)
    with closing(created(tmp_path / "a", DIMENSION, policy=policy)) as gallery:
        gallery.upsert(items("k", units(20)))
        assert published.wait(20)
    nice = min(19, mine + 10) if sys.platform == "linux" else mine
    assert seen == [(threads, nice, "rebuild a")]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def cut(file: Path) -> None:
    os.truncate(file, 50)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # to open it would be to wait for ever


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("suffix", ["faiss", "columns"])
@pytest.mark.parametrize("harm", [Path.unlink, cut, lambda file: flip(file, -1), pipe, folder])
@pytest.mark.parametrize("automatic", [False, True])
def test_damaged_index_is_made_anew_and_logged(
    gallery: Gallery,
    suffix: str,
    harm: Callable[[Path], None],
    automatic: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = units(100)
    gallery.upsert(items("k", rows))
    gallery.rebuild()
    gallery.delete(["k1"])
    gallery.upsert([GalleryItem("k2", rows[3], metadata={"i": 2})])
    asked = partial(Gallery.search, vectors=rows, k=5, filter=Range("i", least=2))
    expected = asked(gallery)
    gallery.close()
    (file,) = gallery.path.glob(f"index-*.{suffix}")
    harm(file)
    with closing(Gallery.open(gallery.path, policy=RebuildPolicy(automatic=automatic))) as again:
        assert asked(again) == expected  # at once
        assert "the index of the gallery a is made anew" in caplog.text
        if automatic:
            until(lambda: again.info().generation == 2)
        else:
            assert again.info().index_items == 0
            again.rebuild(whole=False)
        info = again.info()
        assert (info.items, info.index_items, info.fresh, info.deleted) == (99, 99, 0, 0)
        assert asked(again) == expected
    assert verify(gallery.path).problems == []
    assert file.exists() == (harm is folder)  # which is not the gallery's


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["exact", "hnsw", "pq"])
def test_index_of_an_earlier_version_is_added_to(tmp_path: Path, name: str, whole: bool) -> None:
    with zipfile.ZipFile(FIXTURES / "v0.1.zip") as archive:
        archive.extractall(tmp_path)
    path = tmp_path / "galleries" / name
    assert verify(path).problems == []
    with closing(Gallery.open(path, policy=MANUAL)) as old:
        old.upsert([GalleryItem("new", units(1, old.meta.dimension)[0])])
        before, index = old.info(), old.info().index_type
        old.rebuild(whole=whole)
        after = old.info()
        assert (after.items, after.fresh, after.index_type) == (before.items, 0, index)
        assert old.search(units(1, old.meta.dimension), 1)[0][0].key == "new"
    assert facts_at(path).extended == (0 if whole else before.fresh)
    assert verify(path).problems == []


def test_rebuild_of_a_gallery_that_is_closed_meanwhile_says_so(gallery: Gallery) -> None:
    gallery.upsert(items("k", units(20)))
    with pytest.raises(Replaced, match="closed"):
        gallery.rebuild(progress=lambda *_: gallery.close())
    assert files(gallery) == []
