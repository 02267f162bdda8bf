"""A gallery as its users see it: a dictionary with exact search, in one process, in several, when hurt."""

import copy
import json
import logging
import multiprocessing
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.errors import (
    AlreadyExists,
    BadArtifact,
    InvalidArgument,
    ModelMismatch,
    NotFound,
    Overloaded,
    Unavailable,
)
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem, RebuildPolicy
from serving.gallery.index.index import Index
from serving.gallery.item import MAX_METADATA_BYTES, BadVector
from serving.model.spec import ModelSpec
from tests.serving.vectors import MANUAL
from tests.serving.vectors import units as units_of

EAGER = RebuildPolicy(least=8, share=0.0)


def units(count: int, dimension: int = 16, seed: int = 0) -> NDArray[np.float32]:
    return units_of(count, dimension, seed)


def created(path: Path, dimension: int = 16, policy: RebuildPolicy = MANUAL) -> Gallery:
    return Gallery.create(path, model_name="m", fingerprint="f" * 64, dimension=dimension, policy=policy)


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    made = created(tmp_path / "birds")
    yield made
    made.close()


def brute_force(
    model: dict[str, GalleryItem],
    query: NDArray[np.float32],
    k: int,
    least: float = -2.0,
    exclude: tuple[str, ...] = (),
) -> list[tuple[str, float]]:
    """All pairs by a plain loop in float64; a score is rounded once."""
    scored = []
    for key, item in model.items():
        score = float(np.float32((item.vector * query.astype(np.float64)).sum()))
        if key not in exclude and score >= least:
            scored.append((key, score))
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:k]


@pytest.mark.parametrize("indexed", [0, 150, 300])
def test_search_equals_brute_force_wherever_items_are(gallery: Gallery, indexed: int) -> None:
    vectors, queries = units(300), units(40, seed=1)
    items = {f"k{i}": GalleryItem(f"k{i}", vector) for i, vector in enumerate(vectors)}
    every = list(items.values())
    gallery.upsert(every[:indexed])
    gallery.rebuild()
    gallery.upsert(every[indexed:])
    found = gallery.search(queries, 10)
    for query, hits in zip(queries, found, strict=True):
        assert [(hit.key, hit.score) for hit in hits] == brute_force(items, query, 10)
    alone = [gallery.search(query[None], 10)[0] for query in queries]
    assert alone == found  # how many queries come together changes nothing


def test_ties_across_index_and_fresh_part_are_in_key_order(gallery: Gallery) -> None:
    vector = units(1)[0]
    keys = [f"{i:03}" for i in range(200)]
    gallery.upsert([GalleryItem(key, vector) for key in reversed(keys[::2])])  # FAISS prefers what came first
    gallery.rebuild()
    gallery.upsert([GalleryItem(key, vector) for key in reversed(keys[1::2])])
    (hits,) = gallery.search(vector[None], 7)
    assert [hit.key for hit in hits] == keys[:7]
    gallery.delete(keys[:50])
    (hits,) = gallery.search(vector[None], 7)
    assert [hit.key for hit in hits] == keys[50:57]
    (hits,) = gallery.search(vector[None], 1000)
    assert [hit.key for hit in hits] == keys[50:]


def test_scores_lie_between_minus_one_and_one_in_the_order_of_the_exact_ones(gallery: Gallery) -> None:
    unit = units(1)[0]
    vector = unit * np.float32(1 + 5e-7)  # as a model of single precision may give it: its bits are kept
    gallery.upsert(
        [GalleryItem("a", vector=unit), GalleryItem("b", vector=vector), GalleryItem("c", vector=-vector)]
    )
    for _ in range(2):
        (hits,) = gallery.search([vector], 3)
        assert [hit.key for hit in hits] == ["b", "a", "c"]
        assert [hit.score for hit in hits] == [1.0, 1.0, -1.0]
        gallery.rebuild("exact")


def test_empty_gallery_answers_and_rebuilds(gallery: Gallery) -> None:
    assert gallery.search(units(2), 5) == [[], []]
    assert gallery.search(np.empty((0, 16), np.float32), 5) == []
    gallery.rebuild()
    assert gallery.search(units(1), 5) == [[]]
    assert gallery.search(units(30), 5) == [[]] * 30  # from 20 on FAISS takes another way (faiss#3830)
    assert gallery.delete(["a"]) == 0
    assert gallery.upsert([]) == []


