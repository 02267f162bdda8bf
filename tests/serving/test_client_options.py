"""What one call may have otherwise, by `with_options`, and how an error tells which call it was."""

import asyncio
import copy
import gc
import logging
import pickle
import re
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.client.async_client import AsyncClient
from serving.client.attempts import Attempts
from serving.client.client import Client, Item
from serving.errors import (
    BadImage,
    Conflict,
    CrossbatchError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from serving.gallery.directory import GalleryDirectory
from serving.observability.logs import request_id
from serving.rpc.status import Refusal, Violation, to_status
from tests.serving.rpc_fakes import FakeEncoder, serving, vector_for
from tests.serving.scripts import Script, scripted

ANSWERS: dict[str, Any] = {
    "GetModel": lambda request: model_pb.GetModelResponse(model=model_pb.Model(name="m")),
    "Embed": lambda request: retrieval_pb.EmbedResponse(
        results=[
            retrieval_pb.EmbedResult(error=to_status(BadImage("no image")))
            if image == b"bad"
            else retrieval_pb.EmbedResult(vector=b"\0\0\0\0")
            for image in request.images
        ]
    ),
    "UpsertItems": lambda request: gallery_pb.UpsertItemsResponse(versions=[1] * len(request.items)),
}


def ids(script: Script) -> list[str]:
    return [each["x-request-id"] for each in script.metadata]


def slow(request: Any) -> Any:
    time.sleep(0.5)
    return model_pb.GetModelResponse()


def test_a_single_call_may_have_less_time_and_other_retries() -> None:
    with scripted({"GetModel": slow}) as script, Client(script.address) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            client.with_options(timeout=0.1).model()
        assert time.monotonic() - began < 0.4
        client.model()
    with scripted({"GetModel": lambda _: grpc.StatusCode.UNAVAILABLE}) as script:
        with Client(script.address) as client, pytest.raises(Unavailable):
            client.with_options(retries=1).model()
        assert len(script.requests) == 2


def test_a_call_under_asyncio_may_have_other_options() -> None:
    async def ask(address: str) -> None:
        async with AsyncClient(address) as client:
            with pytest.raises(DeadlineExceeded) as failure:
                await client.with_options(timeout=0.1, request_id="order-7").model()
            assert failure.value.request_id == "order-7"
            await client.with_options(metadata={"x-shop": "a"}).model()

    with scripted({"GetModel": slow}) as script:
        asyncio.run(ask(script.address))
        assert script.metadata[1]["x-shop"] == "a"


def test_options_of_options_add_up_and_leave_the_client_as_it_was() -> None:
    with scripted(ANSWERS) as script:
        with Client(script.address, metadata={"x-shop": "a", "x-page": "1"}, api_key="s3cret") as client:
            client.with_options(metadata={"x-page": "2"}).with_options(request_id="r-1", timeout=3).model()
            client.model()
        first, second = script.metadata
    assert (first["x-shop"], first["x-page"], first["x-request-id"]) == ("a", "2", "r-1")
    assert (second["x-shop"], second["x-page"]) == ("a", "1")
    assert first["authorization"] == second["authorization"] == "Bearer s3cret"


def test_options_share_the_connection_which_the_first_client_alone_closes() -> None:
    with scripted(ANSWERS) as script:
        with Client(script.address) as client:
            with client.with_options(timeout=1.0) as quick:
                assert repr(quick) == repr(client)
                quick.model()
            assert client.model().name == "m"
        with pytest.raises(InvalidArgument, match="has been closed"):
            quick.model()
        client.close()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0.0}, {"timeout": "2"}, {"retries": -1}, {"request_id": "two words"}, {"request_id": 5},
        {"request_id": "x" * 65}, {"request_id": "line\n"}, {"metadata": [("a", "b")]},
        {"metadata": {"X-Shop": "a"}}, {"metadata": {"": "a"}}, {"metadata": {"a": 5}}, {"metadata": {5: ""}},
        {"metadata": {"a": "é"}}, {"metadata": {"a": "line\n"}}, {"metadata": {"authorization": "Bearer x"}},
        {"metadata": {"x-request-id": "a"}}, {"metadata": {"grpc-a": "1S"}}, {"metadata": {"a-bin": "x"}},
        {"metadata": {"te": "x"}}, {"metadata": {"host": "x"}},
        {"metadata": {"a": "x" * 5_000}},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument):
        client.with_options(**options)


def test_what_metadata_holds_is_in_no_message_and_no_repr() -> None:
    with pytest.raises(InvalidArgument, match="printable ASCII") as failure:
        Client("127.0.0.1:1", metadata={"x-token": "s3crét"})
    assert "s3cr" not in str(failure.value)
    with Client("127.0.0.1:1", metadata={"x-token": "s3cret"}) as client:
        assert "s3cret" not in f"{client!r} {client._options!r}"


def test_all_calls_of_one_operation_and_their_tries_have_one_id_and_two_operations_differ() -> None:
    failures: list[Any] = [grpc.StatusCode.UNAVAILABLE]

    def embedded(request: Any) -> Any:
        return failures.pop() if failures else ANSWERS["Embed"](request)

    with scripted({**ANSWERS, "Embed": embedded}) as script, Client(script.address) as client:
        client.embed([b"x"] * 600)
        first = ids(script)
        client.model()
        assert len(set(first)) == 1 < len(first)
        assert len(first[0]) == 16
        assert ids(script)[-1] not in first
        client.with_options(request_id="order-7").model()
        assert ids(script)[-1] == "order-7"


