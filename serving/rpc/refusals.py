"""Calls that are turned away: at an overload most end here, all alike, so a refusal has to cost little."""

from typing import Any, TypeAlias

import grpc
import grpc.aio

from serving.errors import CrossbatchError
from serving.observability.call import Call
from serving.observability.logs import request_id
from serving.rpc.ending import REQUEST_ID, Ending
from serving.rpc.register import Register

__all__ = ["Refusals"]

MOST_REFUSALS = 1_024  # kept ready, of those that differ

AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Refusals:
    """Ends calls with an error before anything of their message is read."""

    def __init__(self, register: Register) -> None:
        """Keep what takes note of them."""
        self._register = register
        self._endings: dict[tuple[object, ...], Ending] = {}

    def handler(self, error: Exception, name: str, method: str) -> "AnyHandler":
        """Make what answers a call with an error, whatever the call's kind.

        Args:
            error: What it ends with.
            name: Service and method, as in the log.
            method: The full name.
        """
        ending, register = self._ending(error), self._register

        async def refuse(_: object, context: Context) -> None:
            ending.give(context)
            noted = register.refused(Call(name, method, peer=context.peer()), ending, context)
            if noted is not None:
                await register.until_noted(noted)

        # As a stream, which is the same on the wire, since its message is then not received first: of who has
        # no key, and of an overload, not much is left to do.
        return grpc.stream_stream_rpc_method_handler(refuse)

    async def abort(self, error: CrossbatchError, call: Call, context: Context) -> None:
        """End a call whose handler runs already.

        Raises:
            AbortError: always, since gRPC ends it so.
        """
        ending = self._ending(error)
        noted = self._register.refused(call, ending, context)
        if noted is not None:
            await self._register.until_noted(noted)
        # By `abort`, which holds nothing of a message here: else an empty one goes before the status, and
        # waits for whoever reads nothing.
        trailing = (*ending.trailing, (REQUEST_ID, request_id.get()))
        await context.abort(ending.code, ending.message, trailing)

    def _ending(self, error: Exception) -> Ending:
        if not isinstance(error, CrossbatchError):
            return Ending.of(error)
        key = (type(error), str(error), getattr(error, "retry_after", None))
        ending = self._endings.get(key)
        if ending is None:
            if len(self._endings) >= MOST_REFUSALS:
                self._endings.clear()
            ending = self._endings[key] = Ending.of(error)
        return ending
