"""What both clients do alike: options, and how calls are made, waited for and read."""

import copy
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, Self, TypeVar

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from serving.client import records, requests
from serving.client.connection import MOST_RETRIES, Connection, Pem, credentials_of, status_of
from serving.client.records import Images
from serving.client.requests import IN_FLIGHT, Bulk, Request, image_bytes, request
from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.limits import DEFAULT_PORT
from serving.rpc.status import violations_of

__all__ = ["BaseClient"]

T = TypeVar("T")

_HEADER = re.compile(r"(?!(grpc-.*|.*-bin|authorization|x-request-id|content-type|te|host)$)[0-9a-z_.-]+")
_SERVING = health_pb2.HealthCheckResponse.SERVING


class BaseClient:
    """A connection to one server, taken by the first call and kept for all that follow.

    How calls are made, waited for and read is written once, as coroutines. What those of `Client` wait for
    blocks, and so it can run each of them to its end without a loop.
    """

    _api: Any = grpc
    # What each client does in its own way.
    _run: Any
    _pages: Any
    _stream: Any
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
        numbers = isinstance(timeout, Real) and isinstance(retries, int)
        if not numbers or not 0 < timeout <= 86_400 or retries < 0:
            raise InvalidArgument(
                f"timeout={timeout!r}, retries={retries!r} cannot make a call; the timeout must be above 0 "
                "and at most 86,400 seconds, and retries 0 or more."
            )
        if not isinstance(request_id, str) or not re.fullmatch("[!-~]{0,64}", request_id):
            raise InvalidArgument(
                f"request_id cannot be {request_id!r:.100}; it must be at most 64 visible ASCII characters."
            )
        headers = {} if metadata is None else metadata
        if not isinstance(headers, Mapping) or not all(map(_is_header, headers.items())):
            # The values are in no message: they may be secrets, and messages end in logs.
            raise InvalidArgument(
                "metadata must be a mapping of strings: keys of lower-case letters, digits, '-', '_' and "
                "'.', none of gRPC's or the client's own, and values of printable ASCII characters."
            )
        self._timeout, self._retries, self._request_id = timeout, retries, request_id
        self._headers = {**self._headers, **headers}

    def _new_id(self) -> str:
        return self._request_id or uuid.uuid4().hex[:16]

    def _begin(self, request: Request[Any], *, ahead: bool = False) -> Any:
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
    def _explained(self, request: Request[Any]) -> Iterator[None]:
        """Turn what gRPC raises into an error of ours."""
        try:
            yield
        except grpc.RpcError as failure:
            timeout = request.timeout or self._timeout
            raise self._connection.error_of(failure, timeout, request.id) from failure
        self._connection.answered = True

    def _send(self, method: str, read: Callable[[Any], T], **fields: Any) -> T:
        """Make one call; that of `AsyncClient` is to be awaited."""
        reply: T = self._run(self._call(request(method, read, **fields)))
        return reply

    async def _call(self, request: Request[T], begun: Any = None) -> T:
        """Make a call, or wait for one that was begun."""
        with self._explained(request):
            reply = await self._reply(request, begun)
        return request.read(reply)

    async def _page(self, request: Request[list[T]]) -> list[T]:
        """Give a page of a list; then the request is that for the next one, if it has a token."""
        with self._explained(request):
            reply = await self._reply(request, None)
        request.message.page_token = reply.next_page_token
        return request.read(reply)

    async def _next(self, values: Any) -> Any:
        """Give the next of some values, or None at their end."""
        return await anext(aiter(values), None) if hasattr(values, "__aiter__") else next(values, None)

    async def _ask(self, bulk: Bulk) -> list[Any]:
        """Answer each input, in calls of which four are on their way at once."""
        bulk.whole.id, answers, begun = self._new_id(), list[Any](), deque[tuple[Request[list[Any]], Any]]()
        try:
            calls = self._calls(bulk)
            while call := await self._next(calls):
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

    async def _answers(self, bulk: Bulk, place: int, call: Request[list[Any]], begun: Any) -> list[Any]:
        """Give the answers to a call, whose first input is number `place`; they may be errors."""
        try:
            answers = await self._call(call, begun)
        except CrossbatchError as error:
            status = status_of(error.__cause__)
            answers = bulk.blamed(call, place, error, violations_of(status) if status else ())
        for i, each in enumerate(answers, place):
            if isinstance(each, CrossbatchError):
                each.request_id = each.request_id or call.id
                if bulk.raising:
                    raise each.saying(f"input {i}: {each}") from each
        return answers

    async def _embed(self, images: Images, model: str, on_error: str) -> Any:
        whole = request("Embed", records.vectors_of, model=model)
        rows = await self._ask(Bulk(whole, "images", images, image_bytes, on_error))
        if on_error == "return":
            return rows
        if rows:
            return np.stack(rows)
        dimension = request("GetModel", lambda reply: int(reply.model.dimension), name=model)
        return np.zeros((0, await self._call(dimension)), np.float32)

    async def _delete(self, gallery: str, keys: Iterable[str], versions: Iterable[int] | None) -> int:
        calls = await self._aside(requests.delete, gallery, keys, versions, self._new_id())
        return sum([await self._call(each) for each in calls])

    async def _galleries(self) -> list[records.GalleryInfo]:
        wanted = request("ListGalleries", records.galleries_of)
        found = await self._page(wanted)
        while wanted.message.page_token:
            found += await self._page(wanted)
        return found

    async def _ready(self, wait: float) -> bool:
        deadline = time.monotonic() + wait
        probe = self.with_options(retries=0, timeout=max(1.0, min(wait, 5.0)))
        while True:
            with suppress(CrossbatchError):  # which is no answer
                if await probe._call(request("Check", lambda reply: bool(reply.status == _SERVING))):
                    return True
            if time.monotonic() >= deadline:
                return False
            await self._aside(time.sleep, 0.05)


def _is_header(pair: tuple[str, str]) -> bool:
    strings = all(isinstance(each, str) for each in pair)
    return strings and bool(_HEADER.fullmatch(pair[0]) and re.fullmatch("[ -~]*", pair[1]))
