"""What every call passes: who calls, whether there is room, its deadline, the error table, one log line."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from serving.errors import CrossbatchError, Draining, InvalidArgument, Overloaded
from serving.observability.access_log import AccessLog
from serving.observability.call import Call, current_call, gone
from serving.rpc.admission import LONGEST_RETRY, Admission
from serving.rpc.auth import OURS, Authenticator, Role, role_of, short_name
from serving.rpc.status import reason_of, to_status

__all__ = ["REQUEST_ID", "CallInterceptor"]

REQUEST_ID = "x-request-id"
LONGER: "dict[str | bytes, int]" = {"1": 6, "2": 36, "3": 216}
"""How many times as long a call waits by how often it was tried before, as gRPC's clients tell."""

# Asked whether the server is ready, it has to say no while it stops, and yes while it is busy.
PROBES = frozenset(
    f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")
)
# These bring images, queries or items, and are refused before their message when there is no room for one.
LOADED = frozenset(
    {
        "/crossbatch.v1.RetrievalService/Embed",
        "/crossbatch.v1.RetrievalService/Search",
        "/crossbatch.v1.RetrievalService/Explain",
        "/crossbatch.v1.GalleryService/UpsertItems",
        "/crossbatch.v1.GalleryService/UpdateItems",
        "/inference.GRPCInferenceService/ModelInfer",
    }
)


class _AtOnce(ThreadPoolExecutor):
    """Works in the thread that asks: a refusal costs less than to hand it to another."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*given, **named))
        return done


AT_ONCE = _AtOnce(1)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class _Method:
    """What there is to know of a method, worked out when it is first called."""

    name: str
    rpc: str
    role: Role | None
    handler: Handler  # wrapped, where the method is ours
    limited: bool  # it is refused while the server drains or is full
    inputs: int  # for which there must be room before its message is received


class CallInterceptor(grpc.ServerInterceptor):
    """Turns calls away, or hands those of our own services on with a `Call` in place of gRPC's context.

    The calls of gRPC's own services (health, reflection) pass as they are once their key is checked.
    """

    def __init__(self, authenticator: Authenticator, admission: Admission, access_log: AccessLog) -> None:
        """Keep what calls pass through."""
        self._authenticator = authenticator
        self._admission = admission
        self._log = access_log
        self._methods: dict[str, _Method] = {}
        self._running: set[Call] = set()
        self._changed = threading.Condition()

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Turn a call away before its message is received, or hand it on."""
        method = self._methods.get(str(handler_call_details.method))
        if method is None:
            handler = continuation(handler_call_details)
            if handler is None:
                return None
            method = self._known(str(handler_call_details.method), handler)
        metadata = handler_call_details.invocation_metadata or ()
        call = Call(
            method.rpc,
            method.name,
            request_id=_request_id(metadata),
            metadata=metadata,
            writes=method.role == "write",
        )
        current_call.set(call)
        try:
            if method.role is not None and self._authenticator.asks:
                self._authenticator.authorize(call, method.role)
            if method.limited:
                self._admission.check_room(call.client, method.inputs)
        except CrossbatchError as error:
            return self._refusal(call, error)
        return method.handler

    def drain(self) -> None:
        """Take no new calls from now on."""
        self._admission.draining = True

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no call is in progress, for so many seconds at most; tell whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def give_up(self) -> None:
        """End every call in progress at its next check; each is told that the server stopped."""
        with self._changed:
            for call in self._running:
                call.news.put(_stopped)

    def _known(self, name: str, handler: Handler) -> _Method:
        ours, probe = name.startswith(OURS), name in PROBES
        self._methods[name] = _Method(
            name,
            short_name(name),
            role_of(name),
            self._wrapped(handler) if ours else _checked(handler),
            limited=ours and not probe,
            inputs=int(name in LOADED),
        )
        return self._methods[name]

    def _refusal(self, call: Call, error: CrossbatchError) -> Handler:
        error.__traceback__ = None  # it leads to frames that lead back here

        def refuse(_: object, context: grpc.ServicerContext) -> NoReturn:
            call.peer = context.peer()
            self._log.metrics.began(call)
            self._fail(call, context, error, refused=True)

        if not call.writes:  # whose line in the audit log may wait for a disk
            refuse.experimental_thread_pool = AT_ONCE  # type: ignore[attr-defined]
        # As a stream, which is the same on the wire, so that the message is not received first.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrapped(self, handler: Handler) -> Handler:
        """Hand the request and a `Call` to a service; what it raises becomes the call's status."""
        parse: Callable[[bytes], Any] = handler.request_deserializer or bytes
        unary: Any = handler.unary_unary
        streamed: Any = handler.unary_stream
        serializer = handler.response_serializer

        def answer(data: bytes, context: grpc.ServicerContext) -> Any:
            call = self._begin(context, data, parse)
            try:
                reply = unary(call.request, call)
            except Exception as error:
                self._fail(call, context, error)
            self._end(call, "OK")
            return reply

        def stream(data: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
            call = self._begin(context, data, parse)
            try:
                yield from streamed(call.request, call)
            except GeneratorExit:  # the caller left
                self._end(call, "CANCELLED")
                raise
            except Exception as error:
                self._fail(call, context, error)
            self._end(call, "OK")

        if streamed is not None:
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=serializer)
        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=serializer)

    def _begin(self, context: grpc.ServicerContext, data: bytes, parse: Callable[[bytes], Any]) -> Call:
        """Take note of a call, and unpack its request; gRPC calls one that cannot be read our own fault."""
        call = current_call.get()
        if call is None:
            raise RuntimeError("a call that did not pass `intercept_service`")
        call.peer = context.peer()
        left = context.time_remaining()
        call.deadline = None if left is None else time.monotonic() + left
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        self._log.metrics.began(call)
        with self._changed:
            self._running.add(call)
        leave = partial(call.news.put, gone)
        if not context.add_callback(leave):
            leave()
        try:
            if call.method not in PROBES:
                self._admission.receive(call, len(data))
            call.request = parse(data)
        except CrossbatchError as error:
            self._fail(call, context, error)
        except (DecodeError, ValueError):
            what = f"The message is not a request of {call.method[1:]}; check the proto files."
            self._fail(call, context, InvalidArgument(what))
        return call

    def _fail(
        self, call: Call, context: grpc.ServicerContext, error: Exception, *, refused: bool = False
    ) -> NoReturn:
        """End a call with the status that its error deserves."""
        status = rpc_status.to_status(to_status(error))
        code, told = status.code.name, status.details
        self._end(call, code, reason=reason_of(error), error=told, refused=refused)
        trailing = (*status.trailing_metadata, (REQUEST_ID, call.request_id))
        if isinstance(error, Overloaded):  # gRPC's own retries wait that long: each longer, and not all alike
            longer = LONGER.get(dict(call.metadata).get("grpc-previous-rpc-attempts", ""), 1)
            wait = min(error.retry_after * longer, LONGEST_RETRY) * random.uniform(0.5, 1.0)  # noqa: S311
            trailing += (("grpc-retry-pushback-ms", f"{wait * 1e3:.0f}"),)
        context.set_trailing_metadata(trailing)
        context.abort(status.code, told)

    def _end(self, call: Call, code: str, **told: Any) -> None:
        """Note that a call is over."""
        self._admission.release(call)
        try:
            self._log.ended(call, code, **told)
        finally:
            with self._changed:
                self._running.discard(call)
                self._changed.notify_all()


