"""Servers that answer as a test tells them, to see what the clients send and what they make of failures."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_status import rpc_status

from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import to_status

LARGE = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


@dataclass
class Script(grpc.GenericRpcHandler):
    """What the server answers to each method, by its name; and what it was sent.

    An answer is made from the request. An exception that it raises, or a status code in its place, ends the
    call.
    """

    answers: dict[str, Callable[[Any], Any]]
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    address: str = ""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Find what answers a call, as gRPC asks."""
        with suppress(KeyError):  # a service of others
            name = str(details.method)[1:].replace("/", ".")
            method = descriptor_pool.Default().FindMethodByName(name)
            if method.name in self.answers:
                kind = "unary_stream" if method.server_streaming else "unary_unary"
                return getattr(grpc, f"{kind}_rpc_method_handler")(
                    partial(self.answer, method.name),
                    request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                    response_serializer=lambda reply: reply.SerializeToString(),
                )
        return None

    def answer(self, name: str, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            reply = self.answers[name](request)
        except Exception as error:
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        if isinstance(reply, grpc.StatusCode):
            context.abort(reply, "scripted")
        return reply


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
    server = grpc.server(ThreadPoolExecutor(8), [script], options=[*LARGE, *options])
    place = f"127.0.0.1:{port}"
    port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    server.start()
    script.address = f"127.0.0.1:{port}"
    try:
        yield script
    finally:
        server.stop(0).wait()
