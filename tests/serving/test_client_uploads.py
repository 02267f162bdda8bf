"""What a client's calls send, and long operations: a few calls at once, in order, ended by an error."""

import threading
import time
import tracemalloc
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.client import BuildProgress, Client, Explanation, Item, Reloaded
from serving.client.requests import IN_FLIGHT
from serving.errors import BadImage, Conflict, InvalidArgument, NotFound, Overloaded
from serving.rpc.limits import MAX_INPUTS
from serving.rpc.status import to_status
from serving.rpc.wire import bytes_of
from tests.serving.rpc_fakes import vector_for
from tests.serving.scripts import scripted

UNIT = vector_for(b"x")
BIRDS = gallery_pb.Gallery(name="birds", items=3, dimension=8)
FAKE = model_pb.Model(name="fake", fingerprint="a", dimension=8, prototypes=3)


def stored(request: gallery_pb.UpsertItemsRequest) -> gallery_pb.UpsertItemsResponse:
    """Gives each item the number in its key as its version."""
    return gallery_pb.UpsertItemsResponse(versions=[int(item.key) for item in request.items])


def embedded(request: retrieval_pb.EmbedRequest) -> retrieval_pb.EmbedResponse:
    """Gives each image its length as its vector."""
    vectors = [np.array([len(image)], "<f4").tobytes() for image in request.images]
    return retrieval_pb.EmbedResponse(results=[retrieval_pb.EmbedResult(vector=each) for each in vectors])


def explained(request: retrieval_pb.ExplainRequest) -> retrieval_pb.ExplainResponse:
    good = retrieval_pb.ExplainResult(
        histogram=bytes_of(np.array([0.5, 0.25, 0.25])), assignments=bytes(range(6)), height=2, width=3
    )
    bad = retrieval_pb.ExplainResult(error=to_status(BadImage("no image")))
    results = [bad if image == b"bad" else good for image in request.images]
    return retrieval_pb.ExplainResponse(results=results, prototypes=3)


def items(number: int, **fields: Any) -> Iterator[Item]:
    return (Item(str(i), vector=UNIT, **fields) for i in range(number))


