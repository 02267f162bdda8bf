"""The Python client for asyncio, on grpc.aio: the same calls as `Client`, to be awaited."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from os import PathLike
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, Unpack, overload

import grpc
import numpy as np

from serving.client import requests
from serving.client.client import Client, Explanations, Hits, Raise, Return, Vector, Vectors
from serving.client.connection import CLOSED, BaseClient, Request
from serving.client.inputs import ImageLike
from serving.client.records import Explanation, GalleryInfo, Hit, Item
from serving.client.requests import IN_FLIGHT, BulkRequest, Chunk, Chunker, Page, SearchOptions
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
        """Hang up, any number of times; calls on their way end with an error."""
        if self._owner:
            for channel in self._connection.close():
                await channel.close()

    async def ready(self, *, wait: float = 0.0) -> bool:
        """Ask whether the server serves, for up to `wait` seconds; never raises."""
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
    async def embed(self, images: Images, *, model: str = "", on_error: Raise | Return = "raise") -> Any:
        """Embed images, as `Client.embed`."""
        rows = await self._ask(requests.embed(images, model, on_error))
        if on_error == "return":
            return rows
        return np.stack(rows) if rows else np.zeros((0, (await self.model(model)).dimension), np.float32)

    @overload
    async def search(self, gallery: str, *, on_error: Return, **options: Unpack[SearchOptions]) -> Hits: ...
    @overload
    async def search(
        self, gallery: str, *, on_error: Raise = "raise", **options: Unpack[SearchOptions]
    ) -> list[list[Hit]]: ...
    async def search(
        self, gallery: str, *, on_error: Raise | Return = "raise", **options: Unpack[SearchOptions]
    ) -> Any:
        """Find the nearest items to each query, as `Client.search`."""
        return await self._ask(requests.search(gallery, on_error, options))

    @overload
    async def explain(self, images: Images, *, model: str = "", on_error: Return) -> Explanations: ...
    @overload
    async def explain(
        self, images: Images, *, model: str = "", on_error: Raise = "raise"
    ) -> list[Explanation]: ...
    async def explain(self, images: Images, *, model: str = "", on_error: Raise | Return = "raise") -> Any:
        """Tell which of the model's prototypes make up each image, as `Client.explain`."""
        return await self._ask(requests.explain(images, model, on_error))

    async def upsert(self, gallery: str, items: Iterable[Item] | AsyncIterable[Item]) -> list[int]:
        """Store items, as `Client.upsert`; when the task is cancelled, some of them may be stored."""
        return await self._ask(requests.upsert(gallery, items))

    async def delete(
        self, gallery: str, keys: Iterable[str], *, expected_versions: Iterable[int] | None = None
    ) -> int:
        """Remove items, as `Client.delete`."""
        calls = await asyncio.to_thread(requests.delete, gallery, keys, expected_versions)
        request_id = self._new_id()
        return sum([await self._call(each, request_id) for each in calls])

    async def galleries(self) -> list[GalleryInfo]:
        """Describe all galleries, in the order of their names."""
        return [each async for each in self._pages(requests.galleries())]

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

    async def _call(self, request: Request[T], request_id: str = "", begun: Any = None) -> T:
        """Make a call, or wait for one that was begun."""
        request_id = request_id or self._new_id()
        try:
            return self._read(request, await (begun or self._begin(request, request_id)))
        except grpc.RpcError as failure:
            raise self._error(failure, request, request_id) from failure
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._connection.closed and not (task and task.cancelling()):
                raise InvalidArgument(CLOSED) from None  # grpc.aio cancels the calls of a channel
            raise

    def _begin(self, request: Request[Any], request_id: str) -> Any:
        method, options = self._prepared(request, request_id)
        return method(request.message, **options)

    async def _pages(self, request: Request[Page[T]]) -> AsyncIterator[T]:
        request_id, more = self._new_id(), True
        while more:
            values, request.message.page_token = await self._call(request, request_id)
            for value in values:
                yield value
            more = bool(request.message.page_token)

    async def _stream(self, request: Request[T]) -> AsyncIterator[T]:
        request_id = self._new_id()
        replies = self._begin(request, request_id)
        try:
            async for reply in replies:
                yield self._read(request, reply)
        except grpc.RpcError as failure:
            raise self._error(failure, request, request_id) from failure
        finally:
            replies.cancel()

    async def _ask(self, bulk: BulkRequest) -> list[Any]:
        """Answer each input, in calls of which four are on their way at once."""
        request_id, answers = self._new_id(), list[Any]()
        begun: deque[tuple[Chunk, Request[list[Any]], Any]] = deque()
        try:
            async for chunk in _chunks(bulk):
                if len(begun) == IN_FLIGHT:
                    answers += await self._answers(bulk, request_id, *begun.popleft())
                asked = bulk.request(chunk)
                begun.append((chunk, asked, self._begin(asked, request_id)))
            while begun:
                answers += await self._answers(bulk, request_id, *begun.popleft())
        except CrossbatchError as error:
            error.stored = len(answers) if bulk.field == "items" else 0
            raise
        finally:
            for *_, call in begun:
                call.cancel()
        return answers

    async def _answers(
        self, bulk: BulkRequest, request_id: str, chunk: Chunk, asked: Request[list[Any]], call: Any
    ) -> list[Any]:
        try:
            answers = await self._call(asked, request_id, call)
        except CrossbatchError as error:
            answers = bulk.blamed(chunk, error)
        return bulk.placed(answers, chunk, request_id)


async def _chunks(bulk: BulkRequest) -> AsyncIterator[Chunk]:
    """Cut the inputs into calls; whatever may last is read in a thread."""
    if isinstance(bulk.inputs, AsyncIterable):
        chunker = Chunker(bulk.at_once)
        async for each in bulk.inputs:
            sent = bulk.convert(each) if _at_hand([each]) else await asyncio.to_thread(bulk.convert, each)
            for chunk in chunker.add(sent):
                yield chunk
        for chunk in chunker.rest():
            yield chunk
    elif _at_hand(bulk.inputs):
        for chunk in bulk.chunks():
            yield chunk
    else:
        chunks = bulk.chunks()
        while (taken := await asyncio.to_thread(next, chunks, None)) is not None:
            yield taken


def _at_hand(values: Any) -> bool:
    """Whether going through some inputs neither reads a file nor runs code of the caller's."""
    if not isinstance(values, list | tuple):
        return isinstance(values, np.ndarray)
    images = (getattr(each, "image", each) for each in values)
    return not any(isinstance(image, str | PathLike) or hasattr(image, "read") for image in images)
