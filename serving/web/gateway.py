"""The gateway: a request in JSON becomes a call to the server's own address, whose keys and limits hold."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from protos.model_service_pb2 import ListModelsRequest
from serving.client.connection import status_of
from serving.errors import Draining, InvalidArgument, NotFound, Overloaded, PermissionDenied
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import to_status
from serving.web.transcoding import ROUTES, Route, json_of

__all__ = ["HTTP_STATUS", "Gateway"]

HTTP_STATUS = {
    "CANCELLED": 499, "INVALID_ARGUMENT": 400, "DEADLINE_EXCEEDED": 504, "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409, "PERMISSION_DENIED": 403, "UNAUTHENTICATED": 401, "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400, "ABORTED": 409, "OUT_OF_RANGE": 400, "UNIMPLEMENTED": 501, "UNAVAILABLE": 503,
}  # fmt: skip
"""By the name of a status of gRPC, as google.rpc.Code has it; 500 for all others."""
SECONDS, STREAM_SECONDS = 60.0, 86_400.0
"""Longest time of a call, and of one that answers by a stream."""
BODY_SECONDS = 60.0
"""Longest time for a body to arrive."""
MOST_VALUES = 200_000
"""Most values in a body, as images and vectors are text: to read more would keep all other calls waiting."""
SMALL_BYTES = 65_536
"""Size up to which a body is read before the server has seen the key."""
MOST_HELD = 2 * MAX_MESSAGE_BYTES
"""Most bytes of all bodies in memory at once; several times as many while they are read."""
FORWARDED = ("authorization", "x-api-key", "x-request-id", "traceparent")

_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_KINDS = {403: PermissionDenied, 404: NotFound}  # of what makes no call; else InvalidArgument


class Gateway:
    """An ASGI application that answers the paths of the proto files."""

    def __init__(self, channel: Callable[[], Awaitable[grpc.aio.Channel]]) -> None:
        """Call by the channel that `channel` gives."""
        self._channel, self._held = channel, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            response = await self._response(request)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            response = _failure(error)
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        # A page of another site can send a request here, though it cannot read the reply.
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise HTTPException(403, "Pages of other sites may not call this server.")
        route, variables = _found(request.method, request.scope["raw_path"].decode())
        media, _, _ = request.headers.get("content-type", "").partition(";")
        if route.has_body and media.strip().lower() != "application/json":
            told = f"The content-type {media!r:.100} is not application/json; send the fields as JSON."
            raise HTTPException(415, told)
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    await self._receive(request, body)
            except TimeoutError as error:
                told = f"The body did not arrive within {BODY_SECONDS:.0f} s; send it again."
                raise HTTPException(408, told) from error
            if sum(map(body.count, (b",", b"{", b"["))) > MOST_VALUES:
                raise HTTPException(413, f"The body has more than {MOST_VALUES:,} values; split the call.")
            if len(body) > SMALL_BYTES:
                await self._known(request)
            query = request.scope["query_string"]
            message = await asyncio.to_thread(route.request, variables, query, body)
        finally:
            self._held -= len(body)
        return await self._called(request, route, message)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Receive a body, so long as there is room for it."""
        async for chunk in request.stream():
            if len(body) + len(chunk) > MAX_MESSAGE_BYTES:
                raise HTTPException(
                    413, f"The body is larger than {MAX_MESSAGE_BYTES:,} bytes; split the call."
                )
            if self._held + len(chunk) > MOST_HELD:
                raise Overloaded("Too many bodies are on their way; try again.", retry_after=1.0)
            body += chunk
            self._held += len(chunk)

    async def _known(self, request: Request) -> None:
        """Let the server refuse a caller before his large body is read."""
        ask: Any = (await self._channel()).unary_unary(
            "/crossbatch.v1.ModelService/ListModels", ListModelsRequest.SerializeToString
        )
        await ask(ListModelsRequest(), timeout=SECONDS, metadata=_metadata(request))

    async def _called(self, request: Request, route: Route, message: Message) -> Response:
        method, streams = route.method, route.method.server_streaming
        channel = await self._channel()
        make: Any = channel.unary_stream if streams else channel.unary_unary
        call = make(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )(message, timeout=STREAM_SECONDS if streams else SECONDS, metadata=_metadata(request))
        leaving = asyncio.ensure_future(request.receive())  # gives nothing more before the browser leaves
        leaving.add_done_callback(lambda left: left.cancelled() or call.cancel())
        try:
            reply = await (call.read() if streams else call)
        except asyncio.CancelledError:
            if leaving.done():
                raise ClientDisconnect from None
            raise
        finally:
            leaving.cancel()
        if streams:
            return StreamingResponse(_array(call, reply), media_type="application/json")
        headers = _headers(await call.trailing_metadata())
        return Response(await asyncio.to_thread(json_of, reply), 200, headers, "application/json")


def _found(verb: str, path: str) -> tuple[Route, dict[str, str]]:
    """Find the route of a raw path."""
    found = [(route, variables) for route in ROUTES if (variables := route.variables(path)) is not None]
    for route, variables in found:
        if route.verb == verb:
            return route, variables
    if not found:
        raise HTTPException(404, f"There is no path {path!r:.200}; docs/api.md lists them all.")
    allow = ", ".join(sorted({route.verb for route, _ in found}))
    raise HTTPException(405, f"{verb} is not for {path!r:.200}; it takes {allow}.", {"allow": allow})


def _metadata(request: Request) -> list[tuple[str, str]]:
    """The headers that go on to the server; gRPC takes printable ASCII alone."""
    sent = [each for each in request.headers.items() if each[0] in FORWARDED]
    return [each for each in sent if each[1].isascii() and each[1].isprintable()]


def _headers(trailing: Any) -> dict[str, str]:
    return {key: str(value) for key, value in trailing or () if key == "x-request-id"}


async def _array(call: Any, message: Any) -> AsyncIterator[str]:
    """Write a stream, whose first message is read, as an array that grows; a failure's status is the last."""
    before = "["
    try:
        while message is not grpc.aio.EOF:
            yield before + json_of(message)
            before = ","
            message = await call.read()
    except grpc.aio.AioRpcError as error:
        yield before + json_of(_status(error))
    finally:
        call.cancel()
    yield "]" if before == "," else "[]"


def _status(error: BaseException) -> status_pb2.Status:
    if isinstance(error, HTTPException):
        return to_status(_KINDS.get(error.status_code, InvalidArgument)(error.detail))
    if not isinstance(error, grpc.aio.AioRpcError):
        return to_status(error if isinstance(error, Exception) else Draining("The server is stopping."))
    if (status := status_of(error)).details:
        return status
    told = error.details() or ""  # gRPC itself speaks
    if "larger than max" in told:
        return to_status(
            InvalidArgument(f"The reply is larger than {MAX_MESSAGE_BYTES:,} bytes; ask for less.")
        )
    return status_pb2.Status(code=error.code().value[0], message=told)


def _failure(error: BaseException) -> Response:
    """Say by HTTP why there is no reply."""
    status, headers = _status(error), dict[str, str]()
    code = HTTP_STATUS.get(_NAMES.get(status.code, ""), 500)
    if isinstance(error, HTTPException):
        code, headers = error.status_code, dict(error.headers or {})
    elif isinstance(error, grpc.aio.AioRpcError):
        headers = _headers(error.trailing_metadata())
    retry = error_details_pb2.RetryInfo()
    if any(each.Unpack(retry) for each in status.details):
        headers["retry-after"] = str(math.ceil(retry.retry_delay.ToNanoseconds() / 1e9))
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(json_of(status), code, headers, "application/json")
