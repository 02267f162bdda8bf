"""Handlers that are none of ours, of health and reflection: what comes in and goes out has its time, too."""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.arrivals import Arrivals
from serving.rpc.departures import Departures
from serving.rpc.status import to_status

__all__ = ["reading"]

UNREADABLE = "The message is not a request of this call; check the proto files."

AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def reading(
    handler: "AnyHandler", arrivals: Arrivals, departures: Departures, claim: Callable[[str], str]
) -> "AnyHandler":
    """Let a handler of one message be called at once, and receive that message when its turn comes.

    Args:
        handler: What answers.
        arrivals: How its messages come in.
        departures: How its replies go out.
        claim: Counts a call to where it came from, and names that.
    """
    read, write = handler.request_deserializer, handler.response_serializer
    whole: Any = handler.unary_unary
    streamed: Any = handler.unary_stream
    mutual: Any = handler.stream_stream

    async def abort(context: Context, peer: str, error: CrossbatchError) -> None:
        rich = rpc_status.to_status(to_status(error))
        with departures.sending(peer):
            await context.abort(rich.code, rich.details, rich.trailing_metadata)

    async def arrived(context: Context, peer: str) -> Any:
        try:
            return await arrivals.message(context, claim(peer))
        except DecodeError:  # of a service that is not ours: the boundary unpacks those of ours
            await abort(context, peer, InvalidArgument(UNREADABLE))
        except CrossbatchError as error:
            await abort(context, peer, error)

    async def answer(_: AsyncIterator[Any], context: Context) -> Any:
        peer = context.peer()
        reply = await whole(await arrived(context, peer), context)
        departures.begin(peer)
        return reply

    async def stream(_: AsyncIterator[Any], context: Context) -> None:
        peer = context.peer()
        replies = streamed(await arrived(context, peer), _Timed(context, peer, departures))
        if inspect.isawaitable(replies):  # a handler that writes its replies itself
            await replies
            return
        async for reply in replies:
            with departures.sending(peer):
                await context.write(reply)

    async def converse(messages: AsyncIterator[Any], context: Context) -> None:
        peer = context.peer()
        try:
            async for reply in mutual(messages, context):
                with departures.sending(peer):
                    await context.write(reply)
        except DecodeError:
            await abort(context, peer, InvalidArgument(UNREADABLE))

    if whole is not None:
        return grpc.stream_unary_rpc_method_handler(answer, read, write)
    if streamed is not None:
        return grpc.stream_stream_rpc_method_handler(stream, read, write)
    if mutual is not None and read is not None:  # ours read nothing here, being refusals
        return grpc.stream_stream_rpc_method_handler(converse, read, write)
    return handler


class _Timed:
    """The context of a handler that writes its replies itself, each of which has its time."""

    def __init__(self, context: Context, peer: str, departures: Departures) -> None:
        self._context = context
        self._peer = peer
        self._departures = departures

    async def write(self, reply: Any) -> None:
        with self._departures.sending(self._peer):
            await self._context.write(reply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
