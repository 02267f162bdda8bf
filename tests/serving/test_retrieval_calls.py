"""Embed, Search and Explain over real sockets, with a fake encoder: each input answered for itself."""

import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as pb
from serving.errors import BadArtifact, DeadlineExceeded
from serving.gallery.item import GalleryItem, Neighbour
from serving.model import preprocess
from serving.observability.call import Call
from serving.rpc import limits
from serving.rpc.services import convert, retrieval
from serving.rpc.services.retrieval import neighbours
from serving.rpc.status import Refusal
from serving.rpc.wire import bytes_of, plain_of, vector_of
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, FakeSpec, explanation_for, vector_for
from tests.serving.stubs import Stubs, image, item, refusal_of

INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder(FakeSpec(prototypes=5))


def embed(stubs: Stubs, *images: bytes, model: str = "") -> Any:
    return stubs.retrieval.Embed(pb.EmbedRequest(images=images, model=model))


def explain(stubs: Stubs, *images: bytes, model: str = "") -> Any:
    return stubs.retrieval.Explain(pb.ExplainRequest(images=images, model=model))


def test_embed_answers_each_image_in_order_with_the_model_and_the_times(stubs: Stubs) -> None:
    images = [b"%d" % i for i in range(40)]
    reply = stubs.embed(*images)
    for data, result in zip(images, reply.results, strict=True):
        np.testing.assert_array_equal(np.frombuffer(result.vector, "<f4"), vector_for(data))
    assert (reply.model_name, reply.model_fingerprint, reply.dimension) == ("fake", "a" * 64, DIMENSION)
    times = reply.timings
    assert 0 < times.decode_us <= times.total_us
    assert 0 < times.encode_us <= times.total_us


def test_one_bad_image_fails_alone(stubs: Stubs, encoder: FakeEncoder) -> None:
    results = stubs.embed(b"good", b"bad", b"", b"bug", b"also good").results
    assert [bool(each.vector) for each in results] == [True, False, False, False, True]
    internal = grpc.StatusCode.INTERNAL.value[0]
    assert [each.error.code for each in results] == [0, INVALID, INVALID, internal, 0]
    assert results[1].error.message == "These bytes hold no image."
    assert "0 bytes" in results[2].error.message
    assert "secret" not in str(results[3].error)
    assert encoder.encoded == 2


@pytest.mark.parametrize("call", [embed, explain])
def test_when_every_image_is_bad_the_call_fails_and_names_all(stubs: Stubs, call: Callable[..., Any]) -> None:
    said = refusal_of(
        lambda: call(stubs, b"bad", b""), "INVALID_ARGUMENT", "images[0]", "images[1]", reason="BAD_IMAGE"
    )
    assert said == "images[0]: These bytes hold no image."


@pytest.mark.parametrize(("call", "most"), [(embed, limits.MAX_INPUTS), (explain, limits.MAX_EXPLAINED)])
def test_no_images_too_many_and_another_model_are_refused_before_any_is_decoded(
    stubs: Stubs, encoder: FakeEncoder, call: Callable[..., Any], most: int
) -> None:
    for images in ([], [b"x"] * (most + 1)):
        refusal_of(partial(call, stubs, *images), "INVALID_ARGUMENT", "images")
    assert "fake" in refusal_of(lambda: call(stubs, b"x", model="other"), "NOT_FOUND")
    assert encoder.decoded == []


def test_a_photograph_past_grpcs_own_limit_arrives_and_past_ours_not(
    stubs: Stubs, encoder: FakeEncoder
) -> None:
    assert stubs.embed(bytes(6_000_000)).results[0].vector
    large = bytes(preprocess.MAX_BYTES + 1)
    said = refusal_of(lambda: stubs.embed(large), "INVALID_ARGUMENT", reason="BAD_IMAGE")
    assert f"{preprocess.MAX_BYTES:,}" in said
    assert len(encoder.decoded) == 1  # the second was refused by its bytes alone
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(large, large)
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_each_image_has_its_histogram_and_where_its_prototypes_are(stubs: Stubs) -> None:
    photos = [b"one", b"bad", *(b"%d" % i for i in range(6))]  # more than are explained at once
    reply = explain(stubs, *photos)
    assert (reply.model_name, reply.model_fingerprint, reply.prototypes) == ("fake", "a" * 64, 5)
    assert reply.timings.total_us > 0
    bad = reply.results[1]
    for photo, result in zip(photos, reply.results, strict=True):
        if result is bad:
            continue
        histogram, assignments = explanation_for(zlib.crc32(photo), 5)
        np.testing.assert_array_equal(vector_of(result.histogram), histogram)
        rows = np.frombuffer(result.assignments, np.uint8).reshape(result.height, result.width)
        np.testing.assert_array_equal(rows, assignments)
        assert not result.HasField("error")
    info = error_details_pb2.ErrorInfo()
    assert bad.error.details[0].Unpack(info)
    assert (bad.error.code, info.reason) == (INVALID, "BAD_IMAGE")
    assert (bad.histogram, bad.assignments, bad.height) == (b"", b"", 0)


