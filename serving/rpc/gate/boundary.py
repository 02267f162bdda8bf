"""Where calls enter and leave: request id, decoding of the message, the error table, one log line a call."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from serving.errors import InvalidArgument
from serving.rpc.gate.access import Access, identity
from serving.rpc.gate.admission import Admission
from serving.rpc.gate.audit import Audit
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.parts import check_parts
from serving.rpc.server.metrics import Metrics
from serving.rpc.status import to_status
from serving.telemetry import new_request_id, request_id

__all__ = ["PACKAGES", "Boundary", "deadline_of"]

logger = logging.getLogger(__name__)

PACKAGES = ("crossbatch.v1.", "inference.")
REQUEST_ID = "x-request-id"

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def deadline_of(context: "grpc.aio.ServicerContext[Any, Any]") -> float | None:
    """Tell the `time.monotonic()` at which the caller stops to wait; None when he waits for ever."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


@dataclass(slots=True)
class _Passage:
    """A call on its way through."""

    name: str
    context: "grpc.aio.ServicerContext[Any, Any]"
    request: Any = None


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps every call of our own packages that has one request; health and reflection pass as they are."""

    def __init__(
        self,
        admission: Admission,
        access: Access,
        audit: Audit,
        metrics: Metrics,
        readers: Mapping[str, Callable[[bytes], Any]],
    ) -> None:
        """Keep what calls pass through.

        Args:
            admission: Accounts for the bytes of each call, and knows whether the server drains.
            access: Knows who calls.
            audit: Notes who wrote what.
            metrics: Counts calls.
            readers: What unpacks the requests of some calls in place of their own message class.
        """
        self._admission = admission
        self._access = access
        self._audit = audit
        self._metrics = metrics
        self._readers = readers
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "AnyHandler | None":
        """Put the wrapper around a handler of ours."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        package = next((each for each in PACKAGES if method.startswith(f"/{each}")), None)
        if handler is None or package is None:
            return handler
        name = method.removeprefix(f"/{package}")
        read: Any = self._readers.get(name, handler.request_deserializer)
        whole: Any = handler.unary_unary
        streamed: Any = handler.unary_stream

        async def answer(data: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
            async with self._passing(name, method, data, context) as passage:
                passage.request = _parsed(method, read, data)
                return _written(await whole(passage.request, context))
            raise AssertionError("abort always raises")

        async def stream(data: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[bytes]:
            async with self._passing(name, method, data, context) as passage:
                passage.request = _parsed(method, read, data)
                async for reply in streamed(passage.request, context):
                    yield _written(reply)

        # No serialisers here: a message that cannot be read or is too long has its place in the error table.
        if whole is not None:
            return grpc.unary_unary_rpc_method_handler(answer)
        return grpc.unary_stream_rpc_method_handler(stream)

    async def wait_idle(self, longest: float) -> None:
        """Wait until no call of ours is in progress, for `longest` seconds at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), longest)

    @asynccontextmanager
    async def _passing(
        self, name: str, method: str, data: bytes, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[_Passage]:
        """Let one call in, and see it out with the status that its end deserves."""
        passage = _Passage(name, context)
        mark = new_request_id(_sent_id(context))
        marked = request_id.set(mark)
        context.set_trailing_metadata(((REQUEST_ID, mark),))
        began = time.monotonic()
        code, status = "CANCELLED", None
        self._calls += 1
        self._idle.clear()
        self._metrics.began(name)
        try:
            identity.set(self._access.check(method, context.invocation_metadata() or ()))
            with self._admission.receive(len(data)):
                yield passage
            code = "OK"
        except Exception as error:
            status = to_status(error)
            code = _name_of(status)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            took = time.monotonic() - began
            self._metrics.ended(name, code, took)
            self._audit.record(name, passage.request, code, peer=context.peer())
            told = {"rpc": name, "code": code, "milliseconds": round(took * 1e3, 3)}
            logger.info("%s %s", name, code, extra=told)
            request_id.reset(marked)
        if status is not None:
            rich = rpc_status.to_status(status)
            await context.abort(rich.code, rich.details, (*rich.trailing_metadata, (REQUEST_ID, mark)))


def _sent_id(context: "grpc.aio.ServicerContext[Any, Any]") -> str:
    for key, value in context.invocation_metadata() or ():
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


def _name_of(status: status_pb2.Status) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == status.code)
