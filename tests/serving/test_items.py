"""The items of a gallery by key: bounds, versions, pages, thumbnails, sources, and writers at once."""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving.errors import BadArtifact, Conflict, InvalidArgument
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.item import MAX_KEY_BYTES, MAX_METADATA_BYTES, MAX_THUMBNAIL_BYTES, Source
from tests.serving.vectors import AXES, MANUAL, created, sql

ONE = AXES[0]
JPEG = b"\xff\xd8\xff\xe0" + b"picture" + b"\xff\xd9"
SOURCE = Source("file:///birds", 10, 1_700_000_000_000_000_000, b"\1" * 32)


@pytest.fixture
def gallery(memory: Path) -> Iterator[Gallery]:
    with closing(created(memory / "birds", thumbnail_side=64)) as made:
        yield made


SHORT = st.text(max_size=40)
TEXT = SHORT | st.builds(lambda text, times: text * times, SHORT, st.integers(0, 300))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=TEXT)
@example("../../etc/passwd")
@example("..")
@example("é" * 512)
@example("é" * 513)
@example("\u0130\u2028\ufeff\U0010ffff e\u0301")
@example("a\0b")
@example("\ud800")
@example("")
def test_any_text_is_stored_and_found_byte_for_byte_or_refused(gallery: Gallery, key: str) -> None:
    item = GalleryItem(key, ONE, key[:200], key, {"text": key})
    size = len(key.encode(errors="surrogatepass"))
    surrogate = any("\ud800" <= each <= "\udfff" for each in key)
    if not 1 <= size <= MAX_KEY_BYTES or "\0" in key or surrogate:
        for use in (lambda: gallery.upsert([item]), lambda: gallery.get([key])):
            with pytest.raises(InvalidArgument) as caught:
                use()
            assert b"\n" not in str(caught.value).encode()
        return
    (version,) = gallery.upsert([item])
    (found,) = gallery.get([key])
    (hit, *_) = gallery.search(ONE[None], 1)[0]
    assert (found.key, found.label, found.uri) == (key, key[:200], key)
    assert found.metadata == hit.metadata == {"text": key}
    assert (found.version, hit.key) == (version, key)
    assert key in [item.key for item in gallery.list(prefix=key)]
    assert gallery.delete([key]) == 1
    assert gallery.list() == []


def test_metadata_at_the_bound_is_stored_and_parsed_once_for_each_item_found(gallery: Gallery) -> None:
    filled = {"a": "x" * (MAX_METADATA_BYTES - len('{"a":""}'))}
    gallery.upsert([GalleryItem("k", ONE, metadata=filled)])
    (hit,), (again,) = gallery.search([ONE, ONE], 1)
    assert hit.metadata is again.metadata
    assert hit.metadata == filled


VECTOR = "the vector of 'bad' .*"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"vector": ONE * np.nan}, VECTOR + "not finite"),
    "infinite": ({"vector": np.where(ONE > 0, np.inf, ONE)}, VECTOR + "not finite"),
    "zero": ({"vector": ONE * 0}, VECTOR + "norm 0;"),
    "not unit": ({"vector": ONE * np.float32(1.01)}, VECTOR + "norm 1.01;"),
    "float64": ({"vector": np.float64(2) * ONE}, VECTOR + "norm 2;"),
    "short": ({"vector": ONE[:3]}, VECTOR + r"shape \(3,\)"),
    "two rows": ({"vector": AXES[:2]}, VECTOR + r"shape \(2, 4\)"),
    "text vector": ({"vector": np.array(["a"] * 4)}, "expected real numbers in the vector of 'bad'"),
    "long label": ({"label": "l" * 1025}, "the label .*1025 bytes"),
    "surrogate URI": ({"uri": "\udfff"}, "the URI .*not valid Unicode"),
    "metadata name": ({"metadata": {1: 2}}, "every name in it must be a string"),
    "metadata NaN": ({"metadata": {"a": float("nan")}}, "cannot be written as JSON"),
    "metadata object": ({"metadata": {"a": object()}}, "cannot be written as JSON"),
    "metadata surrogate": ({"metadata": {"a": "\ud800"}}, "cannot be written as JSON"),
    "metadata of 31 levels": ({"metadata": json.loads('{"a":' * 31 + "1" + "}" * 31)}, "30 levels"),
    "metadata list of 31 levels": ({"metadata": {"a": json.loads("[" * 30 + "1" + "]" * 30)}}, "30 levels"),
    "metadata beyond a double": ({"metadata": {"a": [2**1024]}}, "larger than a double"),
    "metadata of 1 MB": ({"metadata": {"a": "x" * 1_000_000}}, "the limit is 65536"),
    "no JPEG": ({"thumbnail": b"GIF89a"}, "no JPEG"),
    "large thumbnail": ({"thumbnail": JPEG[:3] + bytes(MAX_THUMBNAIL_BYTES)}, "limit is 65536"),
    "no origin": ({"source": replace(SOURCE, origin="")}, "origin"),
    "origin with NUL": ({"source": replace(SOURCE, origin="a\0")}, "NUL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_item_refuses_the_whole_call(gallery: Gallery, name: str) -> None:
    fields, reason = BAD[name]
    with pytest.raises(InvalidArgument, match=rf"^items\[1\]: .*{reason}") as caught:
        gallery.upsert([GalleryItem("good", ONE), replace(GalleryItem("bad", ONE), **fields)])
    assert "\n" not in str(caught.value)
    assert gallery.list() == []
    if "source" in fields:
        with pytest.raises(InvalidArgument, match=reason):
            gallery.touch({"k": fields["source"]})


def test_a_key_that_comes_twice_is_refused(gallery: Gallery) -> None:
    with pytest.raises(InvalidArgument, match=r"items\[2\]: items\[0\] has the same key 'a'"):
        gallery.upsert([GalleryItem("a", ONE), GalleryItem("b", ONE), GalleryItem("a", ONE)])
    assert gallery.list() == []


def _count(path: Path, times: int) -> None:
    """Add one to the number in the item's metadata, so often, searching again whenever it has changed."""
    with closing(Gallery.open(path, policy=MANUAL)) as gallery:
        while times:
            ((hit,),) = gallery.search(ONE[None], 1)
            more = GalleryItem("counter", ONE, metadata={"count": hit.metadata["count"] + 1})
            try:
                gallery.upsert([more], expected={"counter": hit.version})
            except Conflict:
                continue
            times -= 1
            if times % 10 == 0:  # an index that either makes, both use
                gallery.rebuild()


def test_two_processes_that_write_on_condition_lose_no_update(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem("counter", ONE, metadata={"count": 0})])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        list(processes.map(_count, [gallery.path] * 2, [50] * 2))
    assert gallery.get(["counter"])[0].metadata == {"count": 100}
    assert gallery.search(ONE[None], 1)[0][0].metadata == {"count": 100}
    assert gallery.info().generation == 10
    assert len(list(gallery.path.glob("index-*.faiss"))) == 1


