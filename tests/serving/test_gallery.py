"""A gallery as its users see it: a dictionary with exact search, in one process, in several, when hurt."""

import copy
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from serving import errors
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem, RebuildPolicy
from serving.gallery.index.index import Index
from serving.gallery.item import BadVector
from serving.model.spec import ModelSpec
from tests.serving.rpc_fakes import until
from tests.serving.vectors import MANUAL, created, sql, units

EAGER = RebuildPolicy(least=8, share=0.0)


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    with closing(created(tmp_path / "birds", 16)) as made:
        yield made


def test_scores_lie_between_minus_one_and_one_in_the_order_of_the_exact_ones(gallery: Gallery) -> None:
    unit = units(1)[0]
    vector = unit * np.float32(1 + 5e-7)  # as a model of single precision may give it: its bits are kept
    gallery.upsert([GalleryItem("a", unit), GalleryItem("b", vector), GalleryItem("c", -vector)])
    for _ in range(2):
        (hits,) = gallery.search([vector], 3)
        assert [hit.key for hit in hits] == ["b", "a", "c"]
        assert [hit.score for hit in hits] == [1.0, 1.0, -1.0]
        gallery.rebuild("exact")


def test_no_hit_is_below_the_minimum_by_however_little(gallery: Gallery) -> None:
    query, vector = units(2)
    gallery.upsert([GalleryItem("k", vector)])
    ((hit,),) = gallery.search([query], 1)
    more = float(np.nextafter(np.float32(hit.score), np.float32(1)))
    assert gallery.search([query], 1, minimum_score=hit.score) == [[hit]]
    assert gallery.search([query], 1, minimum_score=more) == [[]]


def test_empty_gallery_answers_and_rebuilds(gallery: Gallery) -> None:
    assert gallery.search(units(2), 5) == [[], []]
    assert gallery.search(np.empty((0, 16), np.float32), 5) == []
    gallery.rebuild()
    assert gallery.search(units(1), 5) == [[]]
    assert gallery.search(units(30), 5) == [[]] * 30  # from 20 on FAISS takes another way (faiss#3830)
    assert gallery.delete(["a"]) == 0
    assert gallery.upsert([]) == []
    with pytest.raises(errors.NotFound, match=r"'b'.* \(nor are 1 more\)"):
        gallery.get(["b", "c"])


def model(fingerprint: str, fp32_fingerprint: str | None = None, dimension: int = 16) -> ModelSpec:
    sight: dict[str, Any] = {"image_size": 8, "crop_fraction": 1.0, "resampling": "bilinear", "prototypes": 0}
    prints = {"fingerprint": fingerprint, "fp32_fingerprint": fp32_fingerprint}
    return ModelSpec(name="other", dimension=dimension, **prints, **sight)


def test_model_must_be_the_gallerys_own_or_made_from_it(gallery: Gallery) -> None:
    gallery.check_model(model("f" * 64))
    gallery.check_model(model("e" * 64, "f" * 64))
    with pytest.raises(errors.ModelMismatch, match=r"birds .*model m .*ffffffffffff.*other .*aaaaaaaaaaaa"):
        gallery.check_model(model("a" * 64))
    with pytest.raises(errors.ModelMismatch, match=r"dimension 16.*dimension 8"):
        gallery.check_model(model("f" * 64, dimension=8))


ONE = units(1)[0]


def test_small_errors_of_the_norm_are_divided_out(gallery: Gallery) -> None:
    longer, rounded = (ONE * 1.0005).astype(np.float32), ONE.astype(np.float16)
    gallery.upsert([GalleryItem("half", longer), GalleryItem("float16", rounded)])
    norms = [np.linalg.norm(item.vector.astype(np.float64)) for item in gallery.get(["half", "float16"])]
    assert np.allclose(norms, 1, atol=1e-6)
    (hits,) = gallery.search(ONE[None] * np.float32(0.9995), 2)
    assert [hit.score for hit in hits] == pytest.approx([1, 1], abs=1e-6)