def test_get_keeps_the_order_and_names_what_is_missing(gallery: Gallery) -> None:
    gallery.upsert(
        [
            GalleryItem("a", units(1)[0], "x", "file:///a", {"n": [1, {"é": None}]}),
            GalleryItem("b", units(1)[0]),
        ]
    )
    b, a = gallery.get(["b", "a"])
    assert (b.key, a.key, a.label, a.uri, a.metadata) == ("b", "a", "x", "file:///a", {"n": [1, {"é": None}]})
    assert np.array_equal(a.vector, units(1)[0])
    with pytest.raises(NotFound, match="'nothing'"):
        gallery.get(["a", "nothing"])


def model(name: str, fingerprint: str, fp32_fingerprint: str | None, dimension: int) -> ModelSpec:
    sight: dict[str, Any] = {"image_size": 8, "crop_fraction": 1.0, "resampling": "bilinear", "prototypes": 0}
    return ModelSpec(
        name=name, fingerprint=fingerprint, fp32_fingerprint=fp32_fingerprint, dimension=dimension, **sight
    )


def test_model_must_be_the_gallerys_own_or_made_from_it(gallery: Gallery) -> None:
    gallery.check_model(model("m", "f" * 64, None, 16))
    gallery.check_model(model("m int8", "e" * 64, "f" * 64, 16))
    with pytest.raises(ModelMismatch, match=r"birds .*model m .*ffffffffffff.*other .*aaaaaaaaaaaa"):
        gallery.check_model(model("other", "a" * 64, None, 16))
    with pytest.raises(ModelMismatch, match=r"dimension 16.*dimension 8"):
        gallery.check_model(model("m", "f" * 64, None, 8))