def test_pages(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem(key, ONE) for key in ("b/2", "a", "b/1", "c", "\U0010ffff", "\uffff", "é")])
    assert [item.key for item in gallery.list(after="c")] == ["é", "\uffff", "\U0010ffff"]  # by code points


def test_a_thumbnail_that_was_altered_is_told(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem("a", ONE, thumbnail=JPEG), GalleryItem("b", ONE, thumbnail=JPEG + b"b")])
    sql(gallery.path, "UPDATE thumbnails SET jpeg = :jpeg WHERE seq = 1", jpeg=JPEG[:-1] + b"?")
    with pytest.raises(BadArtifact, match=r"the thumbnail of the item 'a' has been altered"):
        gallery.get(["b", "a"], thumbnails=True)
    assert gallery.get(["b"], thumbnails=True)[0].thumbnail == JPEG + b"b"
    assert gallery.get(["a"])[0].key == "a"  # without it the item can be read


def test_thumbnails_are_kept_where_the_gallery_keeps_them(gallery: Gallery, tmp_path: Path) -> None:
    assert gallery.meta.thumbnail_side == 64
    largest = JPEG + bytes(MAX_THUMBNAIL_BYTES - len(JPEG))
    thumbnails = {"a": JPEG, "b": b"", "c": largest}
    gallery.upsert(GalleryItem(key, ONE, thumbnail=jpeg) for key, jpeg in thumbnails.items())
    assert gallery.get(["a"])[0].thumbnail == b""  # it was not asked for
    with_them = gallery.get(["b", "a", "c"], thumbnails=True)
    assert [(item.key, item.thumbnail) for item in with_them] == [(key, thumbnails[key]) for key in "bac"]
    with closing(created(tmp_path / "plain")) as plain:
        with pytest.raises(InvalidArgument, match=r"'a' has a thumbnail, and the gallery plain keeps none"):
            plain.upsert([GalleryItem("a", ONE, thumbnail=JPEG)])
        assert plain.list() == []


def test_sources_by_key_and_by_origin(gallery: Gallery) -> None:
    gallery.upsert([*(GalleryItem(key, ONE, source=SOURCE) for key in "cab"), GalleryItem("plain", ONE)])
    found = gallery.find(["a", "plain", "nothing"])
    assert {key: item.source for key, item in found.items()} == {"a": SOURCE, "plain": None}
    assert gallery.keys_of(SOURCE.origin) == ["a", "b", "c"]
    assert gallery.keys_of(SOURCE.origin, after="a", limit=1) == ["b"]
    assert gallery.keys_of("elsewhere") == []
    version = gallery.get(["a"])[0].version
    moved = replace(SOURCE, mtime_ns=-1, size=(1 << 63) - 1)
    other = replace(SOURCE, digest=b"\2" * 32)  # and only what is made of the same bytes is touched
    gallery.touch({"a": moved, "nothing": moved, "b": other, "plain": SOURCE})
    assert [item.source for item in gallery.get(["a", "b", "plain"])] == [moved, SOURCE, None]
    assert gallery.get(["a"])[0].version == version
    with pytest.raises(InvalidArgument, match="origin"):
        gallery.keys_of("")


ALTERATIONS = {
    "key": "'k2'",
    "label": "label || 'x'",
    "uri": "'elsewhere'",
    "metadata": "'{}'",
    "checksum": "checksum + 1",
    "vector": "x'0000803f000000000000000000000001'",
}


@pytest.mark.parametrize("column", ALTERATIONS)
def test_item_that_was_altered_on_the_disk_is_told_by_its_key(gallery: Gallery, column: str) -> None:
    gallery.upsert([GalleryItem(f"k{i}", AXES[i], "label", "uri", {"i": i}) for i in (0, 1)])
    sql(gallery.path, f"UPDATE items SET {column} = {ALTERATIONS[column]} WHERE key = 'k1'")
    key = "k2" if column == "key" else "k1"
    assert gallery.get(["k0"])[0].key == "k0"
    gallery.retire()  # or what is in memory would do
    for use in (
        lambda: gallery.get([key]),
        lambda: gallery.list(),
        lambda: gallery.search(ONE[None], 1),
        gallery.rebuild,
    ):
        with pytest.raises(BadArtifact, match=f"the item '{key}' has been altered.*restore it from a backup"):
            use()