def test_an_error_tells_its_code_its_reason_and_the_request_id() -> None:
    def refuse(_: Any) -> Any:
        raise NotFound("no such model")

    with scripted({"GetModel": refuse}) as script, Client(script.address) as client:
        with pytest.raises(NotFound) as failure:
            client.model()
        error = failure.value
        assert (error.code, error.reason) == ("NOT_FOUND", "NOT_FOUND")
        assert error.request_id == ids(script)[0]
        told = "".join(traceback.format_exception(error))
        assert f"request id {error.request_id}, NOT_FOUND" in told
        assert error.request_id not in str(error)


def test_an_error_of_grpc_itself_has_them_too() -> None:
    with (
        Client("127.0.0.1:1", timeout=0.5, retries=0).with_options(request_id="r-9") as client,
        pytest.raises(Unavailable) as failure,
    ):
        client.model()
    error = failure.value
    assert (error.code, error.reason, error.request_id) == ("UNAVAILABLE", "", "r-9")
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as failed:
        client.embed([5])  # type: ignore[list-item]
    assert (failed.value.code, failed.value.reason, failed.value.request_id) == ("", "", "")


def test_an_error_of_one_input_has_them_raised_or_returned() -> None:
    with scripted(ANSWERS) as script, Client(script.address) as client:
        _, bad = client.embed([b"x", b"bad"], on_error="return")
        assert isinstance(bad, BadImage)
        assert (bad.code, bad.reason, bad.request_id) == ("INVALID_ARGUMENT", "BAD_IMAGE", ids(script)[0])
        with pytest.raises(BadImage, match="input 1: no image") as failure:
            client.embed([b"x", b"bad"])
        assert (failure.value.reason, failure.value.request_id) == ("BAD_IMAGE", ids(script)[1])


def test_errors_of_inputs_that_are_all_bad_have_them() -> None:
    def refuse(request: Any) -> Any:
        raise Refusal([Violation(f"images[{i}]", BadImage("no image")) for i in range(len(request.images))])

    with scripted({"Embed": refuse}) as script, Client(script.address) as client:
        found = client.embed([b"a", b"b"], on_error="return")
        assert {each.request_id for each in found if isinstance(each, CrossbatchError)} == set(ids(script))
        assert [each.reason for each in found if isinstance(each, CrossbatchError)] == ["BAD_IMAGE"] * 2


def test_a_bad_item_is_named_and_all_that_its_error_tells_is_kept(tmp_path: Path) -> None:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, Client(running.address) as client:
        client.create("birds")
        client.upsert("birds", [Item("a", vector=vector_for(b"a"))])
        with pytest.raises(Conflict, match=r"items\[0\]|'a'") as failure:
            client.upsert("birds", [Item("a", vector=vector_for(b"a"), expected_version=7)])
        error = failure.value
        assert (error.key, error.expected, error.found, error.code) == ("a", 7, 1, "ABORTED")
        with pytest.raises(InvalidArgument, match=r"items\[1\]") as refused:
            client.upsert("birds", [Item("b", vector=vector_for(b"b")), Item("c", vector=np.zeros(3))])
        assert (refused.value.code, len(refused.value.request_id)) == ("INVALID_ARGUMENT", 16)


def test_the_log_of_the_server_has_the_id_that_the_client_gave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen = set[str]()

    def keep(_: logging.LogRecord) -> bool:
        seen.add(request_id.get())
        return True

    caplog.handler.addFilter(keep)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, Client(running.address) as client:
        with pytest.raises(NotFound) as failure:
            client.with_options(request_id="order-7").gallery("nothing")
        assert failure.value.request_id == "order-7"
    assert "order-7" in seen


def test_an_error_is_the_same_on_the_other_side_of_a_process() -> None:
    error = Conflict("m", key="a", expected=1, found=2)
    error.request_id, error.stored = "r-1", 3
    back = pickle.loads(pickle.dumps(error))
    assert vars(back) == vars(error)
    said = error.saying("items[3]: m")
    assert (str(said), str(error), said.key, said.request_id) == ("items[3]: m", "m", "a", "r-1")


def test_a_client_is_neither_pickled_nor_copied_by_hand() -> None:
    with Client("127.0.0.1:1") as client:
        for move in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied; make one in each process"):
                move(client)


def test_a_client_that_was_closed_waits_for_no_server() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    began = time.monotonic()
    assert not client.ready(wait=5.0)
    assert time.monotonic() - began < 1


def test_a_try_that_is_made_again_is_told_to_who_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    failures: list[Any] = [grpc.StatusCode.UNAVAILABLE]
    answers = {"GetModel": lambda request: failures.pop() if failures else ANSWERS["GetModel"](request)}
    with scripted(answers) as script, Client(script.address) as client:
        client.with_options(request_id="order-7").model()
    (line,) = [each.getMessage() for each in caplog.records if "trying again" in each.getMessage()]
    assert re.search(r"No server answers .* \(request id order-7\); trying again in 0\.0\d s", line)


def attempts() -> int:
    """Tries of calls that are still held; gRPC's thread may hold one for a moment after its end."""
    until = time.monotonic() + 2
    while held := sum(type(each) is Attempts for each in gc.get_objects()):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return held


def test_a_failed_call_leaves_its_request_to_no_garbage_collector() -> None:
    async def fail(address: str) -> None:
        async with AsyncClient(address) as client:
            for _ in range(5):
                with suppress(NotFound):
                    await client.embed([bytes(1_000)])

    def refuse(_: Any) -> Any:
        raise NotFound("no such model")

    with scripted({"Embed": refuse}) as script, Client(script.address) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                with suppress(NotFound):
                    client.embed([bytes(1_000)])
            assert attempts() == 0
            asyncio.run(fail(script.address))
            assert attempts() == 0
        finally:
            gc.enable()
