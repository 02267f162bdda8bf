"""The line to one server: a channel with every method on it, closed once, and used in one process."""

import os
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
from serving.client.security import Security
from serving.errors import InvalidArgument

__all__ = ["Line"]


class Line:
    """A channel to one address."""

    def __init__(self, address: str, security: Security) -> None:
        """Make the channel; it connects with the first call.

        Args:
            address: host:port.
            security: How the server is trusted, and the key that is shown to it.
        """
        self.address = address
        self.encrypted = security.credentials is not None
        self.headers = security.metadata
        """What every call carries: the API key, if there is one."""
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
