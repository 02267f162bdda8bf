"""The health service, in which no watcher holds up another, nor a change."""

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

__all__ = ["Health"]


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """gRPC's own, but for its lock: it writes under it, so that all wait for who reads nothing.

    So would a stop, which begins with a change. Belongs to one event loop.
    """

    def __init__(self) -> None:
        """Begin with the whole server serving."""
        super().__init__()
        self._changed = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        """Tell the status of a service, and again whenever it is another."""
        told = None
        while True:
            changed = self._changed  # taken before the status, so that no change is missed
            status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await changed.wait()

    async def _set(self, service: str, status: Any) -> None:
        self._server_status[service] = status
        self._changed.set()
        self._changed = asyncio.Event()
