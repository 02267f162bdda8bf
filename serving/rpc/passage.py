"""A call on its way through, from the first byte of its message to its status."""

from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc.aio

from serving.errors import Draining
from serving.observability.call import Call, current_call
from serving.observability.logs import request_id
from serving.rpc.ending import REQUEST_ID, Ending
from serving.rpc.register import Register

__all__ = ["Passage"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Passage:
    """What a call fails with ends here, and becomes the status that it deserves."""

    __slots__ = ("_ending", "_noted", "_register", "call", "context", "request")

    def __init__(self, register: Register, call: Call, context: Context) -> None:
        """Keep the call; it begins when the block is entered."""
        self._register = register
        call.peer = call.peer or context.peer()
        self.call = call
        self.context = context
        self.request: Any = None
        """Its message, once that is read."""
        self._ending: Ending | None = None
        self._noted: Future[None] | None = None

    def __enter__(self) -> Self:
        self.context.set_trailing_metadata(((REQUEST_ID, request_id.get()),))
        current_call.set(self.call)
        self._register.entered(self.call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # What is no Exception cancels: the caller has gone, or his time, or the server's.
        if error is not None and not isinstance(error, Exception) and self._register.given_up:
            error = Draining("The server stopped before the call was done; try another one.")
        code = "OK" if error is None else "CANCELLED"
        if isinstance(error, Exception):
            self._ending = Ending.of(error)
            code = self._ending.name
        self._noted = self._register.left(
            self.call, code, self.context, ending=self._ending, request=self.request
        )
        return isinstance(error, Exception)

    async def leave(self) -> None:
        """See a call out that was not cancelled, after its audit line is written."""
        if self._noted is not None:
            await self._register.until_noted(self._noted)
        if self._ending is not None:
            self._ending.give(self.context)