def test_bad_queries_are_refused(gallery: Gallery) -> None:
    for k in (0, -1, 2049):
        with pytest.raises(errors.InvalidArgument, match=r"^k is .*; expected 1 to 2048$"):
            gallery.search(ONE[None], k)
    rows: list[Any] = [ONE, ONE[None, :8], "text", [[1, [2]]], None]
    for vectors in [*rows, ONE[None].astype(complex), [["1"] * 16], [[10**400] * 16]]:
        with pytest.raises(errors.InvalidArgument):
            gallery.search(vectors, 1)
    for bad, words in ((ONE * 2, "norm 2"), (ONE * np.nan, "not finite")):
        with pytest.raises(BadVector, match=rf"^query vector .*{words}") as caught:
            gallery.search(np.stack([ONE, bad]), 1)
        assert (caught.value.row, copy.copy(caught.value).row) == (1, 1)
    for least in (float("nan"), 1.01, -1.01, float("inf")):
        with pytest.raises(errors.InvalidArgument, match="minimum score"):
            gallery.search(ONE[None], 1, minimum_score=least)
    with pytest.raises(errors.InvalidArgument, match="single string"):
        gallery.search(ONE[None], 1, exclude="abc")


def test_create_refuses_what_is_there(tmp_path: Path) -> None:
    created(tmp_path / "a").close()
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    with pytest.raises(errors.AlreadyExists, match="already a gallery called a; choose another name"):
        created(tmp_path / "a")
    for name in ("file", "full"):
        with pytest.raises(errors.AlreadyExists, match=rf"something at .*/{name} that is no gallery"):
            created(tmp_path / name)
    with pytest.raises(errors.InvalidArgument, match="dimension"):
        created(tmp_path / "b", 0)
    with pytest.raises(errors.Unavailable, match="file"):
        created(tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file", "full"]


def test_a_name_that_gets_free_just_now_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created(tmp_path / "a").close()
    listdir = os.listdir

    def overtaken(path: Path) -> list[str]:
        if path == tmp_path / "a":
            shutil.rmtree(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", overtaken)
    created(tmp_path / "a").close()


def test_a_gallery_that_was_dropped_tells_so(gallery: Gallery) -> None:
    shutil.rmtree(gallery.path)
    with pytest.raises(errors.NotFound, match="is gone"):
        gallery.info()


def before_loading(monkeypatch: pytest.MonkeyPatch, what: Callable[[Path], None]) -> None:
    """Have something happen before each file of an index is opened by a search."""

    def load(path: Path, **more: Any) -> Index:
        what(path)
        return Index(path, **more)

    monkeypatch.setattr("serving.gallery.search.segment.Index", load)


def test_index_published_while_another_is_opened_is_taken_instead(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Path] = []

    def overtaken(path: Path) -> None:
        opened.append(path)
        if len(opened) == 1:
            gallery.upsert([GalleryItem("k1", ONE)])
            gallery.rebuild()  # and the file that was about to be opened is gone

    with closing(Gallery.open(gallery.path, policy=MANUAL)) as other:
        gallery.upsert([GalleryItem("k0", ONE)])
        gallery.rebuild()
        before_loading(monkeypatch, overtaken)
        assert [hit.key for hit in other.search(ONE[None], 5)[0]] == ["k0", "k1"]
        assert other.info().index_items == 2
    assert len(set(opened)) == 2
    assert caplog.records == []


def test_searches_go_on_while_one_loads_an_index(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = units(6)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(vectors)])
    gallery.rebuild()
    assert gallery.info().index_items == 6
    five = {f"k{i}" for i in range(1, 6)}
    loading, loaded = threading.Event(), threading.Event()

    def wait(_: Path) -> None:
        loading.set()
        assert loaded.wait(20)

    def found() -> set[str]:
        return {hit.key for hit in gallery.search(vectors[:1], 10)[0]}

    with closing(Gallery.open(gallery.path, policy=MANUAL)) as writer, ThreadPoolExecutor(1) as threads:
        writer.delete(["k0"])  # which the new index covers
        writer.upsert([GalleryItem("k1", vectors[2])])
        writer.rebuild()
        writer.info()
        before_loading(monkeypatch, wait)
        first = threads.submit(found)
        try:
            assert loading.wait(20)
            assert found() == five
            writer.delete(["k3"])  # which it does not cover
            writer.upsert([GalleryItem("new", vectors[0])])
            assert gallery.search(vectors[:1], 10) == writer.search(vectors[:1], 10)
            assert gallery.search(vectors[:1], 1)[0][0].key == "new"
            assert not first.done()
        finally:
            loaded.set()
        assert first.result() == five  # the state at which it began
        assert gallery.search(vectors, 10) == writer.search(vectors, 10)
        assert gallery.info() == writer.info()
        assert gallery.info().index_items == 5


def test_who_is_two_publications_behind_waits_for_the_index_with_a_limit(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was removed in between is not kept that long, so an older index cannot be brought on."""
    vectors = units(30)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(vectors)])
    gallery.rebuild()
    with closing(Gallery.open(gallery.path, policy=MANUAL)) as behind:
        gallery.delete([f"k{i}" for i in range(10)])
        gallery.rebuild()
        gallery.rebuild()
        monkeypatch.setattr("serving.gallery.search.snapshot._PATIENCE", 0.05)
        with behind._snapshots._loading, pytest.raises(errors.Overloaded, match="being loaded"):
            behind.search(vectors[:1], 30)
        assert len(behind.search(vectors[:1], 30)[0]) == 20


def test_folders_made_above_a_gallery_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("serving.gallery.disk.sync", synced.append)
    created(tmp_path / "a" / "b" / "c").close()
    assert synced == [tmp_path, tmp_path / "a"]


def test_item_that_the_index_names_and_the_store_lacks_is_damage(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem(f"k{i}", row) for i, row in enumerate(units(3))])
    gallery.rebuild()
    sql(gallery.path, "DELETE FROM items WHERE key = 'k1'")
    with pytest.raises(errors.BadArtifact, match=r"gallery\.sqlite is damaged"):
        gallery.search(units(1), 3)


def test_a_path_that_faiss_cannot_open_is_refused_at_once(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/g\xff"))
    for attempt in (
        lambda: created(folder / "a"),
        lambda: Gallery.open(folder / "a"),
        lambda: GalleryDirectory(folder),
    ):
        with pytest.raises(errors.InvalidArgument, match="not valid UTF-8") as caught:
            attempt()
        str(caught.value).encode()
    assert not folder.exists()


def test_background_rebuild_that_fails_is_logged_and_searches_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("serving.gallery.index.rebuild.build_index", full)
    with closing(created(tmp_path / "a", 16, policy=EAGER)) as gallery:
        gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(units(20))])
        until(lambda: "was not rebuilt" in caplog.text)
        assert len(gallery.search(units(1), 30)[0]) == 20


def test_search_sees_old_or_new_state_never_a_mixture(memory: Path) -> None:
    """Every write moves all items at once; a search that saw half of one would see two labels."""
    keys, vectors = [f"k{i}" for i in range(12)], units(12)
    done = threading.Event()

    def look(gallery: Gallery) -> None:
        while not done.is_set():
            (hits,) = gallery.search(ONE[None], 50)
            assert len({hit.label for hit in hits}) <= 1
            assert len(hits) in (0, 12)

    with closing(created(memory / "a", 16, policy=EAGER)) as gallery, ThreadPoolExecutor(3) as threads:
        looking = [threads.submit(look, gallery) for _ in range(3)]
        try:
            for label in range(60):
                rows = zip(keys, vectors, strict=True)
                gallery.upsert([GalleryItem(key, vector, str(label)) for key, vector in rows])
                if label % 5 == 0:
                    gallery.delete(keys)
                if label % 9 == 0:
                    gallery.rebuild()
        finally:
            done.set()
        assert [each.exception() for each in looking] == [None] * 3
