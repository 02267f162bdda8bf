"""What every call passes, over a real socket, with handlers of every kind behind it."""

import asyncio
import gc
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import gallery_service_pb2 as pb
from serving.errors import NotFound
from serving.observability.audit import Audit
from serving.observability.call import Call
from serving.rpc import arrivals, register
from serving.rpc.ending import Ending
from serving.rpc.passage import Passage
from serving.rpc.register import Register
from tests.serving.boundary_fakes import METHOD, Counted, running


def test_answers_pass_whole_and_streamed_with_the_callers_id() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.behind.go_on.set()
            call = it.whole(metadata=(("x-request-id", "mine"),))
            assert pb.Gallery.FromString(await call).name == "x"
            assert ("x-request-id", "mine") in list(await call.trailing_metadata())
            assert it.behind.seen == ["mine"]
            names = [pb.Gallery.FromString(data).name async for data in it.streamed()]
            assert names == ["x 0", "x 1", "x 2"]
            assert it.metrics.codes == ["OK", "OK"]

    asyncio.run(scenario())


def test_what_there_is_no_room_for_is_refused_before_its_message_is_received() -> None:
    """At an overload most calls are refused: each must cost little, or none is answered in time."""

    async def scenario() -> None:
        async with running() as it:
            it.behind.go_on.set()
            search = it.channel.stream_unary("/crossbatch.v1.RetrievalService/Search")
            with it.admission.admit(8):
                call = search()  # whose message never comes
                with pytest.raises(grpc.aio.AioRpcError, match="8 of at most 8 inputs") as failure:
                    await call
                assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                details = rpc_status.from_call(failure.value).details
                assert any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in details)
                assert await it.whole()  # a call without inputs may need no permit
            it.admission.draining = True
            with pytest.raises(grpc.aio.AioRpcError, match="is stopping"):
                await search()
            assert it.metrics.codes == ["RESOURCE_EXHAUSTED", "OK", "UNAVAILABLE"]

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["whole", "streamed"])
def test_work_ends_when_its_caller_times_out_or_leaves(kind: str) -> None:
    async def scenario() -> None:
        async with running() as it:
            for give_up in (dict[str, float](), {"timeout": 0.2}):
                it.behind.started.clear()
                it.behind.ended.clear()
                call = getattr(it, kind)(**give_up)
                reader = asyncio.ensure_future(call if kind == "whole" else call.read())
                await it.behind.started.wait()
                if not give_up:
                    call.cancel()
                await asyncio.wait_for(it.behind.ended.wait(), 5)
                await it.boundary.wait_idle(5)
                with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    await reader
            assert it.metrics.codes == ["CANCELLED", "CANCELLED"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "ask",
    [
        lambda channel: channel.stream_stream(METHOD.format("Both"))(iter([b""])).read(),
        lambda channel: channel.stream_unary(METHOD.format("Gathering"))(iter([b""])),
    ],
)
def test_a_kind_of_call_that_the_boundary_does_not_know_passes_it_not(
    ask: Callable[[grpc.aio.Channel], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running() as it:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await ask(it.channel)
            assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert not it.behind.seen

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text


def test_a_stream_of_replies_holds_the_bytes_of_its_request() -> None:
    async def scenario() -> None:
        async with running(most_bytes=5) as it:
            replies = it.streamed()
            await replies.read()
            await asyncio.sleep(0.1)  # until the reply, which counts too, has gone
            assert it.admission.bytes == len(pb.GetGalleryRequest(name="x").SerializeToString()) == 3
            with pytest.raises(grpc.aio.AioRpcError, match="3 of at most 5 bytes") as failure:
                await it.streamed().read()
            assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            it.behind.go_on.set()
            assert [await replies.read() for _ in range(3)][-1] is grpc.aio.EOF
            await it.boundary.wait_idle(5)
            assert it.admission.bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("name", "kind"), [("Whole", "stream_unary"), ("Streamed", "stream_stream")])
def test_a_server_that_drains_takes_no_message_that_is_still_coming_in(name: str, kind: str) -> None:
    async def scenario() -> None:
        async with running() as it:
            it.behind.go_on.set()
            begin = getattr(it.channel, kind)(METHOD.format(name))
            call = begin()
            await it.metrics.are_in_flight(1)
            it.boundary.drain()
            for late in (call, begin()):
                assert await late.code() == grpc.StatusCode.UNAVAILABLE
                assert "is stopping" in await late.details()
            await it.boundary.wait_idle(5)
            assert it.metrics.codes == ["UNAVAILABLE", "UNAVAILABLE"]

    asyncio.run(scenario())


def test_a_write_that_is_refused_or_comes_in_too_slowly_is_noted_like_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "ARRIVAL_SECONDS", 0.2)
    codes = ["RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"]

    async def scenario() -> None:
        async with running(tmp_path / "audit.jsonl") as it:
            delete = it.channel.stream_unary("/crossbatch.v1.GalleryService/DeleteGallery")
            waiting = [it.whole() for _ in range(24)]
            await it.metrics.are_in_flight(24)
            for code in codes:
                call = delete(metadata=(("x-request-id", f"mine {code}"),))  # whose message never comes
                assert (await call.code()).name == code
                assert ("x-request-id", f"mine {code}") in list(await call.trailing_metadata())
                it.behind.go_on.set()
                await asyncio.gather(*waiting)
                await it.boundary.wait_idle(5)
            assert [code for code in it.metrics.codes if code != "OK"] == codes

    asyncio.run(scenario())
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["code"] for line in lines] == codes
    assert all(line["peer"].startswith("127.0.0.1:") for line in lines)
    assert [line["request_id"] for line in lines] == [f"mine {code}" for code in codes]