def _stopped() -> CrossbatchError:
    return Draining("The server stopped before the call was done; try another one.")


def _checked(handler: Handler) -> Handler:
    """Let gRPC's own services, too, answer what is no message as a fault of the caller."""
    parse: Any = handler.request_deserializer
    whole: Any = handler.unary_unary
    answered: Any = handler.unary_stream
    spoken: Any = handler.stream_stream

    def parsed(data: bytes, context: grpc.ServicerContext) -> Any:
        try:
            return parse(data)
        except (DecodeError, ValueError):
            told = "The message is not a request of this call; check the proto files."
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, told)

    def unary(data: bytes, context: grpc.ServicerContext) -> Any:
        try:
            return whole(parsed(data, context), context)
        except NotImplementedError:  # which gRPC would log as a fault of ours
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "This server does not answer that call.")

    def watch(data: bytes, context: grpc.ServicerContext) -> Any:
        return answered(parsed(data, context), context)

    def both(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        return spoken((parsed(each, context) for each in messages), context)

    serializer = handler.response_serializer
    if whole is not None:
        return grpc.unary_unary_rpc_method_handler(unary, response_serializer=serializer)
    if answered is None:
        return grpc.stream_stream_rpc_method_handler(both, response_serializer=serializer)
    pool = getattr(answered, "experimental_thread_pool", None)  # of the watchers of health
    watch.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return grpc.unary_stream_rpc_method_handler(watch, response_serializer=serializer)


def _request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The id that the caller proposes, if it is short and printable, or a random one."""
    for name, value in metadata:
        if name == REQUEST_ID and isinstance(value, str):
            if 0 < len(value) <= 64 and value.isascii() and value.isprintable():
                return value
            break
    return f"{random.getrandbits(64):016x}"
