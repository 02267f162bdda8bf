"""The Python client for asyncio, on grpc.aio: the same calls as `Client`, to be awaited."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from os import PathLike
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, overload

import grpc
import numpy as np

from serving.client import requests
from serving.client.client import Client, Explained, Explanations, OnError, Raise, Return, Vector, Vectors
from serving.client.connection import CLOSED, BaseClient, Request
from serving.client.inputs import IN_FLIGHT, BulkRequest, ImageLike, Part
from serving.client.records import GalleryInfo, Item
from serving.client.requests import Page
from serving.errors import CrossbatchError, InvalidArgument

__all__ = ["AsyncClient"]

P = ParamSpec("P")
T = TypeVar("T")

Images: TypeAlias = Iterable[ImageLike] | AsyncIterable[ImageLike]


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Take over a method that makes a request and gives it to `_call`, which is a coroutine here."""
    return method  # type: ignore[return-value]


def _iterated(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate["AsyncClient", P], AsyncIterator[T]]:
    """Take over a method whose `_pages` or `_stream` is asynchronous here."""
    return method  # type: ignore[return-value]


class AsyncClient(BaseClient):
    """A connection whose calls are awaited; each takes, returns and raises what the one of `Client` does.

    Any number of calls may be on their way at once. A call whose task is cancelled is cancelled at the
    server, too, which drops what it has not begun. Files, and iterables other than lists and tuples, are read
    in a thread; an asynchronous iterable of images or items is read on the loop. `async with` closes it.
    """

    _api = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As `Client.close`."""
        if self._owner:
            for channel in self._connection.close():
                await channel.close()

    async def ready(self, *, wait: float = 0.0) -> bool:
        """As `Client.ready`."""
        deadline = time.monotonic() + wait
        probe = self.with_options(retries=0, timeout=max(1.0, min(wait, 5.0)))
        while True:
            with suppress(CrossbatchError):  # which is no answer
                if await probe._call(requests.health()):
                    return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.05)

    @overload
    async def embed(self, images: Images, *, model: str = "", on_error: Raise = "raise") -> Vector: ...
    @overload
    async def embed(self, images: Images, *, model: str = "", on_error: Return) -> Vectors: ...
    async def embed(self, images: Images, *, model: str = "", on_error: OnError = "raise") -> Any:
        """As `Client.embed`."""
        rows = await self._ask(requests.embed(images, model, on_error))
        if on_error == "return":
            return rows
        return np.stack(rows) if rows else np.zeros((0, (await self.model(model)).dimension), np.float32)

    @overload
    async def explain(self, images: Images, *, model: str = "", on_error: Return) -> Explanations: ...
    @overload
    async def explain(self, images: Images, *, model: str = "", on_error: Raise = ...) -> Explained: ...
    async def explain(self, images: Images, *, model: str = "", on_error: OnError = "raise") -> Any:
        """As `Client.explain`."""
        return await self._ask(requests.explain(images, model, on_error))

    async def upsert(self, gallery: str, items: Iterable[Item] | AsyncIterable[Item]) -> list[int]:
        """As `Client.upsert`; when the task is cancelled, some of them may be stored."""
        return await self._ask(requests.upsert(gallery, items))

    async def delete(
        self, gallery: str, keys: Iterable[str], *, expected_versions: Iterable[int] | None = None
    ) -> int:
        """As `Client.delete`."""
        given = (gallery, keys, expected_versions, self._new_id())
        return sum([await self._call(each) for each in await asyncio.to_thread(requests.delete, *given)])

    async def galleries(self) -> list[GalleryInfo]:
        """As `Client.galleries`."""
        return [each async for each in self._pages(requests.galleries())]

    search = _awaited(Client.search)
    get = _awaited(Client.get)
    create = _awaited(Client.create)
    gallery = _awaited(Client.gallery)
    delete_gallery = _awaited(Client.delete_gallery)
    switch = _awaited(Client.switch)
    rollback = _awaited(Client.rollback)
    model = _awaited(Client.model)
    models = _awaited(Client.models)
    reload = _awaited(Client.reload)
    items = _iterated(Client.items)
    build_index = _iterated(Client.build_index)

    async def _call(self, request: Request[T], begun: Any = None) -> T:
        """Make a call, or wait for one that was begun."""
        try:
            return self._read(request, await (begun or self._begin(request)))
        except grpc.RpcError as failure:
            raise self._error(failure, request) from failure
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._connection.closed and not (task and task.cancelling()):
                raise InvalidArgument(CLOSED) from None  # grpc.aio cancels the calls of a channel
            raise

    async def _pages(self, request: Request[Page[T]]) -> AsyncIterator[T]:
        more = True
        while more:
            values, request.message.page_token = await self._call(request)
            for value in values:
                yield value
            more = bool(request.message.page_token)

    async def _stream(self, request: Request[T]) -> AsyncIterator[T]:
        replies = self._begin(request)
        try:
            async for reply in replies:
                yield self._read(request, reply)
        except grpc.RpcError as failure:
            raise self._error(failure, request) from failure
        finally:
            replies.cancel()

    async def _ask(self, bulk: BulkRequest) -> list[Any]:
        """Answer each input, in calls of which four are on their way at once."""
        bulk.whole.id, answers, begun = self._new_id(), list[Any](), deque[Part]()
        try:
            async for part in _parts(bulk):
                if len(begun) == IN_FLIGHT:
                    answers += await self._answers(bulk, begun.popleft())
                part.call = self._begin(part.request)
                begun.append(part)
            while begun:
                answers += await self._answers(bulk, begun.popleft())
        except CrossbatchError as error:
            error.stored = len(answers) if bulk.field == "items" else 0
            raise
        finally:
            for part in begun:
                part.call.cancel()
        return answers

    async def _answers(self, bulk: BulkRequest, part: Part) -> list[Any]:
        outcome: list[Any] | CrossbatchError
        try:
            outcome = await self._call(part.request, part.call)
        except CrossbatchError as error:
            outcome = error
        return bulk.answers(part, outcome)


async def _parts(bulk: BulkRequest) -> AsyncIterator[Part]:
    """Cut the inputs into calls; whatever may last is read in a thread."""
    if isinstance(bulk.inputs, AsyncIterable):
        async for each in bulk.inputs:
            for part in bulk.add(each) if _at_hand([each]) else await asyncio.to_thread(bulk.add, each):
                yield part
        for part in bulk.rest():
            yield part
        return
    parts, at_hand = bulk.parts(), _at_hand(bulk.inputs)
    while taken := next(parts, None) if at_hand else await asyncio.to_thread(next, parts, None):
        yield taken


def _at_hand(values: Any) -> bool:
    """Whether going through some inputs neither reads a file nor runs code of the caller's."""
    if not isinstance(values, list | tuple):
        return isinstance(values, np.ndarray)
    images = (getattr(each, "image", each) for each in values)
    return not any(isinstance(image, str | PathLike) or hasattr(image, "read") for image in images)