def test_the_line_of_a_write_whose_call_has_ended_meanwhile_has_its_address(tmp_path: Path) -> None:
    """gRPC does not know the address of a call any more once that has ended."""

    class Ended:
        peers: ClassVar[list[str]] = ["", "ipv4:127.0.0.1:1"]

        def peer(self) -> str:
            return self.peers.pop()

        def time_remaining(self) -> None:
            return None

        def set_trailing_metadata(self, metadata: object) -> None:
            pass

    kept = Audit(tmp_path / "audit.jsonl")
    context: Any = Ended()
    with (
        pytest.raises(asyncio.CancelledError),
        Passage(Register(kept, Counted()), Call("GalleryService/DeleteGallery"), context),
    ):
        raise asyncio.CancelledError
    kept.close()
    (line,) = (json.loads(each) for each in (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (line["code"], line["peer"]) == ("CANCELLED", "127.0.0.1:1")


def test_many_refusals_alike_are_worked_out_once_and_logged_in_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(register, "SECOND", 0.5)
    made: list[Exception] = []
    of = Ending.of

    def counted(error: Exception) -> Ending:
        made.append(error)
        return of(error)

    monkeypatch.setattr(Ending, "of", counted)

    async def scenario() -> None:
        async with running() as it:
            search = it.channel.stream_unary("/crossbatch.v1.RetrievalService/Search")
            with it.admission.admit(8):
                codes = [await call.code() for call in [search() for _ in range(50)]]
            assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert len(it.metrics.codes) == 50
            await asyncio.sleep(1.0)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert len(made) == 1
    assert caplog.messages.count("RetrievalService/Search RESOURCE_EXHAUSTED") == register.MOST_LINES
    assert "40 more calls were refused: RESOURCE_EXHAUSTED OVERLOADED" in caplog.messages


def test_refused_calls_leak_no_memory_and_log_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of a call that ends with an exception stays, even while nothing is collected."""

    async def scenario() -> None:
        async with running() as it:
            for failure in (NotFound("it is not there"), None):
                it.behind.failing = failure
                it.behind.go_on.set()
                await asyncio.gather(*(it.whole() for _ in range(3)), return_exceptions=True)
                gc.collect()
                gc.disable()
                before = _passages()
                for _ in range(20):
                    it.behind.failing = failure and NotFound("it is not there")
                    with suppress(grpc.aio.AioRpcError):
                        await it.whole()
                await it.boundary.wait_idle(5)
                it.behind.failing = None
                assert _passages() <= before + 1

    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def _passages() -> int:
    return sum(type(each) is Passage for each in gc.get_objects())
