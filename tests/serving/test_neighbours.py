"""Search results as they travel: the bytes of ordinary messages, each item written once, within a bound."""

import time
from typing import Any

import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as pb
from serving.errors import BadArtifact, BadImage, DeadlineExceeded, InvalidArgument
from serving.gallery.item import Hit
from serving.rpc.loose import loosened
from serving.rpc.services import neighbours
from serving.rpc.services.neighbours import Options, search_results
from serving.rpc.status import Refusal
from serving.rpc.wire import metadata_of, struct_of

UNIT = np.eye(1, 4, dtype=np.float32)[0]


class FakeGallery:
    """Finds the same hits for each query, and remembers how many queries came at once."""

    def __init__(self, *metadata: dict[str, Any]) -> None:
        self.hits = [
            Hit(f"k{i}", f"l{i}", f"u{i}", each, 1 - i / 7, i + 1) for i, each in enumerate(metadata)
        ]
        self.asked: list[int] = []

    def search(self, vectors: Any, k: int, **options: Any) -> list[list[Hit]]:
        self.asked.append(len(vectors))
        return [self.hits[:k] for _ in vectors]


def found_by(gallery: Any, outcomes: list[Any], k: int = 10, deadline: float | None = None) -> list[bytes]:
    return search_results(gallery, outcomes, Options(k), deadline)


def test_what_travels_is_a_search_result_like_any_other() -> None:
    metadata = [{"price": 3, "tags": ["a", None, {"b": True}]}, {}]
    first, bad, second = found_by(FakeGallery(*metadata), [UNIT, BadImage("not an image"), UNIT])
    assert first == second
    expected = [
        pb.Hit(
            key=f"k{i}",
            score=1 - i / 7,
            label=f"l{i}",
            uri=f"u{i}",
            metadata=struct_of(each) if each else None,
            version=i + 1,
        )
        for i, each in enumerate(metadata)
    ]
    assert pb.SearchResult.FromString(first) == pb.SearchResult(hits=expected)
    assert pb.SearchResult.FromString(bad).error.message == "not an image"
    reply = loosened(pb.SearchResponse)(results=[first, bad], model_fingerprint="f" * 64)
    assert pb.SearchResponse.FromString(reply.SerializeToString()).results[0].hits[1].key == "k1"


def test_an_item_that_is_replaced_between_two_blocks_is_told_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "HITS_AT_ONCE", 1)

    class Changing(FakeGallery):
        def search(self, vectors: Any, k: int, **options: Any) -> list[list[Hit]]:
            self.asked.append(len(vectors))
            return [[Hit("k", f"label {len(self.asked)}", "", {}, 1.0, len(self.asked))]]

    found = found_by(Changing(), [UNIT, UNIT])
    assert [pb.SearchResult.FromString(each).hits[0].label for each in found] == ["label 1", "label 2"]


def test_an_items_metadata_is_converted_once_however_often_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converted: list[Any] = []

    def noted(metadata: Any) -> Any:
        converted.append(metadata)
        return struct_of(metadata)

    monkeypatch.setattr(neighbours, "struct_of", noted)
    found_by(FakeGallery(*[{"i": i} for i in range(5)]), [UNIT] * 50)
    assert len(converted) == 5


def test_a_search_stops_as_soon_as_its_reply_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MAX_MESSAGE_BYTES", 11_000_000)
    gallery = FakeGallery(*[{"text": "x" * 10_000} for _ in range(200)])
    with pytest.raises(Refusal, match="fewer neighbours or send fewer queries") as failure:
        found_by(gallery, [UNIT] * 256, k=200)
    assert isinstance(failure.value.violations[0].error, InvalidArgument)
    assert gallery.asked == [5, 5]  # of 256; 5 x 200 hits fit, 10 x 200 do not
    assert len(found_by(gallery, [UNIT] * 4, k=200)) == 4


def test_a_usual_search_asks_the_gallery_once() -> None:
    gallery = FakeGallery({})
    found_by(gallery, [UNIT] * 100, k=10)
    assert gallery.asked == [100]


def test_a_search_that_nobody_waits_for_ends() -> None:
    with pytest.raises(DeadlineExceeded):
        found_by(FakeGallery({}), [UNIT], deadline=time.monotonic() - 1)


def nested(levels: int) -> dict[str, Any]:
    inner: Any = 1
    for _ in range(levels - 1):
        inner = {"x": inner}
    return {"x": inner}


def test_metadata_that_was_stored_another_way_and_cannot_travel_names_its_item() -> None:
    for metadata in (nested(31), {"n": 10**400}):
        with pytest.raises(BadArtifact, match="'k0' of the gallery cannot be sent"):
            found_by(FakeGallery(metadata), [UNIT])


def test_metadata_as_deep_as_it_may_be_travels_both_ways_and_deeper_is_refused_at_once() -> None:
    deep = struct_of(nested(30))
    item = gallery_pb.UpsertItemsRequest(items=[gallery_pb.Item(metadata=deep)]).SerializeToString()
    stored = metadata_of(gallery_pb.UpsertItemsRequest.FromString(item).items[0].metadata)
    (found,) = found_by(FakeGallery(stored), [UNIT])
    reply = loosened(pb.SearchResponse)(results=[found]).SerializeToString()
    assert metadata_of(pb.SearchResponse.FromString(reply).results[0].hits[0].metadata) == nested(30)
    circular: dict[str, Any] = {}
    circular["x"] = circular
    lists: Any = [1]
    for _ in range(30):
        lists = [lists]
    for metadata in (nested(31), nested(5_000), circular, {"x": lists}):
        with pytest.raises(InvalidArgument, match="nested more than 30 levels"):
            struct_of(metadata)


def test_neither_two_thousand_results_with_metadata_nor_many_searches_slow_down() -> None:
    metadata = {"price": 3, "tags": ["a", "b"], "text": "x" * 200}
    gallery = FakeGallery(*[dict(metadata) for _ in range(2_000)])

    def seconds_a_hit(k: int, rounds: int) -> float:
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            found_by(gallery, [UNIT], k)
            took.append(time.perf_counter() - began)
        return min(took) / k

    few = seconds_a_hit(10, 30)
    assert seconds_a_hit(2_000, 4) < 20 * few
    assert seconds_a_hit(10, 30) < 20 * few  # nor does it take longer after many
