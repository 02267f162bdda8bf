"""Where calls enter and leave: request id, decoding of the message, the error table, one log line a call."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from serving.errors import InvalidArgument
from serving.rpc.admission import Admission
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import to_status
from serving.telemetry import new_request_id, request_id

__all__ = ["PACKAGE", "Boundary", "deadline_of"]

logger = logging.getLogger(__name__)

PACKAGE = "crossbatch.v1."
REQUEST_ID = "x-request-id"

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]


def deadline_of(context: "grpc.aio.ServicerContext[Any, Any]") -> float | None:
    """Tell the `time.monotonic()` at which the caller stops to wait; None when he waits for ever."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps every unary call of our own package; health and reflection pass as they are."""

    def __init__(self, admission: Admission, readers: Mapping[str, Callable[[bytes], Any]]) -> None:
        """Keep what calls pass through.

        Args:
            admission: Accounts for the bytes of each call, and knows whether the server drains.
            readers: What unpacks the requests of some calls in place of their own message class.
        """
        self._admission = admission
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
        method = str(handler_call_details.method).lstrip("/")
        if handler is None or handler.unary_unary is None or not method.startswith(PACKAGE):
            return handler
        name = method.removeprefix(PACKAGE)
        read: Any = self._readers.get(name, handler.request_deserializer)
        behaviour: Any = handler.unary_unary

        async def call(data: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
            return await self._call(name, read, behaviour, data, context)

        # No serialisers here: a message that cannot be read or is too long has its place in the error table.
        return grpc.unary_unary_rpc_method_handler(call)

    async def wait_idle(self, longest: float) -> None:
        """Wait until no call of ours is in progress, for `longest` seconds at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), longest)

    async def _call(
        self,
        name: str,
        read: Callable[[bytes], Any] | None,
        behaviour: Handler,
        data: bytes,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> bytes:
        identity = new_request_id(_sent_id(context))
        token = request_id.set(identity)
        context.set_trailing_metadata(((REQUEST_ID, identity),))
        began = time.monotonic()
        code = "CANCELLED"
        self._calls += 1
        self._idle.clear()
        try:
            with self._admission.receive(len(data)):
                data = _written(await behaviour(_parsed(name, read, data), context))
            code = "OK"
            return data
        except Exception as error:
            status = to_status(error)
            code = _name_of(status)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            took = round((time.monotonic() - began) * 1e3, 3)
            logger.info("%s %s", name, code, extra={"rpc": name, "code": code, "milliseconds": took})
            request_id.reset(token)
        rich = rpc_status.to_status(status)
        await context.abort(rich.code, rich.details, (*rich.trailing_metadata, (REQUEST_ID, identity)))
        raise AssertionError("abort always raises")


def _sent_id(context: "grpc.aio.ServicerContext[Any, Any]") -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str):
            return value
    return ""


def _parsed(name: str, read: Callable[[bytes], Any] | None, data: bytes) -> Any:
    try:
        return read(data) if read is not None else data
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(
            f"The message is not a request of {PACKAGE}{name}; check the proto files."
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
