"""Calls of Search: by image, vector and key, with options, and each bad query alone."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.rpc import limits
from serving.rpc.services import neighbours
from serving.rpc.wire import bytes_of, metadata_of
from tests.serving.rpc_fakes import DIMENSION, vector_for
from tests.serving.stubs import Stubs, fields_of, image, item, refused


def test_search_by_image_vector_and_key(stubs: Stubs) -> None:
    stubs.create("birds")
    keys = [f"k{i}" for i in range(20)]
    items = [item(key, label=f"label {key}", uri=f"file:{key}") for key in keys]
    items[3].metadata.update({"price": 3, "size": 2.5, "tags": ["a", None, True], "deep": {"x": "y"}})
    assert stubs.upsert("birds", *items).stored == 20
    queries = [
        image(b"k3"),
        retrieval_pb.Query(vector=bytes_of(vector_for(b"k4"))),
        retrieval_pb.Query(key="k5"),
    ]
    reply = stubs.search("birds", *queries, k=5)
    vectors = np.stack([vector_for(key.encode()) for key in keys])
    for own, result in zip(("k3", "k4", "k5"), reply.results, strict=True):
        scores = vectors @ vector_for(own.encode())
        assert [hit.key for hit in result.hits] == [keys[i] for i in np.argsort(-scores)[:5]]
        np.testing.assert_allclose([hit.score for hit in result.hits], np.sort(scores)[::-1][:5], atol=1e-6)
    first = reply.results[0].hits[0]
    assert (first.label, first.uri) == ("label k3", "file:k3")
    assert metadata_of(first.metadata) == {
        "price": 3,
        "size": 2.5,
        "tags": ["a", None, True],
        "deep": {"x": "y"},
    }
    assert reply.timings.gallery_us > 0
    assert reply.model_fingerprint == "a" * 64


def test_search_options(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", *(item(f"k{i}") for i in range(20)))
    query = retrieval_pb.Query(key="k5")
    assert len(stubs.search("birds", query).results[0].hits) == limits.DEFAULT_K
    assert len(stubs.search("birds", query, k=1000).results[0].hits) == 20
    hits = stubs.search("birds", query, exclude_keys=["k5", "no such"]).results[0].hits
    assert "k5" not in {hit.key for hit in hits}
    assert [hit.key for hit in stubs.search("birds", query, minimum_score=0.999).results[0].hits] == ["k5"]


def test_a_field_that_no_item_has_is_named_and_matches_nothing(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", *(item(f"k{i}") for i in range(3)))
    brand = retrieval_pb.Filter(
        equal=retrieval_pb.Filter.Equal(field="brnd", value=retrieval_pb.Filter.Value(string="acme"))
    )
    reply = stubs.search("birds", retrieval_pb.Query(key="k1"), filter=brand)
    assert (len(reply.results[0].hits), list(reply.unknown_fields)) == (0, ["brnd"])
    reply = stubs.search("birds", retrieval_pb.Query(key="k1"), filter=retrieval_pb.Filter(negated=brand))
    assert (len(reply.results[0].hits), list(reply.unknown_fields)) == (3, ["brnd"])
    assert not stubs.search("birds", retrieval_pb.Query(key="k1")).unknown_fields


def test_one_bad_query_fails_alone(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("k"))
    results = stubs.search(
        "birds",
        image(b"bad"),
        retrieval_pb.Query(key="k"),
        retrieval_pb.Query(key="nobody"),
        retrieval_pb.Query(vector=b"123"),
        retrieval_pb.Query(vector=bytes_of(np.ones(3))),
        retrieval_pb.Query(vector=bytes_of(np.full(DIMENSION, np.nan))),
        retrieval_pb.Query(),
    ).results
    codes = [
        grpc.StatusCode.INVALID_ARGUMENT,
        None,
        grpc.StatusCode.NOT_FOUND,
        *4 * [grpc.StatusCode.INVALID_ARGUMENT],
    ]
    assert [each.error.code for each in results] == [code.value[0] if code else 0 for code in codes]
    assert results[1].hits[0].key == "k"
    assert "nobody" in results[2].error.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"k": 0}, "k"),
        ({"k": limits.MAX_K + 1}, "k"),
        ({"minimum_score": float("nan")}, "minimum_score"),
        ({"minimum_score": 1.5}, "minimum_score"),
        ({"minimum_score": -1.5}, "minimum_score"),
        ({"exclude_keys": ["x"] * 1001}, "exclude_keys"),
        ({"exclude_keys": ["x", ""]}, "exclude_keys"),
        ({"filter": retrieval_pb.Filter()}, "filter"),
        ({"filter": retrieval_pb.Filter(range=retrieval_pb.Filter.Range(field="a"))}, "filter"),
    ],
)
def test_search_out_of_bounds_is_refused(stubs: Stubs, options: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        stubs.search("birds", image(b"x"), **options)
    refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == [field]


def test_too_many_and_no_inputs_are_refused(stubs: Stubs) -> None:
    galleries: Any = stubs.galleries
    calls: list[Callable[[], Any]] = [
        lambda: stubs.embed(),
        lambda: stubs.embed(*[b"x"] * 257),
        lambda: stubs.search("birds"),
        lambda: stubs.search("birds", *[image(b"x")] * 257),
        lambda: stubs.search("birds", *[image(b"x")] * 256, k=1000),
        lambda: stubs.upsert("birds"),
        lambda: stubs.upsert("birds", *(item(f"{i}") for i in range(257))),
        lambda: galleries.DeleteItems(gallery_pb.DeleteItemsRequest(gallery="birds")),
        lambda: galleries.ListGalleries(gallery_pb.ListGalleriesRequest(page_size=1001)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as failure:
            call()
        refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")


def test_a_search_whose_reply_would_be_too_large_is_refused_with_advice(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.create("birds")
    items = [item(f"{i}") for i in range(20)]
    for each in items:
        each.metadata.update({"text": "x" * 60_000})
    stubs.upsert("birds", *items)
    monkeypatch.setattr(neighbours, "MAX_MESSAGE_BYTES", 1_000_000)
    with pytest.raises(grpc.RpcError) as failure:
        stubs.search("birds", image(b"x"), image(b"y"))
    assert "fewer neighbours" in refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert fields_of(failure) == ["k"]
    assert len(stubs.search("birds", image(b"x"), image(b"y"), k=5).results[1].hits) == 5
