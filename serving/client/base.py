"""What both clients do alike, written once, as coroutines.

A public method (they are all in `Client`) hands its coroutine to `_run`, and one that gives an iterator its
asynchronous generator to `_iterate`. `AsyncClient` passes them on to the caller, who awaits them. `Client`
runs them on the spot and needs no loop: whatever its coroutines wait for blocks, so that none is suspended.
"""

import copy
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from serving.client import requests
from serving.client.connection import MOST_RETRIES, Connection, Pem, credentials_of
from serving.client.records import GalleryInfo, Images, galleries_of, vectors_of
from serving.client.requests import IN_FLIGHT, Bulk, Request, image_bytes, request
from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.limits import DEFAULT_PORT

__all__ = ["BaseClient"]

T = TypeVar("T")

_KEY = re.compile(r"(?!(grpc-.*|.*-bin|authorization|x-request-id|content-type|te|host)$)[0-9a-z_.-]+")
_VALUE = re.compile(r"[ -~]*")


class BaseClient:
    """A connection to one server, taken by the first call and kept for all that follow."""

    _api: Any = grpc
    # What each client does in its own way: run a coroutine or an asynchronous generator, call what may block,
    # wait for a reply, cut inputs into calls.
    _run: Any
    _iterate: Any
    _aside: Any
    _reply: Any
    _calls: Any

    def __init__(
        self,
        address: str = f"127.0.0.1:{DEFAULT_PORT}",
        *,
        timeout: float = 10.0,
        retries: int = MOST_RETRIES,
        api_key: str | None = None,
        tls: bool = False,
        ca: Pem | None = None,
        certificate: Pem | None = None,
        private_key: Pem | None = None,
        insecure: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the address, HOST:PORT or a target in gRPC's own spelling; the first call connects.

        `timeout` is in seconds, for each call with its retries. `ca` are the authorities that TLS trusts in
        place of the system's (`tls`), `certificate` and `private_key` are shown to a server that wants them.
        `insecure` lets the API key leave this machine in plain text. `metadata` are headers of each call.
        What makes no sense, and a file that cannot be read, is an InvalidArgument.
        """
        credentials = credentials_of(tls, ca, certificate, private_key)
        self._connection = Connection(self._api, address, credentials, timeout)
        self._headers = self._connection.key_header(api_key, insecure)
        self._owner = True
        self._set(timeout, retries, metadata, "")

    def with_options(
        self,
        *,
        timeout: float | None = None,
        retries: int | None = None,
        metadata: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Self:
        """Make a client with other options on the same connection, which costs next to nothing.

        What is None stays as it was, and metadata is added to what there is. Calls send `request_id`, at most
        64 visible ASCII characters, as `x-request-id`; "" makes one for each again. Closing the copy leaves
        the connection open.
        """
        client = copy.copy(self)
        client._owner = False
        client._set(
            self._timeout if timeout is None else timeout,
            self._retries if retries is None else retries,
            metadata,
            self._request_id if request_id is None else request_id,
        )
        return client

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._connection.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def _set(self, timeout: float, retries: int, metadata: Mapping[str, str] | None, request_id: str) -> None:
        if not (isinstance(timeout, float | int) and 0 < timeout <= 86_400):
            raise InvalidArgument(f"timeout cannot be {timeout!r}; it is in seconds, above 0 to 86,400.")
        if not (isinstance(retries, int) and retries >= 0):
            raise InvalidArgument(f"retries cannot be {retries!r}; it must be a number of 0 or more.")
        if not (isinstance(request_id, str) and re.fullmatch("[!-~]{0,64}", request_id)):
            told = f"request_id cannot be {request_id!r:.100}"
            raise InvalidArgument(f"{told}; it must be at most 64 visible ASCII characters.")
        headers = {} if metadata is None else metadata
        try:
            right = all(_KEY.fullmatch(key) and _VALUE.fullmatch(value) for key, value in headers.items())
        except (AttributeError, TypeError):  # it is no mapping, or not one of strings
            right = False
        if not right:
            # The values are in no message: they may be secrets, and messages end in logs.
            raise InvalidArgument(
                "metadata must be a mapping of strings: keys of lower-case letters, digits, '-', '_' and "
                "'.', none of gRPC's or the client's own, and values of printable ASCII characters."
            )
        self._timeout, self._retries, self._request_id = timeout, retries, request_id
        self._headers = {**self._headers, **headers}

    def _new_id(self) -> str:
        return self._request_id or uuid.uuid4().hex[:16]

    def _begin(self, request: Request, *, ahead: bool = False) -> Any:
        """Make a call as gRPC has it; what comes of one that is made `ahead` is still to be waited for."""
        request.id = request.id or self._new_id()
        method = self._connection.method(request.method, self._retries, request.repeatable)
        begin = method.future if ahead and self._api is grpc else method
        return begin(
            request.message,
            timeout=request.timeout or self._timeout,
            metadata=(*self._headers.items(), ("x-request-id", request.id)),
            # A server that has answered may be starting again, and is waited for; not for an hour, though, by
            # long work that has a time of its own.
            wait_for_ready=self._connection.answered and self._retries > 0 and request.timeout is None,
        )

    @contextmanager
    def _explained(self, request: Request) -> Iterator[None]:
        """Turn what gRPC raises into an error of ours."""
        try:
            yield
        except grpc.RpcError as failure:
            timeout = request.timeout or self._timeout
            raise self._connection.error_of(failure, timeout, request.id) from failure
        self._connection.answered = True

    async def _call(self, request: Request, begun: Any = None) -> Any:
        """Make a call, or wait for one that was begun; gives the reply."""
        with self._explained(request):
            return await self._reply(request, begun)

    def _send(self, method: str, read: Callable[[Any], T], **fields: Any) -> T:
        """Make one call; what `AsyncClient` gives is to be awaited."""

        async def send() -> T:
            return read(await self._call(request(method, **fields)))

        answer: T = self._run(send())
        return answer

    async def _pages(self, page: Request, read: Callable[[Any], list[T]]) -> AsyncGenerator[T]:
        """Read a list from this page on; each is asked for when its turn comes."""
        more = True
        while more:
            reply = await self._call(page)
            for each in read(reply):
                yield each
            page.message.page_token = reply.next_page_token
            more = bool(reply.next_page_token)

    async def _stream(self, request: Request, read: Callable[[Any], T]) -> AsyncGenerator[T]:
        replies = self._begin(request)
        try:
            with self._explained(request):
                while (reply := await _next(replies)) is not None:
                    yield read(reply)
        finally:
            replies.cancel()

    async def _ask(self, bulk: Bulk) -> list[Any]:
        """Answer each input, in calls of which four are on their way at once."""
        bulk.whole.id, answers, begun = self._new_id(), list[Any](), deque[tuple[Request, Any]]()
        try:
            calls = self._calls(bulk)
            while call := await _next(calls):
                if len(begun) == IN_FLIGHT:
                    answers += await self._answers(bulk, len(answers), *begun.popleft())
                # A call that is alone is quicker without a future.
                begun.append((call, None if bulk.alone else self._begin(call, ahead=True)))
            while begun:
                answers += await self._answers(bulk, len(answers), *begun.popleft())
        except CrossbatchError as error:
            error.stored = len(answers) if bulk.field == "items" else 0
            raise
        finally:
            for _, reply in begun:
                reply.cancel()
        return answers

    async def _answers(self, bulk: Bulk, place: int, call: Request, begun: Any) -> list[Any]:
        """Give the answers to a call, whose first input is number `place`; they may be errors."""
        try:
            answers = bulk.read(await self._call(call, begun))
        except CrossbatchError as error:
            answers = bulk.blamed(call, place, error)
        answers = [bulk.unread.get(i, each) for i, each in enumerate(answers, place)]
        for i, each in enumerate(answers, place):
            if isinstance(each, CrossbatchError):
                each.request_id = each.request_id or call.id
                if bulk.raising:
                    raise each.saying(f"input {i}: {each}") from each.__cause__
        return answers

    async def _embed(self, images: Images, model: str, on_error: str) -> Any:
        whole = request("Embed", model=model)
        rows = await self._ask(Bulk(whole, "images", images, image_bytes, vectors_of, on_error))
        if on_error == "return":
            return rows
        if rows:
            return np.stack(rows)
        reply = await self._call(request("GetModel", name=model))
        return np.zeros((0, reply.model.dimension), np.float32)

    async def _delete(self, gallery: str, keys: Iterable[str], versions: Iterable[int] | None) -> int:
        calls = await self._aside(requests.delete, gallery, keys, versions, self._new_id())
        return sum([(await self._call(each)).deleted for each in calls])

    async def _galleries(self) -> list[GalleryInfo]:
        return [each async for each in self._pages(request("ListGalleries"), galleries_of)]

    async def _ready(self, wait: float) -> bool:
        deadline = time.monotonic() + wait
        probe = self.with_options(retries=0, timeout=max(1.0, min(wait, 5.0)))
        while True:
            with suppress(CrossbatchError):  # which is no answer
                reply = await probe._call(request("Check"))
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
            if time.monotonic() >= deadline:
                return False
            await self._aside(time.sleep, 0.05)


async def _next(values: Any) -> Any:
    """Give the next of some values, which may be asynchronous, or None at their end."""
    return await anext(aiter(values), None) if hasattr(values, "__aiter__") else next(values, None)
