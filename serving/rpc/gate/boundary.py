"""Where calls enter and leave: request id, who calls, decoding, the error table, one log line a call."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, nullcontext, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving.errors import InvalidArgument
from serving.rpc.gate.access import Access, identity
from serving.rpc.gate.admission import Admission
from serving.rpc.gate.audit import Audit
from serving.rpc.gate.roles import PACKAGES, brings_inputs, short_name
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.parts import check_parts
from serving.rpc.status import to_status
from serving.rpc.watch.call import Call, current_call
from serving.rpc.watch.metrics import Metrics
from serving.rpc.watch.tracing import Tracer
from serving.telemetry import new_request_id, request_id

__all__ = ["Boundary", "deadline_of"]

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
# Asked whether the server is ready, it has to say no while it stops, and yes while it is busy.
PROBES = frozenset(f"GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady"))

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def deadline_of(context: Context) -> float | None:
    """Tell the `time.monotonic()` at which the caller stops to wait; None when he waits for ever."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


class _Door(NamedTuple):
    """A handler, and what stands before it."""

    handler: "AnyHandler"
    name: str
    guarded: "AnyHandler | None"
    brings_inputs: bool


class Boundary(grpc.aio.ServerInterceptor):
    """Lets calls in, and sees those of our own packages out; others, once in, go as they are."""

    def __init__(
        self,
        admission: Admission,
        access: Access,
        audit: Audit,
        metrics: Metrics,
        readers: Mapping[str, Callable[[bytes], Any]],
        *,
        tracer: Tracer | None = None,
    ) -> None:
        """Keep what calls pass through.

        Args:
            admission: Accounts for the bytes of each call, and knows whether the server drains.
            access: Knows who calls.
            audit: Notes who wrote what.
            metrics: Counts calls.
            readers: What unpacks the requests of some calls in place of their own message class.
            tracer: Takes note of each call with all its parts.
        """
        self._admission = admission
        self._access = access
        self._audit = audit
        self._metrics = metrics
        self._readers = readers
        self._tracer = tracer
        self._doors: dict[str, _Door] = {}
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "AnyHandler | None":
        """Turn away whom there is no key or room for before his message is received; wrap handlers of ours.

        The task is the call's own: what is set here is seen wherever the call is worked for, and ends so.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        door = self._doors.get(method)
        if door is None or door.handler is not handler:
            door = self._doors[method] = _Door(
                handler, short_name(method), self._guarded(method, handler), brings_inputs(method)
            )
        metadata = handler_call_details.invocation_metadata or ()
        request_id.set(new_request_id(_sent_id(metadata)))
        try:
            caller = self._access.identify(method, metadata)
            identity.set(caller)
            self._access.allow(method, caller)
            if door.brings_inputs:
                self._admission.check_room()
        except Exception as error:
            return self._refusing(door.name, method, to_status(error))
        return door.guarded

    async def wait_idle(self, longest: float) -> None:
        """Wait until no call of ours is in progress, for `longest` seconds at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), longest)

    def _guarded(self, method: str, handler: "AnyHandler") -> "AnyHandler | None":
        """Wrap a handler; None, which gRPC answers with UNIMPLEMENTED, for a kind that none of ours is of."""
        if not method.startswith(tuple(f"/{each}" for each in PACKAGES)):
            return handler
        if handler.request_streaming:
            return None
        name = short_name(method)
        read: Any = self._readers.get(name, handler.request_deserializer)
        receive: Any = nullcontext if name in PROBES else self._admission.receive
        whole: Any = handler.unary_unary
        streamed: Any = handler.unary_stream

        async def answer(data: bytes, context: Context) -> bytes:
            reply = b""
            with _Passage(self, Call(name, method), context) as passage, receive(len(data)):
                passage.request = _parsed(method, read, data)
                reply = _written(await whole(passage.request, context))
            await passage.leave()
            return reply

        async def stream(data: bytes, context: Context) -> None:
            with _Passage(self, Call(name, method), context) as passage, self._admission.receive(len(data)):
                passage.request = _parsed(method, read, data)
                async with aclosing(streamed(passage.request, context)) as replies:
                    async for reply in replies:
                        # Not by `yield`: a call that is cancelled there ends only when it is collected.
                        await context.write(_written(reply))
            await passage.leave()

        # No serialisers here: a message that cannot be read or is too long has its place in the error table.
        if whole is not None:
            return grpc.unary_unary_rpc_method_handler(answer)
        return grpc.unary_stream_rpc_method_handler(stream)

    def _refusing(self, name: str, method: str, status: status_pb2.Status) -> "AnyHandler":
        """Answer a call with a status, whatever its kind."""

        async def refuse(_: object, context: Context) -> None:
            with _Passage(self, Call(name, method), context) as passage:
                passage.status = status
            await passage.leave()

        # As a stream, which is the same on the wire, since its message is then not received first: of who has
        # no key, and of an overload, not much is left to do.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _entered(self, call: Call) -> None:
        self._calls += 1
        self._idle.clear()
        self._metrics.began(call)

    def _left(self, passage: "_Passage", code: str) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()
        call, context = passage.call, passage.context
        name, took = call.rpc, time.monotonic() - call.began
        reason = "" if passage.status is None else _reason_of(passage.status)
        left = context.time_remaining()
        self._metrics.ended(call, code, took, reason=reason, late=left is not None and left <= 0)
        if self._tracer is not None:
            metadata = list(context.invocation_metadata() or ())
            self._tracer.record(call, code=code, seconds=took, reason=reason, metadata=metadata)
        peer = passage.context.peer()
        passage.noted = self._audit.record(name, passage.request, code, peer=peer, seconds=took)
        told = {"rpc": name, "code": code, "milliseconds": round(took * 1e3, 3), "inputs": call.inputs}
        if identity.get().name:
            told["client"] = identity.get().name
        logger.info("%s %s", name, code, extra=told)


