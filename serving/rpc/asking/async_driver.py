"""Carries out the steps of a plan on whatever event loop runs, without blocking it.

It does so over an ordinary channel, whose threads wake the loop: the asyncio API of gRPC ties a channel to
one loop, and floods the others of its process with errors (grpc#25364, grpc#42357).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from serving.rpc.asking.attempts import Attempts, error_of
from serving.rpc.asking.driver import Replies
from serving.rpc.asking.line import Line
from serving.rpc.asking.step import Begin, Call, Finish, Give, Open, Pause, Plan, Receive, Step, Take

__all__ = ["AsyncDriver"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Result:
    value: Any


class AsyncDriver:
    """Carries out plans over one line; may be used from several event loops."""

    def __init__(self, line: Line) -> None:
        """Keep the line."""
        self._line = line

    async def run(self, plan: Plan[T]) -> T:
        """Carry out a plan; when the task is cancelled, so are its calls.

        Returns:
            Its result.

        Raises:
            Exception: what the plan raises.
        """
        result: Any = None
        async with aclosing(self._walk(plan)) as walk:
            async for each in walk:
                if isinstance(each, _Result):
                    result = each.value
        return result  # type: ignore[no-any-return]

    async def stream(self, plan: Plan[Any]) -> AsyncGenerator[Any, None]:
        """Carry out a plan as the values that it gives are asked for.

        Yields:
            The values.
        """
        async with aclosing(self._walk(plan)) as walk:
            async for each in walk:
                if not isinstance(each, _Result):
                    yield each

    async def _walk(self, plan: Plan[Any]) -> AsyncGenerator[Any, None]:
        answer = partial(plan.send, None)
        async with AsyncExitStack() as cleanup:
            # Nothing that was begun outlives the plan: tasks and streams are broken off.
            cleanup.callback(plan.close)
            aside = _Aside()
            cleanup.callback(aside.close)
            begun = set[asyncio.Task[Any]]()
            cleanup.push_async_callback(_break_off, begun)
            while True:
                try:
                    step = answer()
                except StopIteration as end:
                    yield _Result(end.value)
                    return
                if isinstance(step, Give):
                    yield step.value
                    answer = partial(plan.send, None)
                    continue
                try:
                    answer = partial(plan.send, await self._carry_out(step, aside, begun, cleanup))
                except Exception as error:
                    answer = partial(plan.throw, error)

    async def _carry_out(
        self, step: Step, aside: "_Aside", begun: "set[asyncio.Task[Any]]", cleanup: AsyncExitStack
    ) -> Any:
        match step:
            case Call():
                return await self._tried(step, partial(_answered, self._line.method(step.request)))
            case Open(call):
                return await self._tried(
                    call, partial(_opened, self._line.method(call.request), aside, cleanup)
                )
            case Receive(stream):
                return await self._received(stream, aside)
            case Take(source, waits):
                return await aside.run(next, source, None) if waits else next(source, None)
            case Begin(plan):
                task = asyncio.create_task(self.run(plan))
                begun.add(task)
                return task
            case Finish(task):
                try:
                    return await task
                finally:
                    begun.discard(task)
            case Pause(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _tried(self, call: Call, method: Any) -> Any:
        attempts = Attempts(self._line, call)
        while True:
            try:
                return await method(call.request, timeout=attempts.left(), metadata=self._line.metadata)
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure)
            await asyncio.sleep(pause)

    async def _received(self, stream: Replies, aside: "_Aside") -> Any:
        try:
            return await aside.run(stream.next)
        except grpc.RpcError as failure:
            raise error_of(failure, self._line, stream.timeout) from failure


class _Aside:
    """One thread of a plan's own for what would hold up the loop, made when it is needed.

    The loop's threads are few and the caller's, too: an upload that held one while it waits for a source that
    wants one itself would wait for ever.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "crossbatch-client")
        work = partial(copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Let the thread end after what it does, without waiting for that."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


async def _answered(method: Any, request: Any, **options: Any) -> Any:
    """Make one try of a call; it is cancelled with the task, and the server then drops the request."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    call = method.future(request, **options)

    def wake(_: Any) -> None:
        with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
            loop.call_soon_threadsafe(done.set)

    call.add_done_callback(wake)
    try:
        await done.wait()
    finally:
        call.cancel()
    return call.result()


async def _opened(
    method: Any, aside: "_Aside", cleanup: AsyncExitStack, request: Any, **options: Any
) -> Replies:
    call = method(request, **options)
    cleanup.callback(call.cancel)
    return await aside.run(Replies, call, options["timeout"])


async def _break_off(begun: "set[asyncio.Task[Any]]") -> None:
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
