"""Where calls enter and leave: request id, who calls, decoding, the error table, one log line a call."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from serving.errors import CrossbatchError, InvalidArgument
from serving.observability.audit import Audit
from serving.observability.call import Call
from serving.observability.logs import new_request_id, request_id
from serving.observability.metrics import Metrics
from serving.observability.tracing import Tracer
from serving.rpc.access import Access, identity
from serving.rpc.admission import Admission
from serving.rpc.arrivals import MOST_ARRIVING, MOST_QUESTIONS, Arrivals
from serving.rpc.departures import CHECK_SECONDS, DEPARTURE_SECONDS, Departures
from serving.rpc.ending import REQUEST_ID
from serving.rpc.foreign import reading
from serving.rpc.fuse import Fuse, Kind, kind_of
from serving.rpc.parts import check_parts
from serving.rpc.passage import Passage
from serving.rpc.pieces import packed
from serving.rpc.refusals import Refusals
from serving.rpc.register import Register
from serving.rpc.roles import PACKAGES, brings_inputs, is_write, short_name

__all__ = ["Boundary", "deadline_of"]

# Asked whether the server is ready, it has to say no while it stops, and yes while it is busy.
PROBES = frozenset(f"GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady"))

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def deadline_of(context: Context) -> float | None:
    """Tell the `time.monotonic()` at which the caller stops to wait; None when he waits for ever."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


class _Door(NamedTuple):
    """A handler, and what stands before it."""

    handler: "AnyHandler"
    name: str
    guarded: "AnyHandler | None"
    kind: Kind
    stays_open: bool
    brings_inputs: bool


