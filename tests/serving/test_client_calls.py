"""What each call of the clients sends, and what it makes of the reply: models, galleries, explanations."""

import threading
from typing import Any

import grpc
import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.client.client import BuildProgress, Client, Explanation, Reloaded
from serving.errors import BadImage, CrossbatchError, InvalidArgument, NotFound, Overloaded, Unavailable
from serving.rpc.status import to_status
from serving.rpc.wire import bytes_of
from tests.serving.scripts import scripted

BIRDS = gallery_pb.Gallery(name="birds", items=3, dimension=8)
FAKE = model_pb.Model(name="fake", fingerprint="a", dimension=8, prototypes=3)


def explained(request: retrieval_pb.ExplainRequest) -> retrieval_pb.ExplainResponse:
    results = [
        retrieval_pb.ExplainResult(error=to_status(BadImage("no image")))
        if image == b"bad"
        else retrieval_pb.ExplainResult(
            histogram=bytes_of(np.array([0.5, 0.25, 0.25])), assignments=bytes(range(6)), height=2, width=3
        )
        for image in request.images
    ]
    return retrieval_pb.ExplainResponse(results=results, prototypes=3)


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
        with pytest.raises(BadImage, match="input 1: no image"):
            client.explain([b"x", b"bad"])
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
    assert "has the field 'brnd' of the filter" in line.getMessage()


def test_a_model_is_named_in_embed_search_and_create() -> None:
    answers: dict[str, Any] = {
        "Embed": lambda request: retrieval_pb.EmbedResponse(
            results=[retrieval_pb.EmbedResult(vector=bytes(4))]
        ),
        "Search": lambda request: retrieval_pb.SearchResponse(results=[retrieval_pb.SearchResult()]),
        "CreateGallery": lambda request: gallery_pb.CreateGalleryResponse(gallery=BIRDS),
        "GetModel": lambda request: model_pb.GetModelResponse(model=FAKE),
    }
    with scripted(answers) as script, Client(script.address) as client:
        client.embed([b"x"], model="fake")
        client.search("birds", images=[b"x"], model="fake")
        client.create("birds", model="fake")
        assert client.embed([], model="fake").shape == (0, 8)
        client.model()
        assert [getattr(each, "model", None) or each.name for each in script.requests] == ["fake"] * 4 + [""]
        for call in (
            lambda: client.embed([b"x"], model=5),  # type: ignore[call-overload]
            lambda: client.search("birds", images=[b"x"], model=None),  # type: ignore[call-overload]
            lambda: client.create("birds", model=b"fake"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgument, match="model must be a string"):
                call()


def test_models_are_listed_and_reloaded() -> None:
    answers: dict[str, Any] = {
        "ListModels": lambda request: model_pb.ListModelsResponse(
            models=[FAKE, model_pb.Model(name="other")]
        ),
        "ReloadModels": lambda request: model_pb.ReloadModelsResponse(
            models=[FAKE], loaded=["fake"], removed=["other"]
        ),
    }
    with scripted(answers) as script, Client(script.address) as client:
        fake, other = client.models()
        assert (fake.name, fake.prototypes, other.prototypes) == ("fake", 3, 0)
        assert client.reload() == Reloaded((fake,), ("fake",), ("other",))


def test_galleries_are_switched_and_deleted_and_never_twice() -> None:
    lost: list[Any] = []

    def told(reply: Any) -> Any:
        return lambda request: lost.pop() if lost else reply

    answers = {
        "SwitchGallery": told(gallery_pb.SwitchGalleryResponse(gallery=BIRDS)),
        "RollbackGallery": told(gallery_pb.RollbackGalleryResponse(gallery=BIRDS, other="next")),
        "DeleteGallery": told(gallery_pb.DeleteGalleryResponse()),
    }
    with scripted(answers) as script, Client(script.address) as client:
        assert client.switch("birds", "next").items == client.rollback("birds").items == 3
        client.delete_gallery("birds")
        assert script.requests == [
            gallery_pb.SwitchGalleryRequest(name="birds", other="next"),
            gallery_pb.RollbackGalleryRequest(name="birds"),
            gallery_pb.DeleteGalleryRequest(name="birds"),
        ]
        for call in (
            lambda: client.switch("birds", "next"),
            lambda: client.rollback("birds"),
            lambda: client.delete_gallery("birds"),
        ):
            lost.append(grpc.StatusCode.UNAVAILABLE)
            with pytest.raises(Unavailable):
                call()
        assert len(script.requests) == 6


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
        assert len(script.requests) == 2
        with pytest.raises(NotFound):
            next(client.build_index("nowhere"))
        for wrong in ({"recall": 2}, {"index": 5}, {"timeout": -1}, {"timeout": "long"}):
            with pytest.raises(InvalidArgument):
                client.build_index("birds", **wrong)


def test_leaving_the_progress_breaks_the_work_off_and_its_failure_is_ours() -> None:
    broken_off = threading.Event()

    def endless() -> Any:
        try:
            while True:
                yield gallery_pb.BuildIndexResponse(stage="training")
        finally:
            broken_off.set()

    def failing() -> Any:
        yield gallery_pb.BuildIndexResponse(stage="training")
        raise ZeroDivisionError

    works = [failing, endless]
    with scripted({"BuildIndex": lambda request: works.pop()()}) as script, Client(script.address) as client:
        reading = client.build_index("birds")
        assert next(reading).stage == "training"
        reading.close()  # type: ignore[attr-defined]
        assert broken_off.wait(5)
        failed = client.build_index("birds")
        assert next(failed).stage == "training"
        with pytest.raises(CrossbatchError):
            next(failed)
