"""Searches for other things than the query shows, hits with their pictures and vectors, and counts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from serving import search
from serving.client import Client, Item
from serving.errors import InvalidArgument
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.item import JPEG
from serving.gallery.search.filter import Equal, Exists, Not, Range
from serving.rpc.services import retrieval
from tests.serving.indexed import picture
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.vectors import created, normalized, units

# Three photos of each of four products, near one another, the products' directions apart.
ROWS = normalized(np.repeat(np.eye(4, 8), 3, axis=0) + 0.03 * units(12, 8))
PRODUCTS: list[dict[str, Any]] = [
    {"product": f"p{i // 3}", "colours": [i // 3, i // 6], "n": i} for i in range(12)
]
PHOTO = picture(0)
PRODUCTS[11] = {"n": 11}  # of which it is not known


@pytest.fixture(params=[0, 7, 12])  # so many of them are under the index
def gallery(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gallery]:
    gallery = created(tmp_path / "g", 8, thumbnail_side=8)
    items = [
        GalleryItem(f"k{i:02}", row, "AB"[i // 6], metadata=each, thumbnail=JPEG + bytes([i]))
        for i, (row, each) in enumerate(zip(ROWS, PRODUCTS, strict=True))
    ]
    for some in (items[: request.param], items[request.param :]):
        gallery.upsert(some)
        if len(some) == request.param:
            gallery.rebuild()
    yield gallery
    gallery.close()


def numbers(hits: Any) -> set[int]:
    return {hit.metadata["n"] for hit in hits}


@pytest.mark.parametrize(
    ("at", "field", "left_out"),
    [
        (0, "product", {0, 1, 2}),
        (0, "colours", set(range(6))),  # 0, as those of p0 and p1 have it
        (7, "$label", set(range(6, 12))),
        (11, "product", {11}),  # it stands for itself
        (3, "nothing", {3}),
    ],
)
def test_what_is_the_same_as_the_query_is_no_hit(
    gallery: Gallery, at: int, field: str, left_out: set[int]
) -> None:
    rest = set(range(12)) - left_out
    for keys in ((), [f"k{at:02}"]):  # a photo that looks like it, and the item itself
        (hits,) = gallery.search(ROWS[[at]], 12, exclude_same=field, query_keys=keys)
        assert numbers(hits) == rest
        wanted = {"minimum_score": 0.0, "exclude": ["k05"], "filter": None, "group_by_label": True}
        (hits,) = gallery.search(ROWS[[at]], 1, exclude_same=field, query_keys=keys, **wanted)  # type: ignore[arg-type]
        assert numbers(hits) <= rest - {5}


def test_a_photo_of_nothing_that_is_known_leaves_nothing_out(gallery: Gallery) -> None:
    between = normalized(ROWS[[0, 1]] + ROWS[[3, 4]])  # 0.7 to both
    assert [len(hits) for hits in gallery.search(between, 12, exclude_same="product")] == [12, 12]
    hits, others = gallery.search(
        between, 12, exclude_same="product", exclude_same_above=0.5, query_keys=["", "k09"]
    )
    assert len(hits) == 9
    assert numbers(others) == set(range(9)) | {11}
    with pytest.raises(InvalidArgument, match="exclude_same_above is 2"):
        gallery.search(between, 12, exclude_same="product", exclude_same_above=2)


def test_hits_have_vectors_and_thumbnails_if_asked_for(gallery: Gallery) -> None:
    (plain,) = gallery.search(ROWS[[3]], 12)
    assert {(hit.vector, hit.thumbnail) for hit in plain} == {(None, b"")}
    (hits,) = gallery.search(ROWS[[3]], 12, with_vectors=True, with_thumbnails=True)
    for hit in hits:
        number = hit.metadata["n"]
        np.testing.assert_array_equal(hit.vector, ROWS[number])
        assert hit.thumbnail == JPEG + bytes([number])


def test_items_are_counted_as_a_search_would_find_them(gallery: Gallery) -> None:
    gallery.delete(["k01"])
    for filter, count in (
        (None, 11), (Equal("product", "p0"), 2), (Range("n", least=6), 6), (Exists("brand"), 0),
        (Not(Exists("product")), 1),
    ):  # fmt: skip
        assert gallery.count(filter) == count
    with pytest.raises(InvalidArgument, match="holds numbers"):
        gallery.count(Equal("n", "6"))


def test_clients_ask_for_others_and_for_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, Client(running.address) as client:
        client.create("shop", thumbnail_side=8)
        items = [Item(f"k{each['n']:02}", vector=ROWS[each["n"]], metadata=each) for each in PRODUCTS]
        client.upsert("shop", [*items, Item("photo", image=PHOTO, metadata={"n": 12, "product": "x"})])
        by_key, unknown = client.search("shop", keys=["k00", "k11"], k=20, exclude_same="product")
        assert numbers(by_key) == set(range(3, 13))
        assert numbers(unknown) == set(range(13)) - {11}
        (by_photo,) = client.search("shop", images=[PHOTO], k=20, exclude_same="product", with_vectors=True)
        assert numbers(by_photo) == set(range(12))
        for hit in by_photo:
            np.testing.assert_allclose(cast("Any", hit.vector), ROWS[hit.metadata["n"]], atol=1e-6)
        (by_vector,) = client.search("shop", vectors=ROWS[:1], exclude_same="product", exclude_same_above=1)
        assert len(by_vector) == 10
        assert [
            hit.thumbnail[:3] for hit in client.search("shop", keys=["photo"], k=2, with_thumbnails=True)[0]
        ] == [JPEG, b""]
        assert client.count("shop") == 13
        assert client.count("shop", filter={"product": {"$in": ["p0", "x"]}}) == 4
        with pytest.raises(InvalidArgument, match="filter"):
            client.count("shop", filter={"n": "6"})
        with pytest.raises(InvalidArgument, match="sent without exclude_same; send both, or neither"):
            client.search("shop", keys=["k00"], exclude_same_above=0.5)
        with pytest.raises(InvalidArgument, match="exclude_same_above"):
            client.search("shop", keys=["k00"], exclude_same="product", exclude_same_above=float("nan"))
        command = {
            "gallery": "shop",
            "address": running.address,
            "key": "k00",
            "exclude_same": "product",
            "k": 20,
        }
        result = search.run(search.Settings.model_validate(command))
        assert {hit["metadata"]["n"] for hit in result["hits"]} == set(range(3, 13))
        assert json.loads(json.dumps(result))["hits"]
        monkeypatch.setattr(retrieval, "MAX_MESSAGE_BYTES", retrieval._SPARE_BYTES + 1_000)
        assert client.search("shop", keys=["k00"], k=9)
        with pytest.raises(InvalidArgument, match="fewer neighbours"):
            client.search("shop", keys=["k00"], k=9, with_vectors=True, with_thumbnails=True)