@pytest.fixture
def birds(stubs: Stubs) -> Stubs:
    stubs.create("birds")
    items = [item(f"k{i}", label=f"label k{i}", uri=f"file:k{i}") for i in range(20)]
    items[3].metadata.update({"price": 3, "size": 2.5, "tags": ["a", None, True], "deep": {"x": "y"}})
    assert stubs.upsert("birds", *items).stored == 20
    return stubs


def test_search_by_image_vector_and_key(birds: Stubs) -> None:
    queries = [image(b"k3"), pb.Query(vector=bytes_of(vector_for(b"k4"))), pb.Query(key="k5")]
    reply = birds.search("birds", *queries, k=5)
    vectors = np.stack([vector_for(f"k{i}".encode()) for i in range(20)])
    for own, result in zip(("k3", "k4", "k5"), reply.results, strict=True):
        scores = vectors @ vector_for(own.encode())
        assert [hit.key for hit in result.hits] == [f"k{i}" for i in np.argsort(-scores)[:5]]
        np.testing.assert_allclose([hit.score for hit in result.hits], np.sort(scores)[::-1][:5], atol=1e-6)
    first = reply.results[0].hits[0]
    assert (first.label, first.uri) == ("label k3", "file:k3")
    metadata = plain_of(first.metadata)
    assert metadata == {"price": 3, "size": 2.5, "tags": ["a", None, True], "deep": {"x": "y"}}
    assert reply.timings.gallery_us > 0
    assert reply.model_fingerprint == "a" * 64


def test_search_options(birds: Stubs) -> None:
    query = pb.Query(key="k5")
    assert len(birds.search("birds", query).results[0].hits) == limits.DEFAULT_K
    assert len(birds.search("birds", query, k=1000).results[0].hits) == 20
    hits = birds.search("birds", query, exclude_keys=["k5", "no such"]).results[0].hits
    assert "k5" not in {hit.key for hit in hits}
    assert [hit.key for hit in birds.search("birds", query, minimum_score=0.999).results[0].hits] == ["k5"]


def test_a_field_that_no_item_has_is_named_and_matches_nothing(birds: Stubs) -> None:
    brand = pb.Filter(equal=pb.Filter.Equal(field="brnd", value=pb.Filter.Value(string="acme")))
    for wanted, found in ((brand, 0), (pb.Filter(negated=brand), 10)):
        reply = birds.search("birds", pb.Query(key="k1"), filter=wanted, exclude_same="typo")
        assert (len(reply.results[0].hits), list(reply.unknown_fields)) == (found, ["brnd", "typo"])
    assert not birds.search("birds", pb.Query(key="k1")).unknown_fields


def test_one_bad_query_fails_alone(birds: Stubs) -> None:
    vectors = (
        b"123",
        bytes_of(np.ones(3)),
        bytes_of(np.full(DIMENSION, np.nan)),
        bytes_of(vector_for(b"k8")),
    )
    wrong, short, nan, right = (pb.Query(vector=each) for each in vectors)
    seventh, nobody = pb.Query(key="k7"), pb.Query(key="nobody")
    queries = [image(b"bad"), seventh, nobody, wrong, short, nan, pb.Query(), right]
    results = birds.search("birds", *queries).results
    missing = grpc.StatusCode.NOT_FOUND.value[0]
    assert [each.error.code for each in results] == [INVALID, 0, missing, *4 * [INVALID], 0]
    assert (results[1].hits[0].key, results[7].hits[0].key) == ("k7", "k8")
    assert "nobody" in results[2].error.message


def test_when_every_query_is_bad_the_call_fails_and_names_all(birds: Stubs) -> None:
    far = pb.Query(vector=bytes_of(2 * vector_for(b"k1")))
    queries = [image(b"bad"), pb.Query(key="nobody"), pb.Query(vector=b"123"), far, pb.Query()]
    fields = ["queries[0].image", "queries[1].key", "queries[2].vector", "queries[3].vector", "queries[4]"]
    refusal_of(lambda: birds.search("birds", *queries), "INVALID_ARGUMENT", *fields, reason="BAD_IMAGE")
    said = refusal_of(
        lambda: birds.search("birds", far, far), "INVALID_ARGUMENT", "queries[0].vector", "queries[1].vector"
    )
    assert said.startswith("queries[0].vector: query vector has norm 2; expected unit norm")


