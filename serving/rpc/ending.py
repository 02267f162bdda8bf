"""The end of a call that failed, as gRPC is told of it."""

from typing import Any, NamedTuple, Self, TypeAlias

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from serving.observability.logs import request_id
from serving.rpc.status import to_status

__all__ = ["REQUEST_ID", "Ending"]

REQUEST_ID = "x-request-id"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Ending(NamedTuple):
    """A status with its details in the form in which they travel."""

    code: grpc.StatusCode
    message: str
    reason: str
    """As the ErrorInfo names it, which each of our statuses has."""
    trailing: tuple[tuple[str, str | bytes], ...]

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Make the one that an error deserves."""
        status = to_status(error)
        rich = rpc_status.to_status(status)
        info = error_details_pb2.ErrorInfo()
        reason = info.reason if status.details and status.details[0].Unpack(info) else ""
        return cls(rich.code, rich.details, reason, tuple(rich.trailing_metadata))

    @property
    def name(self) -> str:
        """The name of its code."""
        return str(self.code.name)

    def give(self, context: Context) -> None:
        """Let the running call end so, once its handler returns.

        Not by `context.abort`: gRPC's state of the call keeps the exception that it raises, and with that the
        frames it passed, in a circle. What these hold, the message of up to 64 MiB, would stay until the next
        collection.
        """
        context.set_code(self.code)
        context.set_details(self.message)
        context.set_trailing_metadata((*self.trailing, (REQUEST_ID, request_id.get())))