ONE = units(1)[0]
BAD_ITEMS = {
    "NaN": GalleryItem("k", ONE * np.nan),
    "infinite": GalleryItem("k", np.where(np.arange(16) == 3, np.inf, ONE).astype(np.float32)),
    "zero": GalleryItem("k", ONE * 0),
    "not unit": GalleryItem("k", ONE * np.float32(1.01)),
    "short": GalleryItem("k", ONE[:8]),
    "two rows": GalleryItem("k", units(2)),
    "text vector": GalleryItem("k", np.array(["a"] * 16)),
    "empty key": GalleryItem("", ONE),
    "long key": GalleryItem("k" * 10_000, ONE),
    "long key in bytes": GalleryItem("é" * 513, ONE),
    "NUL": GalleryItem("a\0b", ONE),
    "surrogate": GalleryItem("\ud800", ONE),
    "long label": GalleryItem("k", ONE, "l" * 1025),
    "surrogate URI": GalleryItem("k", ONE, "", "\udfff"),
    "metadata name": GalleryItem("k", ONE, metadata={1: 2}),  # type: ignore[dict-item]
    "metadata NaN": GalleryItem("k", ONE, metadata={"a": float("nan")}),
    "metadata object": GalleryItem("k", ONE, metadata={"a": object()}),
    "metadata surrogate": GalleryItem("k", ONE, metadata={"a": "\ud800"}),
    "metadata of 31 levels": GalleryItem("k", ONE, metadata=json.loads('{"a":' * 31 + "1" + "}" * 31)),
    "metadata list of 31 levels": GalleryItem(
        "k", ONE, metadata={"a": json.loads("[" * 30 + "1" + "]" * 30)}
    ),
    "metadata beyond a double": GalleryItem("k", ONE, metadata={"a": [2**1024]}),
    "metadata of 1 MB": GalleryItem("k", ONE, metadata={"a": "x" * 1_000_000}),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_bad_item_refuses_the_whole_call(gallery: Gallery, name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^items\[1\]: ") as caught:
        gallery.upsert([GalleryItem("good", ONE), BAD_ITEMS[name]])
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidArgument, match=r"items\[2\]: items\[0\] has the same key 'a'"):
        gallery.upsert([GalleryItem("a", ONE), GalleryItem("b", ONE), GalleryItem("a", ONE)])
    assert gallery.info().items == 0


def test_items_at_the_bounds_are_stored_and_found(gallery: Gallery) -> None:
    keys = ["k" * 1024, "é" * 512, "../../etc/passwd", "..", " ", "\x01\x7f", "\U0001f426", 'a"b\\c', "%00"]
    fill = "x" * (MAX_METADATA_BYTES - len('{"a":""}'))
    gallery.upsert([GalleryItem(key, ONE, metadata={"a": fill}) for key in keys])
    hits, again = gallery.search([ONE, ONE], 100)
    assert hits[0].metadata is again[0].metadata  # it is parsed once for each item found
    assert [hit.key for hit in hits] == sorted(keys)
    assert [item.key for item in gallery.get(keys)] == keys
    assert gallery.delete(keys) == len(keys)


def test_small_errors_of_the_norm_are_divided_out(gallery: Gallery) -> None:
    gallery.upsert(
        [
            GalleryItem("half", (ONE * 1.0005).astype(np.float32)),
            GalleryItem("float16", ONE.astype(np.float16)),
        ]
    )
    norms = [np.linalg.norm(item.vector.astype(np.float64)) for item in gallery.get(["half", "float16"])]
    assert np.allclose(norms, 1, atol=1e-6)
    (hits,) = gallery.search(ONE[None] * np.float32(0.9995), 2)
    assert [hit.score for hit in hits] == pytest.approx([1, 1], abs=1e-6)


@pytest.mark.parametrize("k", [0, -1, 2049])
def test_bad_k_is_refused(gallery: Gallery, k: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^k is .*; expected 1 to 2048$"):
        gallery.search(ONE[None], k)


def test_bad_queries_are_refused(gallery: Gallery) -> None:
    rows: list[Any] = [ONE, ONE[None, :8], "text", [[1, [2]]], None]
    for vectors in [*rows, ONE[None].astype(complex), [["1"] * 16], [[10**400] * 16]]:
        with pytest.raises(InvalidArgument):
            gallery.search(vectors, 1)
    for bad, words in ((ONE * 2, "norm 2"), (ONE * np.nan, "not finite")):
        with pytest.raises(BadVector, match=rf"^query vector .*{words}") as caught:
            gallery.search(np.stack([ONE, bad]), 1)
        assert (caught.value.row, copy.copy(caught.value).row) == (1, 1)
    for least in (float("nan"), 1.01, -1.01, float("inf")):
        with pytest.raises(InvalidArgument, match="minimum score"):
            gallery.search(ONE[None], 1, minimum_score=least)
    with pytest.raises(InvalidArgument, match="single string"):
        gallery.search(ONE[None], 1, exclude="abc")


def test_create_refuses_what_is_there(tmp_path: Path) -> None:
    created(tmp_path / "a").close()
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    with pytest.raises(AlreadyExists, match="already a gallery called a; choose another name, or drop it"):
        created(tmp_path / "a")
    for name in ("file", "full"):
        with pytest.raises(AlreadyExists, match=rf"something at .*/{name} that is no gallery"):
            created(tmp_path / name)
    with pytest.raises(InvalidArgument, match="dimension"):
        created(tmp_path / "b", 0)
    with pytest.raises(Unavailable, match="file"):
        created(tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file", "full"]


def test_create_that_dies_leaves_no_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gallery.folder.sync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        created(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["missing", "truncated", "flipped"])
def test_damaged_index_is_made_anew_and_logged(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    gallery = created(tmp_path / "a")
    vectors = units(100)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(vectors)])
    gallery.rebuild()
    gallery.delete(["k1"])
    gallery.upsert([GalleryItem("k2", vectors[3])])
    expected = gallery.search(vectors, 5)
    gallery.close()
    (file,) = (tmp_path / "a").glob("index-*.faiss")
    content = bytearray(file.read_bytes())
    content[300] ^= 255
    file.unlink()
    if harm != "missing":
        file.write_bytes(content if harm == "flipped" else content[:50])
    gallery = Gallery.open(tmp_path / "a")
    assert gallery.search(vectors, 5) == expected  # at once
    assert any("made anew" in record.message and "a" in record.message for record in caplog.records)
    wait_for(lambda: gallery.info().generation == 2)
    info = gallery.info()
    assert (info.items, info.index_items, info.fresh, info.deleted) == (99, 99, 0, 0)
    assert gallery.search(vectors, 5) == expected
    gallery.close()


def before_loading(monkeypatch: pytest.MonkeyPatch, what: Callable[[Path], None]) -> None:
    """Have something happen before each file of an index is opened by a search."""

    def load(path: Path, **more: Any) -> Index:
        what(path)
        return Index(path, **more)

    monkeypatch.setattr("serving.gallery.search.segment.Index", load)


def test_index_published_while_another_is_opened_is_taken_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = created(tmp_path / "a")
    second = Gallery.open(tmp_path / "a", policy=MANUAL)
    first.upsert([GalleryItem("k0", ONE)])
    first.rebuild()
    opened: list[Path] = []

    def overtaken(path: Path) -> None:
        opened.append(path)
        if len(opened) == 1:
            first.upsert([GalleryItem("k1", ONE)])
            first.rebuild()  # and the file that was about to be opened is gone

    before_loading(monkeypatch, overtaken)
    assert [hit.key for hit in second.search(ONE[None], 5)[0]] == ["k0", "k1"]
    assert second.info().index_items == 2
    assert len(set(opened)) == 2
    assert caplog.records == []
    first.close()
    second.close()


def test_searches_go_on_while_one_loads_a_new_index(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Gallery.open(gallery.path, policy=MANUAL)
    vectors = units(6)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(vectors)])
    gallery.rebuild()
    assert gallery.info().index_items == 6
    loading, loaded = threading.Event(), threading.Event()

    def wait(_: Path) -> None:
        loading.set()
        assert loaded.wait(20)

    writer.delete(["k0"])  # which the new index covers
    writer.upsert([GalleryItem("k1", vectors[2])])
    writer.rebuild()
    writer.info()
    before_loading(monkeypatch, wait)
    first: list[Any] = []
    loader = threading.Thread(target=lambda: first.extend(gallery.search(vectors[:1], 10)[0]))
    loader.start()
    try:
        assert loading.wait(20)
        assert {hit.key for hit in gallery.search(vectors[:1], 10)[0]} == {f"k{i}" for i in range(1, 6)}
        writer.delete(["k3"])  # which it does not cover
        writer.upsert([GalleryItem("new", vectors[0])])
        assert gallery.search(vectors[:1], 10) == writer.search(vectors[:1], 10)
        assert gallery.search(vectors[:1], 1)[0][0].key == "new"
        assert loader.is_alive()
    finally:
        loaded.set()
        loader.join()
    assert {hit.key for hit in first} == {f"k{i}" for i in range(1, 6)}  # the state at which it began
    assert gallery.search(vectors, 10) == writer.search(vectors, 10)
    assert gallery.info() == writer.info()
    assert gallery.info().index_items == 5
    writer.close()


def test_who_is_two_publications_behind_waits_for_the_index_with_a_limit(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was removed in between is not kept that long, so an older index cannot be brought on."""
    vectors = units(30)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(vectors)])
    gallery.rebuild()
    behind = Gallery.open(gallery.path, policy=MANUAL)
    gallery.delete([f"k{i}" for i in range(10)])
    gallery.rebuild()
    gallery.rebuild()
    monkeypatch.setattr("serving.gallery.search.snapshot._PATIENCE", 0.05)
    with behind._snapshots._loading, pytest.raises(Overloaded, match="being loaded"):
        behind.search(vectors[:1], 30)
    assert len(behind.search(vectors[:1], 30)[0]) == 20
    behind.close()


def test_gallery_that_was_dropped_tells_so_whatever_it_is_asked(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem("a", ONE)])
    shutil.rmtree(gallery.path)
    with pytest.raises(NotFound, match="is gone"):
        gallery.info()


def test_folders_made_on_the_way_to_a_gallery_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("serving.gallery.disk.sync", synced.append)
    created(tmp_path / "a" / "b" / "c").close()
    assert synced == [tmp_path, tmp_path / "a"]


def test_item_that_the_index_names_and_the_store_lacks_is_damage(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem(f"k{i}", row) for i, row in enumerate(units(3))])
    gallery.rebuild()
    with closing(sqlite3.connect(gallery.path / "gallery.sqlite")) as connection, connection:
        connection.execute("DELETE FROM items WHERE key = 'k1'")
    with pytest.raises(BadArtifact, match=r"gallery\.sqlite is damaged"):
        gallery.search(units(1), 3)


def test_a_path_that_faiss_cannot_open_is_refused_at_once(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/g\xff"))
    for attempt in (
        lambda: created(folder / "a"),
        lambda: Gallery.open(folder / "a"),
        lambda: GalleryDirectory(folder),
    ):
        with pytest.raises(InvalidArgument, match="not valid UTF-8") as caught:
            attempt()
        str(caught.value).encode()
    assert not folder.exists()


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rebuild_comes_by_itself_and_removes_the_old_file(tmp_path: Path) -> None:
    gallery = created(tmp_path / "a", policy=EAGER)
    for start in range(0, 60, 3):
        gallery.upsert(
            [GalleryItem(f"k{start + i}", vector) for i, vector in enumerate(units(3, seed=start))]
        )
    wait_for(lambda: gallery.info().generation >= 1)
    gallery.delete([f"k{i}" for i in range(40)])
    wait_for(lambda: (info := gallery.info()).deleted <= 8 and info.fresh <= 8)
    wait_for(lambda: len(list((tmp_path / "a").glob("index-*.faiss"))) == 1)
    assert gallery.info().items == 20
    gallery.close()


def test_background_rebuild_that_fails_is_logged_and_searches_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("serving.gallery.index.rebuild.build_index", full)
    gallery = created(tmp_path / "a", policy=EAGER)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(units(20))])
    with caplog.at_level(logging.WARNING):
        wait_for(lambda: any("was not rebuilt" in record.message for record in caplog.records))
    assert len(gallery.search(units(1), 30)[0]) == 20
    gallery.close()


def test_search_sees_old_or_new_state_never_a_mixture(tmp_path: Path) -> None:
    """Every write moves all items at once; a search that saw half of one would see two labels."""
    gallery = created(tmp_path / "a", policy=EAGER)
    keys = [f"k{i}" for i in range(12)]
    vectors = units(12)
    stop, wrong = threading.Event(), []

    def store(label: int) -> None:
        gallery.upsert(
            [GalleryItem(key, vector, str(label)) for key, vector in zip(keys, vectors, strict=True)]
        )

    def look() -> None:
        while not stop.is_set():
            (hits,) = gallery.search(ONE[None], 50)
            if len({hit.label for hit in hits}) > 1 or len(hits) not in (0, 12):
                wrong.append([(hit.key, hit.label) for hit in hits])

    store(0)
    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for label in range(1, 60):
            store(label)
            if label % 5 == 0:
                gallery.delete(keys)
            if label % 9 == 0:
                gallery.rebuild()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    gallery.close()


def test_close_during_a_rebuild_ends_it(tmp_path: Path) -> None:
    gallery = created(tmp_path / "a", policy=EAGER)
    gallery.upsert([GalleryItem(f"k{i}", vector) for i, vector in enumerate(units(5000))])
    gallery.close()
    with pytest.raises(Unavailable, match="closed"):
        gallery.search(units(1), 1)
    gallery.close()
    gallery = Gallery.open(tmp_path / "a", policy=MANUAL)
    assert gallery.info().items == 5000
    gallery.close()


def _serve(path: Path, connection: Connection) -> None:
    """Another process that has the gallery open and does as it is told."""
    gallery = Gallery.open(path, policy=MANUAL)
    connection.send("ready")
    while command := connection.recv():
        name, *arguments = command
        connection.send(getattr(gallery, name)(*arguments))
    gallery.close()


@pytest.fixture
def other(gallery: Gallery) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(gallery.path, theirs))
    process.start()
    assert ours.poll(30)
    assert ours.recv() == "ready"
    yield ours
    ours.send(None)
    process.join(10)
    assert process.exitcode == 0


def test_writes_of_another_process_are_seen_at_the_next_search(gallery: Gallery, other: Connection) -> None:
    vectors = units(30)
    for i, vector in enumerate(vectors):
        other.send(("upsert", [GalleryItem(f"k{i}", vector)]))
        other.recv()  # it is acknowledged, and any search that begins now sees it
        (hits,) = gallery.search(vector[None], 1)
        assert hits[0].key == f"k{i}"
        if i % 10 == 5:  # what either process rebuilds, both use
            other.send(("rebuild",))
            other.recv()
        if i % 10 == 8:
            gallery.rebuild()
    other.send(("delete", ["k3"]))
    assert other.recv() == 1
    assert "k3" not in {hit.key for hit in gallery.search(vectors[3:4], 30)[0]}
    other.send(("search", vectors, 5))
    assert other.recv() == gallery.search(vectors, 5)
    assert gallery.info().generation == 6
    assert len(list(gallery.path.glob("index-*.faiss"))) == 1