class Boundary(grpc.aio.ServerInterceptor):
    """Lets calls in, and sees those of our own packages out; others, once in, go as they are."""

    def __init__(
        self,
        admission: Admission,
        access: Access,
        audit: Audit,
        metrics: Metrics,
        readers: Mapping[str, Callable[[bytes], Any]],
        *,
        fuse: Fuse,
        tracer: Tracer | None = None,
    ) -> None:
        """Keep what calls pass through.

        Args:
            admission: Accounts for the bytes of each call, and knows whether the server drains.
            access: Knows who calls.
            audit: Notes who wrote what.
            metrics: Counts calls.
            readers: What unpacks the requests of some calls in place of their own message class.
            fuse: Counts the calls that are open.
            tracer: Takes note of each call with all its parts.
        """
        self._admission = admission
        self._access = access
        self._readers = readers
        self._fuse = fuse
        self._register = Register(audit, metrics, tracer)
        self._refusals = Refusals(self._register)
        self._arrivals = Arrivals(MOST_ARRIVING)
        self._questions = Arrivals(MOST_QUESTIONS)
        self._departures = Departures(DEPARTURE_SECONDS, fuse.stays)
        self._answers = Departures(CHECK_SECONDS, fuse.stays)
        self._doors: dict[str, _Door] = {}

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "AnyHandler | None":
        """Turn away whom there is no key or room for before his message is received; wrap handlers of ours.

        The task is the call's own: what is set here is seen wherever the call is worked for, and ends so.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        door = self._doors.get(method)
        if door is None or door.handler is not handler:
            door = self._doors[method] = self._door(method, handler)
        metadata = handler_call_details.invocation_metadata or ()
        request_id.set(new_request_id(_sent_id(metadata)))
        try:
            caller = self._access.identify(method, metadata)
            identity.set(caller)
            self._access.allow(method, caller)
            self._fuse.check(door.kind, caller.name)
            if door.brings_inputs:
                self._admission.check_room()
            elif not door.stays_open:
                self._admission.check_open()
        except Exception as error:
            return self._refusals.handler(error, door.name, method)
        self._fuse.hold(door.kind, cast("asyncio.Task[Any]", asyncio.current_task()))
        return door.guarded

    def drain(self) -> None:
        """Receive nothing from now on; what is whole is worked on."""
        self._admission.draining = True
        self._arrivals.give_up(Admission.draining_error)

    def give_up(self) -> None:
        """End every call that is open; each is told that the server stopped."""
        self._register.given_up = True
        self._fuse.cancel()

    async def wait_idle(self, longest: float) -> bool:
        """Wait until no call of ours is in progress, for `longest` seconds at most; tell whether none is."""
        return await self._register.wait_idle(longest)

    def _door(self, method: str, handler: "AnyHandler") -> _Door:
        name = short_name(method)
        ours = method.startswith(tuple(f"/{each}" for each in PACKAGES))
        return _Door(
            handler,
            name,
            self._guarded(method, handler) if ours else self._reading(method, handler),
            kind_of(method),
            not ours or name in PROBES,
            brings_inputs(method),
        )

    def _reading(self, method: str, handler: "AnyHandler") -> "AnyHandler":
        kind = kind_of(method)

        def claim(peer: str) -> str:
            holder = _holder(peer)
            self._fuse.claim(kind, holder)
            return holder

        return reading(handler, self._questions, self._answers, claim)

    def _guarded(self, method: str, handler: "AnyHandler") -> "AnyHandler | None":
        """Wrap a handler; None, which gRPC answers with UNIMPLEMENTED, for a kind that none of ours is of."""
        if handler.request_streaming:
            return None
        name = short_name(method)
        read: Any = self._readers.get(name, handler.request_deserializer)
        receive: Any = nullcontext if name in PROBES else self._admission.receive
        arrivals = self._questions if name in PROBES else self._arrivals
        departures = self._answers if name in PROBES else self._departures
        kind, must = kind_of(method), is_write(name)
        whole: Any = handler.unary_unary
        streamed: Any = handler.unary_stream

        async def claim(holder: str, peer: str, context: Context) -> None:
            """Count a call to who made it, or end it if he has his share."""
            try:
                self._fuse.claim(kind, holder)
            except CrossbatchError as error:
                with departures.sending(peer):
                    await self._refusals.abort(error, Call(name, method, peer=peer), context)

        # Handlers of streams, which are called at once: that of a single message is only when it is whole.
        async def answer(_: object, context: Context) -> bytes:
            reply = b""
            peer = context.peer()
            holder = _holder(peer)
            await claim(holder, peer, context)
            with Passage(self._register, Call(name, method, peer=peer), context) as passage:
                data = await arrivals.message(context, holder)
                passage.call.began = time.monotonic()
                with receive(len(data)):
                    passage.request = _parsed(method, read, data)
                    del data
                    written = await packed(await whole(passage.request, context))
                self._fuse.stays.when_gone(self._admission.send(len(written), holder, must=must))
                reply = written
            await passage.leave()
            departures.begin(peer)
            return reply

        async def stream(_: object, context: Context) -> None:
            peer = context.peer()
            holder = _holder(peer)
            await claim(holder, peer, context)
            with Passage(self._register, Call(name, method, peer=peer), context) as passage:
                data = await arrivals.message(context, holder)
                passage.call.began = time.monotonic()
                with receive(len(data)):
                    passage.request = _parsed(method, read, data)
                    del data
                    async with aclosing(streamed(passage.request, context)) as replies:
                        async for reply in replies:
                            # Not by `yield`: a call that is cancelled there ends only when it is collected.
                            written = await packed(reply)
                            gone = self._admission.send(len(written), holder, must=must)
                            try:
                                with departures.sending(peer):
                                    await context.write(written)
                            except BaseException:
                                self._fuse.stays.when_gone(gone)
                                raise
                            gone()
            await passage.leave()
            departures.begin(peer)

        # No serialisers here: a message that cannot be read or is too long has its place in the error table.
        if whole is not None:
            return grpc.stream_unary_rpc_method_handler(answer)
        return grpc.stream_stream_rpc_method_handler(stream)


def _sent_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == REQUEST_ID and isinstance(value, str):
            return value
    return ""


def _parsed(method: str, read: Callable[[bytes], Any] | None, data: bytes) -> Any:
    try:
        check_parts(data)
        return read(data) if read is not None else data
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(
            f"The message is not a request of {method[1:]}; check the proto files."
        ) from error


def _holder(peer: str) -> str:
    """Tell whom a call is counted to: his key, or the address without the port."""
    return identity.get().name or peer.rpartition(":")[0]
