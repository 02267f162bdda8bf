"""A boundary behind a real socket, and handlers of every kind behind it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos import gallery_service_pb2 as pb
from serving.observability.audit import Audit
from serving.observability.call import Call
from serving.observability.logs import request_id
from serving.observability.metrics import Metrics
from serving.rpc.access import Access
from serving.rpc.admission import Admission
from serving.rpc.boundary import Boundary
from serving.rpc.fuse import Fuse

METHOD = "/crossbatch.v1.TestService/{}"


@dataclass
class Counted(Metrics):
    """Remembers how calls ended."""

    codes: list[str] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)

    def began(self, call: Call) -> None:
        self.in_flight[call.rpc] += 1

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "", late: bool = False) -> None:
        self.in_flight[call.rpc] -= 1
        self.codes.append(code)

    async def are_in_flight(self, calls: int) -> None:
        for _ in range(500):
            if self.in_flight.total() == calls:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.in_flight)


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
    address: str

    def whole(self, **options: Any) -> Any:
        return self.channel.unary_unary(METHOD.format("Whole"))(
            pb.GetGalleryRequest(name="x").SerializeToString(), **options
        )

    def streamed(self, **options: Any) -> Any:
        return self.channel.unary_stream(METHOD.format("Streamed"))(
            pb.GetGalleryRequest(name="x").SerializeToString(), **options
        )


@asynccontextmanager
async def running(audit: Path | None = None, **limits: int) -> AsyncIterator[Running]:
    behind, metrics = Behind(), Counted()
    admission = Admission(8, **limits)
    guard = Boundary(admission, Access(), Audit(audit), metrics, {}, fuse=Fuse(32, admission.refusals))
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
            grpc.method_handlers_generic_handler(
                "crossbatch.v1.GalleryService",
                {"DeleteGallery": handlers["Whole"], "BuildIndex": handlers["Streamed"]},
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            yield Running(guard, admission, behind, metrics, channel, address)
    finally:
        await server.stop(0)
