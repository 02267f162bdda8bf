"""The Python client for asyncio, on grpc.aio: the same calls as `Client`, to be awaited."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from os import PathLike
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
import numpy as np

from serving.client.base import BaseClient
from serving.client.client import Client
from serving.client.connection import CLOSED
from serving.client.requests import Bulk, Request
from serving.errors import InvalidArgument

__all__ = ["AsyncClient"]

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Take over a method, whose `_run` gives its coroutine to the caller here."""
    return method  # type: ignore[return-value]


def _iterated(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate["AsyncClient", P], AsyncIterator[T]]:
    """Take over a method, whose `_iterate` gives its asynchronous generator to the caller here."""
    return method  # type: ignore[return-value]


class AsyncClient(BaseClient):
    """A connection whose calls are awaited; each takes, returns and raises what the one of `Client` does.

    Any number of calls may be on their way at once. A call whose task is cancelled is cancelled at the
    server, too, which drops what it has not begun; of an upload, some items may be stored then. Files, and
    iterables other than lists and tuples, are read in a thread; an asynchronous iterable of images or items
    is read on the loop. `async with` closes it.
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

    ready = _awaited(Client.ready)
    embed = _awaited(Client.embed)
    search = _awaited(Client.search)
    explain = _awaited(Client.explain)
    upsert = _awaited(Client.upsert)
    update = _awaited(Client.update)
    delete = _awaited(Client.delete)
    get = _awaited(Client.get)
    items = _iterated(Client.items)
    sample = _awaited(Client.sample)
    fields = _awaited(Client.fields)
    values = _awaited(Client.values)
    duplicates = _iterated(Client.duplicates)
    count = _awaited(Client.count)
    create = _awaited(Client.create)
    gallery = _awaited(Client.gallery)
    galleries = _awaited(Client.galleries)
    delete_gallery = _awaited(Client.delete_gallery)
    switch = _awaited(Client.switch)
    rollback = _awaited(Client.rollback)
    build_index = _iterated(Client.build_index)
    model = _awaited(Client.model)
    models = _awaited(Client.models)
    reload = _awaited(Client.reload)

    def _run(self, waiting: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return waiting

    def _iterate(self, values: AsyncGenerator[T]) -> AsyncGenerator[T]:
        return values

    async def _aside(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(function, *arguments)

    async def _reply(self, request: Request, begun: Any) -> Any:
        try:
            return await (begun or self._begin(request))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._connection.closed and not (task and task.cancelling()):
                raise InvalidArgument(CLOSED) from None  # grpc.aio cancels the calls of a channel
            raise

    async def _calls(self, bulk: Bulk) -> AsyncGenerator[Request]:
        if isinstance(bulk.inputs, AsyncIterable):
            async for each in bulk.inputs:
                made = bulk.convert(each) if _at_hand([each]) else await self._aside(bulk.convert, each)
                for call in bulk.add(made):
                    yield call
            for call in bulk.rest():
                yield call
            return
        calls, at_hand = bulk.calls(), _at_hand(bulk.inputs)
        while taken := next(calls, None) if at_hand else await self._aside(next, calls, None):
            yield taken
            if bulk.alone:
                return


def _at_hand(values: Any) -> bool:
    """Whether going through some inputs neither reads a file nor runs code of the caller's."""
    if not isinstance(values, list | tuple):
        return isinstance(values, np.ndarray)
    images = (getattr(each, "image", each) for each in values)
    return not any(isinstance(image, str | PathLike) or hasattr(image, "read") for image in images)
