"""What every call passes, over a real socket, with handlers of every kind behind it."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import gallery_service_pb2 as pb
from serving.errors import NotFound
from serving.rpc.gate import boundary
from serving.rpc.gate.access import Access
from serving.rpc.gate.admission import Admission
from serving.rpc.gate.audit import Audit
from serving.rpc.gate.boundary import Boundary
from serving.rpc.watch.call import Call
from serving.rpc.watch.metrics import Metrics
from serving.telemetry import request_id

METHOD = "/crossbatch.v1.TestService/{}"


@dataclass
class Counted(Metrics):
    """Remembers how calls ended."""

    codes: list[str] = field(default_factory=list)

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "", late: bool = False) -> None:
        self.codes.append(code)


@dataclass
class Behind:
    """Handlers that tell where they are, and can be made to wait or fail."""

    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    failing: Exception | None = None
    seen: list[str] = field(default_factory=list)

    async def whole(self, request: Any, context: Any) -> pb.Gallery:
        self.seen.append(request_id.get())
        self.started.set()
        try:
            if self.failing is not None:
                raise self.failing
            await self.go_on.wait()
            return pb.Gallery(name=request.name)
        finally:
            self.ended.set()

    async def streamed(self, request: Any, context: Any) -> AsyncIterator[pb.Gallery]:
        try:
            for i in range(3):
                yield pb.Gallery(name=f"{request.name} {i}")
                self.started.set()
                await self.go_on.wait()
        finally:
            self.ended.set()

    async def both(self, requests: Any, context: Any) -> AsyncIterator[pb.Gallery]:
        yield pb.Gallery()


@dataclass
class Running:
    boundary: Boundary
    admission: Admission
    behind: Behind
    metrics: Counted
    channel: Any

    def whole(self, **options: Any) -> Any:
        return self.channel.unary_unary(METHOD.format("Whole"))(
            pb.GetGalleryRequest(name="x").SerializeToString(), **options
        )

    def streamed(self, **options: Any) -> Any:
        return self.channel.unary_stream(METHOD.format("Streamed"))(
            pb.GetGalleryRequest(name="x").SerializeToString(), **options
        )


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    behind, metrics = Behind(), Counted()
    admission = Admission(8)
    guard = Boundary(admission, Access(), Audit(), metrics, {})
    server = grpc.aio.server(interceptors=[guard])
    read = pb.GetGalleryRequest.FromString
    handlers: dict[str, Any] = {
        "Whole": grpc.unary_unary_rpc_method_handler(behind.whole, read),
        "Streamed": grpc.unary_stream_rpc_method_handler(behind.streamed, read),
        "Both": grpc.stream_stream_rpc_method_handler(behind.both, read),
        "Gathering": grpc.stream_unary_rpc_method_handler(behind.whole, read),
    }
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("crossbatch.v1.TestService", handlers),
            grpc.method_handlers_generic_handler(
                "crossbatch.v1.RetrievalService", {"Search": handlers["Whole"]}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Running(guard, admission, behind, metrics, channel)
    finally:
        await server.stop(0)


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
    return sum(type(each) is boundary._Passage for each in gc.get_objects())
