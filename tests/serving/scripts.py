"""Servers that answer as a test tells them, to see what the clients send and what they make of failures."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import message_factory
from grpc_status import rpc_status

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import to_status

LARGE = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


@dataclass
class Script:
    """What the server answers to each method, by its name; and what it was sent.

    An answer is made from the request. An exception that it raises, or a status code in its place, ends the
    call.
    """

    answers: dict[str, Callable[[Any], Any]]
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    address: str = ""

    def handler(self, name: str) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Any:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            try:
                reply = self.answers[name](request)
            except Exception as error:
                context.abort_with_status(rpc_status.to_status(to_status(error)))
            if isinstance(reply, grpc.StatusCode):
                context.abort(reply, "scripted")
            return reply

        return answer


@contextmanager
def scripted(
    answers: dict[str, Callable[[Any], Any]],
    *,
    options: Any = (),
    credentials: grpc.ServerCredentials | None = None,
    port: int = 0,
) -> Iterator[Script]:
    """Run a server that answers these methods and knows no others."""
    script = Script(answers)
    server = grpc.server(ThreadPoolExecutor(8), options=[*LARGE, *options])
    for module in (retrieval_service_pb2, gallery_service_pb2, model_service_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
            for method in service.methods:
                replies = "stream" if method.server_streaming else "unary"
                make = getattr(grpc, f"unary_{replies}_rpc_method_handler")
                if method.name in answers:
                    handlers[method.name] = make(
                        script.handler(method.name),
                        request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                        response_serializer=lambda reply: reply.SerializeToString(),
                    )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.full_name, handlers),)
            )
    place = f"127.0.0.1:{port}"
    port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    server.start()
    script.address = f"127.0.0.1:{port}"
    try:
        yield script
    finally:
        server.stop(0).wait()