class Counter:
    """Counts how many answers are being made at once."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.now, self.most, self.lock = answer, 0, 0, threading.Lock()

    def __call__(self, request: Any) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self.lock:
            self.now -= 1
        return self.answer(request)


def test_a_long_operation_has_four_calls_on_their_way_and_keeps_its_order() -> None:
    storing, embedding = Counter(stored), Counter(embedded)
    with scripted({"UpsertItems": storing, "Embed": embedding}) as script, Client(script.address) as client:
        assert client.upsert("birds", items(1_500)) == list(range(1_500))
        assert max(len(each.items) for each in script.requests) * IN_FLIGHT <= MAX_INPUTS
        assert len({each["x-request-id"] for each in script.metadata}) == 1
        vectors = client.embed(b"x" * (i % 97 + 1) for i in range(1_000))
    assert [int(each) for each in vectors[:, 0]] == [i % 97 + 1 for i in range(1_000)]
    assert storing.most == embedding.most == IN_FLIGHT


def test_what_fits_one_call_is_one_call_which_stores_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted({"UpsertItems": stored, "Embed": embedded}) as script, Client(script.address) as client:
        client.upsert("birds", items(MAX_INPUTS))
        assert len(script.requests) == 1
        client.upsert("birds", items(MAX_INPUTS + 1))
        assert len(script.requests) == 1 + 5
        monkeypatch.setattr("serving.client.requests.CHUNK_BYTES", 1_000)
        for sizes, calls in (([700] * 3, [1, 1, 1]), ([500] * 2, [2]), ([100] * 11, [2, 2, 2, 2, 2, 1])):
            script.requests.clear()
            assert len(client.embed(map(bytes, sizes))) == len(sizes)
            assert sorted(len(each.images) for each in script.requests) == sorted(calls)


def test_memory_stays_bounded_while_a_large_upload_is_sent() -> None:
    size, number = 2**20, 120
    with scripted({"UpsertItems": stored}) as script, Client(script.address) as client:
        # The server of this test keeps no requests.
        script.requests = type("Nowhere", (), {"append": lambda *_: None})()
        tracemalloc.start()
        client.upsert("birds", (Item(str(i), image=bytes(size)) for i in range(number)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 90 * size, f"{peak / size:.0f} of {number} MiB were held at once"


def test_an_error_stops_an_upload_and_tells_how_far_it_got() -> None:
    def choosy(request: gallery_pb.UpsertItemsRequest) -> Any:
        if request.items[0].key == "640":
            raise Conflict("it has another version", key="650")
        if request.items[0].key == "576":
            time.sleep(0.1)  # it ends after the one that fails
        return stored(request)

    taken = count()
    with scripted({"UpsertItems": choosy}) as script, Client(script.address) as client:
        with pytest.raises(Conflict) as failure:
            client.upsert("birds", (item for item in items(10_000) if next(taken) >= 0))
        assert failure.value.stored == 640
        assert (failure.value.key, next(taken) < 1_500) == ("650", True)
        assert len(script.requests) < 20


def test_an_error_of_the_source_is_raised_as_it_is() -> None:
    def breaking(error: Exception) -> Iterator[Item]:
        yield from items(700)
        raise error

    with scripted({"UpsertItems": stored}) as script, Client(script.address) as client:
        with pytest.raises(BadImage, match="cannot be read") as failure:
            client.upsert("birds", [*items(700), Item("broken", image="/no/such/file")])
        assert 640 - IN_FLIGHT * 64 <= failure.value.stored <= 640
        with pytest.raises(ZeroDivisionError):
            client.upsert("birds", breaking(ZeroDivisionError()))


def test_images_are_explained_at_most_32_a_call() -> None:
    with scripted({"Explain": explained}) as script, Client(script.address) as client:
        found = client.explain([b"x"] * 70, model="fake")
        assert len(found) == 70
        assert [found[0].histogram.dtype, found[0].assignments.dtype] == ["float32", "uint8"]
        np.testing.assert_array_equal(found[69].histogram, [0.5, 0.25, 0.25])
        np.testing.assert_array_equal(found[0].assignments, [[0, 1, 2], [3, 4, 5]])
        assert {each.model for each in script.requests} == {"fake"}
        assert max(len(each.images) for each in script.requests) <= 32
        good, bad = client.explain([b"x", b"bad"], on_error="return")
        assert (type(good), type(bad)) == (Explanation, BadImage)
        assert client.explain([]) == []


def test_two_explanations_overlap_by_their_common_prototypes() -> None:
    def explanation(*shares: float) -> Explanation:
        return Explanation(np.array(shares, np.float32), np.zeros((1, 1), np.uint8))

    one, other = explanation(0.5, 0.5, 0.0), explanation(0.25, 0.0, 0.75)
    assert one.overlap(other) == other.overlap(one) == 0.25
    assert one.overlap(one) == 1
    assert one.overlap(explanation(0, 0, 1)) == 0
    with pytest.raises(InvalidArgument, match="same model"):
        one.overlap(explanation(1.0))


def test_a_field_that_no_item_has_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def found(request: retrieval_pb.SearchRequest) -> retrieval_pb.SearchResponse:
        unknown = [] if request.filter.exists == "brand" else ["brnd"]
        return retrieval_pb.SearchResponse(
            results=[retrieval_pb.SearchResult() for _ in request.queries], unknown_fields=unknown
        )

    with scripted({"Search": found}) as script, Client(script.address) as client:
        for field in ("brand", "brnd", "brnd"):
            client.search("those of a test", keys=["a"], filter={field: {"$exists": True}})
    (line,) = [record for record in caplog.records if "those of a test" in record.getMessage()]
    assert "has the field 'brnd' that was asked for" in line.getMessage()


def test_each_call_sends_what_it_is_told() -> None:
    answers: dict[str, Any] = {
        "Embed": embedded,
        "Search": lambda _: retrieval_pb.SearchResponse(results=[retrieval_pb.SearchResult()]),
        "CreateGallery": lambda _: gallery_pb.CreateGalleryResponse(gallery=BIRDS),
        "SwitchGallery": lambda _: gallery_pb.SwitchGalleryResponse(gallery=BIRDS),
        "RollbackGallery": lambda _: gallery_pb.RollbackGalleryResponse(gallery=BIRDS, other="next"),
        "GetModel": lambda _: model_pb.GetModelResponse(model=FAKE),
        "ListGalleries": lambda it: gallery_pb.ListGalleriesResponse(
            galleries=[BIRDS], next_page_token="" if it.page_token else "more"
        ),
        "ReloadModels": lambda _: model_pb.ReloadModelsResponse(models=[FAKE], loaded=["a"], removed=["b"]),
    }
    made: dict[str, Any] = {"model": "fake", "recall": 0.5, "thumbnail_side": 64, "index": "auto"}
    queries = [retrieval_pb.Query(image=b"x")]
    with scripted(answers) as script, Client(script.address) as client:
        fake = client.model()
        assert (fake.name, fake.prototypes) == ("fake", 3)
        assert client.reload() == Reloaded((fake,), ("a",), ("b",))
        assert client.create("birds", model="fake", recall=0.5, thumbnail_side=64).items == 3
        assert client.switch("birds", "next").items == client.rollback("birds").items == 3
        client.embed([b"x"], model="fake")
        assert client.embed([], model="fake").shape == (0, 8)
        client.search("birds", images=[b"x"], model="fake")
        assert [each.items for each in client.galleries()] == [3, 3]
    assert script.requests == [
        model_pb.GetModelRequest(),
        model_pb.ReloadModelsRequest(),
        gallery_pb.CreateGalleryRequest(name="birds", **made),
        gallery_pb.SwitchGalleryRequest(name="birds", other="next"),
        gallery_pb.RollbackGalleryRequest(name="birds"),
        retrieval_pb.EmbedRequest(images=[b"x"], model="fake"),
        model_pb.GetModelRequest(name="fake"),
        retrieval_pb.SearchRequest(gallery="birds", queries=queries, k=10, model="fake"),
        gallery_pb.ListGalleriesRequest(),
        gallery_pb.ListGalleriesRequest(page_token="more"),
    ]


def test_an_index_is_built_while_its_progress_is_read() -> None:
    full = [Overloaded("another rebuild", retry_after=0.01)]

    def build(request: gallery_pb.BuildIndexRequest) -> Any:
        if full:
            raise full.pop()
        if request.name != "birds":
            raise NotFound("no such gallery")
        stages = [gallery_pb.BuildIndexResponse(stage="training", done=i, total=3) for i in range(3)]
        return iter([*stages, gallery_pb.BuildIndexResponse(gallery=BIRDS)])

    with scripted({"BuildIndex": build}) as script, Client(script.address) as client:
        *progress, last = client.build_index("birds", index="exact", recall=0.9)
        assert progress == [BuildProgress("training", i, 3) for i in range(3)]
        assert last.gallery is not None
        assert last.gallery.items == 3
        assert script.requests[1] == gallery_pb.BuildIndexRequest(name="birds", index="exact", recall=0.9)
        with pytest.raises(NotFound):
            next(client.build_index("nowhere"))
        with pytest.raises(InvalidArgument):
            client.build_index("birds", index=5)  # type: ignore[arg-type]
