"""What every call passes: who calls, whether there is room, its deadline, the error table, one log line."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from serving.errors import CrossbatchError, Draining, InvalidArgument
from serving.observability.access_log import AccessLog
from serving.observability.call import Call, current_call
from serving.observability.logs import new_request_id, request_id
from serving.rpc.admission import Admission
from serving.rpc.auth import OURS, Authenticator, role_of, short_name
from serving.rpc.status import Refusal, reason_of, to_status

__all__ = ["REQUEST_ID", "CallInterceptor"]

REQUEST_ID = "x-request-id"

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
        "/inference.GRPCInferenceService/ModelInfer",
    }
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallInterceptor(grpc.ServerInterceptor):
    """Turns calls away, or hands those of our own services on with a `Call` in place of gRPC's context.

    The calls of gRPC's own services (health, reflection) pass as they are once their key is checked.
    """

    def __init__(self, authenticator: Authenticator, admission: Admission, access_log: AccessLog) -> None:
        """Keep what calls pass through."""
        self._authenticator = authenticator
        self._admission = admission
        self._log = access_log
        self._wrapped: dict[Handler, Handler] = {}
        self._running: set[Call] = set()
        self._changed = threading.Condition()

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Turn a call away before its message is received, or hand it on."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        ours = method.startswith(OURS)
        call = Call(short_name(method), method, writes=role_of(method) == "write")
        current_call.set(call)
        request_id.set(new_request_id(_sent_id(metadata)))
        try:
            caller = self._authenticator.identify(method, metadata)
            call.client = caller.name
            self._authenticator.allow(method, caller)
            if method in LOADED:
                self._admission.check_room(call.client)
            elif ours and method not in PROBES:
                self._admission.check_open()
        except CrossbatchError as error:
            return self._refusal(call, error)
        if not ours:
            return handler
        if handler not in self._wrapped:
            self._wrapped[handler] = self._wrap(method, handler)
        return self._wrapped[handler]

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
                call.ended = Draining("The server stopped before the call was done; try another one.")

    def _refusal(self, call: Call, error: CrossbatchError) -> "Handler":
        def refuse(_: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            call.peer = context.peer()
            self._log.began(call)
            self._end(call, error, context, refused=True)
            return iter(())

        # As a stream, which is the same on the wire, so that the message is not received first.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrap(self, method: str, handler: "Handler") -> "Handler":
        parse: Callable[[bytes], Any] = handler.request_deserializer or bytes
        unary: Any = handler.unary_unary
        streamed: Any = handler.unary_stream

        @contextmanager
        def received(data: bytes, context: grpc.ServicerContext) -> Iterator[Call]:
            with self._in_progress(context) as call:
                room = nullcontext() if method in PROBES else self._admission.receive(call, len(data))
                with room:
                    try:
                        call.request = parse(data)
                    except (DecodeError, ValueError) as error:
                        what = f"The message is not a request of {method[1:]}; check the proto files."
                        raise InvalidArgument(what) from error
                    yield call

        # The request is unpacked here: gRPC calls one that cannot be read a fault of the server.
        def answer(data: bytes, context: grpc.ServicerContext) -> Any:
            with received(data, context) as call:
                return unary(call.request, call)

        def stream(data: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
            with received(data, context) as call:
                yield from streamed(call.request, call)

        if streamed is not None:
            return grpc.unary_stream_rpc_method_handler(
                stream, response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)

    @contextmanager
    def _in_progress(self, context: grpc.ServicerContext) -> Iterator[Call]:
        """Take note of a call while the block runs; what the block raises becomes its status."""
        call = current_call.get()
        if call is None:
            raise RuntimeError("a call that did not pass `intercept_service`")
        call.peer = context.peer()
        left = context.time_remaining()
        call.deadline = None if left is None else time.monotonic() + left
        call.is_active = context.is_active
        context.set_trailing_metadata(((REQUEST_ID, request_id.get()),))
        self._log.began(call)
        with self._changed:
            self._running.add(call)
        try:
            yield call
        except Exception as error:
            self._end(call, error, context)
        except GeneratorExit:  # the caller of a stream left
            self._log.ended(call, "CANCELLED", context)
            raise
        else:
            self._log.ended(call, "OK", context)
        finally:
            with self._changed:
                self._running.discard(call)
                self._changed.notify_all()

    def _end(
        self, call: Call, error: Exception, context: grpc.ServicerContext, *, refused: bool = False
    ) -> None:
        """Note a call that failed, and end it with the status that its error deserves; always raises."""
        status = rpc_status.to_status(to_status(error))
        self._log.ended(
            call,
            status.code.name,
            context,
            reason=_reason(error),
            error=status.details,
            refused=refused,
        )
        context.set_trailing_metadata((*status.trailing_metadata, (REQUEST_ID, request_id.get())))
        context.abort(status.code, status.details)


def _reason(error: Exception) -> str:
    """The reason that the ErrorInfo of an error names."""
    if isinstance(error, Refusal):
        return reason_of(error.violations[0].error)
    return reason_of(error) if isinstance(error, CrossbatchError) else "INTERNAL"


def _sent_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == REQUEST_ID and isinstance(value, str):
            return value
    return ""