def test_what_is_out_of_bounds_is_refused(stubs: Stubs) -> None:
    one, galleries = image(b"x"), stubs.galleries
    search, upsert = partial(stubs.search, "birds"), partial(stubs.upsert, "birds")
    scores, keys = (float("nan"), 1.5, -1.5), (["x"] * 1001, ["x", ""])
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("queries", search),
        ("queries", partial(search, *[one] * 257)),
        ("k", partial(search, *[one] * 256, k=1_000)),
        *(("k", partial(search, one, k=wrong)) for wrong in (0, limits.MAX_K + 1)),
        *(("minimum_score", partial(search, one, minimum_score=wrong)) for wrong in scores),
        *(("exclude_keys", partial(search, one, exclude_keys=wrong)) for wrong in keys),
        ("filter", partial(search, one, filter=pb.Filter())),
        ("items", upsert),
        ("items", partial(upsert, *(item(f"{i}") for i in range(257)))),
        ("keys", partial(galleries.DeleteItems, gallery_pb.DeleteItemsRequest(gallery="birds"))),
        ("page_size", partial(galleries.ListGalleries, gallery_pb.ListGalleriesRequest(page_size=1001))),
    ]
    for field, call in calls:
        refusal_of(call, "INVALID_ARGUMENT", field)


class FakeGallery:
    """Finds the same hits for each query, and remembers how many queries came at once."""

    def __init__(self, *metadata: dict[str, Any]) -> None:
        self.hits = [
            Neighbour(f"k{i}", f"l{i}", f"u{i}", each, 1 - i / 7, i + 1) for i, each in enumerate(metadata)
        ]
        self.asked: list[int] = []

    def search(self, vectors: Any, k: int, **options: Any) -> list[list[Neighbour]]:
        self.asked.append(len(vectors))
        return [self.hits[:k] for _ in vectors]


UNIT = np.eye(1, 4, dtype=np.float32)[0]


def found_by(gallery: Any, vectors: list[Any], k: int = 10, call: Call | None = None) -> pb.SearchResponse:
    reply = pb.SearchResponse()
    neighbours(reply, gallery, vectors, {"k": k}, call or Call("RetrievalService/Search"))
    return reply


def test_a_search_stops_as_soon_as_its_reply_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "MAX_MESSAGE_BYTES", 11_000_000)
    gallery = FakeGallery(*[{"text": "x" * 10_000} for _ in range(200)])
    with pytest.raises(Refusal, match="fewer neighbours or send fewer queries") as failure:
        found_by(gallery, [UNIT] * 256, k=200)
    assert failure.value.violations[0].field == "k"
    assert gallery.asked == [5, 5]  # of 256; 5 x 200 hits fit, 10 x 200 do not
    assert len(found_by(gallery, [UNIT] * 4, k=200).results) == 4


def test_a_usual_search_asks_the_gallery_once_and_one_that_is_late_stops() -> None:
    gallery = FakeGallery({})
    found_by(gallery, [UNIT] * 100)
    assert gallery.asked == [100]
    with pytest.raises(DeadlineExceeded):
        found_by(gallery, [UNIT] * 200, call=Call("", deadline=time.monotonic() - 1))
    assert gallery.asked == [100, 102]


def nested(levels: int) -> dict[str, Any]:
    inner: Any = 1
    for _ in range(levels):
        inner = {"x": inner}
    return dict(inner)


@pytest.mark.parametrize("metadata", [nested(40), nested(5_000), {"n": 10**400}])
def test_metadata_that_cannot_travel_names_its_item(metadata: dict[str, Any]) -> None:
    with pytest.raises(BadArtifact, match="'k0' of the gallery cannot be sent"):
        found_by(FakeGallery(metadata), [UNIT])
    stored = GalleryItem("k0", UNIT, metadata=metadata)
    with pytest.raises(BadArtifact, match="'k0' of the gallery cannot be sent"):
        convert.write_item(gallery_pb.ListItemsResponse().items.add(), stored, with_vector=False)


def test_metadata_as_deep_as_it_may_be_travels_both_ways() -> None:
    deep, deeper = item("k"), item("k")
    deep.metadata.update(nested(30))
    sent = gallery_pb.UpsertItemsRequest(items=[deep]).SerializeToString()
    request = gallery_pb.UpsertItemsRequest.FromString(sent)
    ((read, _),) = convert.read_items(request.items, DIMENSION, Call("")).items
    back = found_by(FakeGallery(dict(read.metadata)), [UNIT]).SerializeToString()
    assert plain_of(pb.SearchResponse.FromString(back).results[0].hits[0].metadata) == nested(30)
    deeper.metadata.update(nested(31))
    with pytest.raises(Refusal, match="nested more than 30 levels"):
        convert.read_items([deeper], DIMENSION, Call(""))
