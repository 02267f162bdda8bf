"""The client's connection: one channel with every stub on it, opened and closed."""

import time
from types import TracebackType
from typing import Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import gallery_service_pb2_grpc, model_service_pb2_grpc, retrieval_service_pb2_grpc
from serving.rpc.asking.caller import Caller
from serving.rpc.limits import DEFAULT_PORT

__all__ = ["Connection"]


class Connection:
    """A channel to one server; a context manager."""

    def __init__(
        self, address: str = f"127.0.0.1:{DEFAULT_PORT}", *, timeout: float = 10.0, retries: int = 12
    ) -> None:
        """Keep the address; the first call connects.

        Raises:
            InvalidArgument: if an argument makes no sense.
        """
        self._caller = Caller(address, timeout=timeout, retries=retries)
        channel = self._caller.channel
        self._retrieval = retrieval_service_pb2_grpc.RetrievalServiceStub(channel)
        self._galleries = gallery_service_pb2_grpc.GalleryServiceStub(channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._caller.close()

    def ready(self, *, wait: float = 0.0) -> bool:
        """Ask whether the server serves.

        Args:
            wait: Seconds to go on asking for.

        Returns:
            True as soon as it does; False when it does not, or is not there.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                reply = self._health.Check(health_pb2.HealthCheckRequest(), timeout=max(1.0, min(wait, 5.0)))
                serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            except Exception:  # whatever it is, it is not an answer
                serving = False
            if serving or time.monotonic() >= deadline:
                return bool(serving)
            time.sleep(0.05)
