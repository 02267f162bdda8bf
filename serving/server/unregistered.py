"""Services as gRPC's asyncio server is quickest with them."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

__all__ = ["Unregistered"]


class Unregistered:
    """Hands a server the services that are added to it, but not their methods one by one.

    gRPC finds a method by its service all the same. For each that is registered by itself it keeps a task,
    and at every call it waits for all of them anew: with ours that takes some 12 µs.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        """Keep the server."""
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add services."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Add nothing more."""
