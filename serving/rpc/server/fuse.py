"""How many calls may be open at once, and how long the message of one may take to come in."""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from serving.errors import DeadlineExceeded, InvalidArgument, Overloaded
from serving.rpc.status import to_status

__all__ = ["ARRIVAL_SECONDS", "MOST_CHECKS", "MOST_WATCHERS", "Fuse"]

ARRIVAL_SECONDS = 60.0
"""Longest time that a message may take to come in: 64 MiB at 9 Mbit/s."""
MOST_WATCHERS = 256
"""Most calls at once that last until the client hangs up."""
MOST_CHECKS = 64
"""Most questions at once whether the server is well."""
RETRY_SECONDS = 1.0
UNREADABLE = "The message is not a request of this call; check the proto files."

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Fuse(grpc.aio.ServerInterceptor):
    """Refuses calls before anything of their message is read, so that nothing is held for them.

    Those that last, watchers of health above all, are counted apart, or enough of them would shut out all
    others; and so are checks of health, lest a server that is merely busy be taken for dead. gRPC's own limit
    on calls counts all together, and it knows none on the time a message takes: as many slow senders as the
    limit allows would shut out all others too, and without a deadline for ever.
    """

    def __init__(self, most_calls: int, refusals: "Counter[str] | None" = None) -> None:
        """Set the limit of the calls that end by themselves.

        Args:
            most_calls: Most of them that are coming in, worked on or going out at once.
            refusals: Takes up how many were refused of each kind.
        """
        self._refusals = Counter[str]() if refusals is None else refusals
        self._most = {"calls": most_calls, "watchers": MOST_WATCHERS, "checks": MOST_CHECKS}
        self._open: dict[str, set[asyncio.Task[Any]]] = {kind: set() for kind in self._most}
        self._refusals.update(dict.fromkeys(self._most, 0))

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "AnyHandler | None":
        """Count a call that begins, and give it a handler that reads the message itself."""
        kind = _kind_of(str(handler_call_details.method))
        if self.count(kind) >= self._most[kind]:
            self._refusals[kind] += 1
            return _refusing(f"{self.count(kind)} {kind} are open")
        # The task of the whole call: it ends when the last byte has gone out, or the client has.
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._open[kind].add(task)
        task.add_done_callback(self._open[kind].discard)
        handler = await continuation(handler_call_details)
        return handler if handler is None else _reading(handler)

    def count(self, kind: str = "calls") -> int:
        """Tell how many "calls", "watchers" or "checks" are open."""
        return len(self._open[kind])

    def cancel(self) -> None:
        """Give up every call that is open. gRPC tells the clients first, and the work would go on a while."""
        for task in self._open["calls"]:
            task.cancel()


def _kind_of(method: str) -> str:
    if method == "/grpc.health.v1.Health/Check":
        return "checks"
    return "watchers" if method.startswith("/grpc.") else "calls"


def _reading(handler: "AnyHandler") -> "AnyHandler":
    """Let a handler of one message be called at once, read that message within the time it may take."""
    read, write = handler.request_deserializer, handler.response_serializer
    whole: Any = handler.unary_unary
    streamed: Any = handler.unary_stream
    mutual: Any = handler.stream_stream

    async def answer(_: AsyncIterator[Any], context: Context) -> Any:
        return await whole(await _arrived(context), context)

    async def stream(_: AsyncIterator[Any], context: Context) -> None:
        replies = streamed(await _arrived(context), context)
        if inspect.isawaitable(replies):  # a handler that writes its replies itself
            await replies
            return
        async for reply in replies:
            await context.write(reply)

    async def converse(messages: AsyncIterator[Any], context: Context) -> None:
        try:
            async for reply in mutual(messages, context):
                await context.write(reply)
        except DecodeError:
            await _abort(context, InvalidArgument(UNREADABLE))

    if whole is not None:
        return grpc.stream_unary_rpc_method_handler(answer, read, write)
    if streamed is not None:
        return grpc.stream_stream_rpc_method_handler(stream, read, write)
    if mutual is not None and read is not None:  # ours read nothing here, being refusals
        return grpc.stream_stream_rpc_method_handler(converse, read, write)
    return handler


async def _arrived(context: Context) -> Any:
    try:
        async with asyncio.timeout(ARRIVAL_SECONDS):
            message = await context.read()
    except TimeoutError:
        await _abort(
            context, DeadlineExceeded(f"The message took more than {ARRIVAL_SECONDS:g} s to come in.")
        )
    except DecodeError:  # of a service that is not ours: the boundary unpacks those of ours
        await _abort(context, InvalidArgument(UNREADABLE))
    if message is grpc.aio.EOF:
        await _abort(context, InvalidArgument("The call ended without a message."))
    return message


def _refusing(what: str) -> "AnyHandler":
    error = Overloaded(f"{what}, the most; try again later.", retry_after=RETRY_SECONDS)

    async def refuse(_: AsyncIterator[Any], context: Context) -> bytes:
        await _abort(context, error)
        raise AssertionError("abort always raises")

    # Of streams, since that of a single message is called only when the message is whole.
    return grpc.stream_unary_rpc_method_handler(refuse)


async def _abort(context: Context, error: Exception) -> None:
    rich = rpc_status.to_status(to_status(error))
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
