"""Inputs that an event loop brings, read from the thread in which a plan takes them."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["iterable_of"]

T = TypeVar("T")


@contextmanager
def iterable_of(values: Iterable[T] | AsyncIterable[T]) -> Iterator[Iterable[T]]:
    """Make an ordinary iterable of one of either kind; to be entered on the event loop.

    Yields:
        What may be gone through in another thread while the block runs.
    """
    if not isinstance(values, AsyncIterable):
        yield values
        return
    arriving = _Arriving(aiter(values), asyncio.get_running_loop())
    try:
        yield arriving
    finally:
        arriving.close()


class _Arriving(Iterator[Any]):
    """Waits in one thread for what a loop in another one brings."""

    def __init__(self, source: AsyncIterator[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop
        self._following: Future[tuple[bool, Any]] | None = None
        self._closed = False

    def __next__(self) -> Any:
        self._following = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
        if self._closed:
            self._following.cancel()
        there, value = self._following.result()
        if not there:
            raise StopIteration
        return value

    def close(self) -> None:
        """Stop waiting, in whatever thread that is."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()

    async def _next(self) -> tuple[bool, Any]:
        try:
            return True, await anext(self._source)
        except StopAsyncIteration:
            return False, None
