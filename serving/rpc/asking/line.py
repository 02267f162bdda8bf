"""The line to one server: a channel with every method on it, closed once, and used in one process."""

import os
from numbers import Integral, Real
from typing import Any

from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import (
    gallery_service_pb2,
    gallery_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    retrieval_service_pb2,
    retrieval_service_pb2_grpc,
)
from serving.errors import InvalidArgument
from serving.rpc.asking.security import Security

__all__ = ["Line"]

LONGEST_TIMEOUT = 86_400


class Line:
    """A channel to one address, and how long and how often a call over it is tried."""

    def __init__(self, address: str, security: Security, *, timeout: float, retries: int) -> None:
        """Make the channel; it connects with the first call.

        Args:
            address: host:port.
            security: How the server is trusted, and the key that is shown to it.
            timeout: Seconds that a call has, tries and pauses together.
            retries: Most tries after the first.

        Raises:
            InvalidArgument: if an argument makes no sense.
        """
        numbers = isinstance(timeout, Real) and isinstance(retries, Integral)
        if not numbers or not 0 < timeout <= LONGEST_TIMEOUT or retries < 0:
            raise InvalidArgument(
                f"timeout={timeout!r}, retries={retries!r} cannot make a call; the timeout must be above 0 "
                f"and at most {LONGEST_TIMEOUT:,} seconds, and retries 0 or more."
            )
        self.address = address
        self.timeout = timeout
        self.retries = retries
        self.encrypted = security.credentials is not None
        self._metadata = security.metadata
        self._process = os.getpid()
        self._closed = False
        self._channel = security.channel(address)
        self._methods = _methods_on(self._channel)

    def check(self) -> None:
        """Find out whether a call can be made.

        Raises:
            InvalidArgument: if the line has been closed, or was made before a fork.
        """
        if self._closed:
            raise InvalidArgument("The client has been closed; make another one.")
        if os.getpid() != self._process:
            raise InvalidArgument(
                "The client was made before this process was forked, and cannot be used in it; "
                "make a client in each process."
            )

    def method(self, request: Any) -> Any:
        """Look up the method that takes a request."""
        return self._methods[type(request)]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries: the API key, if there is one."""
        return self._metadata

    def close(self) -> None:
        """Hang up; calls in progress end with an error."""
        self._closed = True
        if os.getpid() == self._process:
            self._channel.close()


def _methods_on(channel: Any) -> dict[type[Any], Any]:
    """Every method by the type of its request, which is its own."""
    stubs = (
        (retrieval_service_pb2, retrieval_service_pb2_grpc.RetrievalServiceStub),
        (gallery_service_pb2, gallery_service_pb2_grpc.GalleryServiceStub),
        (model_service_pb2, model_service_pb2_grpc.ModelServiceStub),
    )
    methods: dict[type[Any], Any] = {health_pb2.HealthCheckRequest: health_pb2_grpc.HealthStub(channel).Check}
    for module, kind in stubs:
        stub = kind(channel)
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                methods[message_factory.GetMessageClass(method.input_type)] = getattr(stub, method.name)
    return methods