class _Passage:
    """A call on its way through: what it fails with ends here, and becomes the status that it deserves."""

    __slots__ = ("_boundary", "call", "context", "noted", "request", "status")

    def __init__(self, boundary: Boundary, call: Call, context: Context) -> None:
        self._boundary = boundary
        self.call = call
        self.context = context
        self.request: Any = None
        self.status: status_pb2.Status | None = None
        self.noted: Future[None] | None = None

    def __enter__(self) -> Self:
        self.context.set_trailing_metadata(((REQUEST_ID, request_id.get()),))
        current_call.set(self.call)
        self._boundary._entered(self.call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.status = to_status(error)
        # What is no Exception cancels: the caller has gone, or his time, or the server's.
        code = "OK" if error is None else "CANCELLED"
        if self.status is not None:
            code = _name_of(self.status)
        self._boundary._left(self, code)
        return isinstance(error, Exception)

    async def leave(self) -> None:
        """See a call out that was not cancelled, after its audit line is written.

        Not by `context.abort`: gRPC's state of the call keeps the exception that it raises, and with that the
        frames it passed, in a circle. What these hold, the message of up to 64 MiB, would stay until the next
        collection.
        """
        if self.noted is not None:
            await asyncio.wait([asyncio.wrap_future(self.noted)], timeout=Audit.LONGEST_WAIT)
        if self.status is not None:
            rich = rpc_status.to_status(self.status)
            self.context.set_code(rich.code)
            self.context.set_details(rich.details)
            self.context.set_trailing_metadata((*rich.trailing_metadata, (REQUEST_ID, request_id.get())))


def _sent_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == REQUEST_ID and isinstance(value, str):
            return value
    return ""


def _parsed(method: str, read: Callable[[bytes], Any] | None, data: bytes) -> Any:
    try:
        check_parts(data)
        return read(data) if read is not None else data
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(
            f"The message is not a request of {method[1:]}; check the proto files."
        ) from error


def _written(reply: Any) -> bytes:
    data: bytes = reply.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"The reply has {len(data):,} bytes and at most {MAX_MESSAGE_BYTES:,} are sent; "
            "ask for fewer neighbours or split the call."
        )
    return data


_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _name_of(status: status_pb2.Status) -> str:
    return _CODE_NAMES[status.code]


def _reason_of(status: status_pb2.Status) -> str:
    """What the ErrorInfo that each of our statuses has names as the reason."""
    info = error_details_pb2.ErrorInfo()
    return info.reason if status.details and status.details[0].Unpack(info) else ""
