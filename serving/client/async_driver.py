"""Carries out the steps of a plan on whatever event loop runs, without blocking it.

It does so over an ordinary channel, whose threads wake the loop: the asyncio API of gRPC ties a channel to
one loop, and floods the others of its process with errors (grpc#25364, grpc#42357).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import grpc

from serving.client.attempts import Attempts, error_of
from serving.client.driver import Replies
from serving.client.line import Line
from serving.client.options import Options, headers_of
from serving.client.step import (
    Begin,
    Call,
    Finish,
    Give,
    Identify,
    Open,
    Pause,
    Plan,
    Receive,
    Step,
    Take,
)
from serving.observability.logs import new_request_id

__all__ = ["AsyncDriver"]

T = TypeVar("T")


class AsyncDriver:
    """Carries out one operation over a line, a plan with all that it begins."""

    def __init__(self, line: Line, options: Options) -> None:
        """Keep the line, and choose the request id."""
        self._line = line
        self._options = options
        self._request_id = options.request_id or new_request_id()
        self._headers = headers_of(options, self._request_id, line.headers)

    async def run(self, plan: Plan[T]) -> T:
        """Carry out a plan; when the task is cancelled, so are its calls.

        Returns:
            Its result.

        Raises:
            Exception: what the plan raises.
        """
        errands = _Errands()
        resume: Callable[[], Step] = partial(plan.send, None)
        try:
            while True:
                resume = await self._resumption(plan, resume(), errands)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            try:
                await errands.close()
            finally:  # though the task may be cancelled once more
                plan.close()
                del resume  # it has the error, whose traceback has this frame

    async def stream(self, plan: Plan[None]) -> AsyncGenerator[Any, None]:
        """Carry out a plan as the values that it gives are asked for.

        Yields:
            The values.
        """
        errands = _Errands()
        resume: Callable[[], Step] = partial(plan.send, None)
        try:
            while True:
                step = resume()
                if isinstance(step, Give):
                    yield step.value
                    resume = partial(plan.send, None)
                else:
                    resume = await self._resumption(plan, step, errands)
        except StopIteration:
            return
        finally:
            try:
                await errands.close()
            finally:  # though the task may be cancelled once more
                plan.close()
                del resume  # it has the error, whose traceback has this frame

    async def _resumption(self, plan: Plan[Any], step: Step, errands: "_Errands") -> Callable[[], Step]:
        """Carry out a step; gives what goes on with the plan, told what came of it."""
        try:
            return partial(plan.send, await self._carry_out(step, errands))
        except Exception as error:
            return partial(plan.throw, error)

    async def _carry_out(self, step: Step, errands: "_Errands") -> Any:
        match step:
            case Call():
                return await self._tried(step, partial(_answered, self._line.method(step.request)))
            case Open(call):
                return await self._tried(call, partial(_opened, self._line.method(call.request), errands))
            case Receive(stream):
                return await self._received(stream, errands)
            case Take(source, waits):
                return await errands.aside(next, source, None) if waits else next(source, None)
            case Begin(plan):
                task = asyncio.create_task(self.run(plan))
                errands.begun.add(task)
                return task
            case Finish(task):
                try:
                    return await task
                finally:
                    errands.begun.discard(task)
            case Identify():
                return self._request_id
            case Pause(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _tried(self, call: Call, method: Any) -> Any:
        attempts = Attempts(self._line, self._options, self._request_id, call)
        while True:
            try:
                return await method(call.request, timeout=attempts.left(), metadata=self._headers)
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure)
            await asyncio.sleep(pause)

    async def _received(self, stream: Replies, errands: "_Errands") -> Any:
        try:
            return await errands.aside(stream.next)
        except grpc.RpcError as failure:
            raise error_of(failure, self._line, stream.timeout, self._request_id) from failure


class _Errands:
    """What a plan has begun, ended with it: tasks and streams are broken off.

    What would hold up the loop has one thread of the plan's own, made when it is needed. The loop's threads
    are few and the caller's, too: an upload that held one while it waits for a source that wants one itself
    would wait for ever.
    """

    def __init__(self) -> None:
        self.begun = set[asyncio.Task[Any]]()
        self.streams: list[Any] = []
        self._thread: ThreadPoolExecutor | None = None

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "crossbatch-client")
        work = partial(copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """End it all; the thread ends after what it does, without being waited for."""
        for call in self.streams:
            call.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        for task in self.begun:
            task.cancel()
        if self.begun:
            await asyncio.gather(*self.begun, return_exceptions=True)


async def _answered(method: Any, request: Any, **options: Any) -> Any:
    """Make one try of a call; it is cancelled with the task, and the server then drops the request."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    call = method.future(request, **options)

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)

    def wake(_: Any) -> None:
        with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
            loop.call_soon_threadsafe(settle)

    call.add_done_callback(wake)
    try:
        await ended
    finally:
        call.cancel()
    failure = call.exception()
    if failure is None:
        return call.result()
    try:
        raise failure
    finally:
        # Else its traceback leads back to it, as that of `result` does, and the request stays for a while.
        del call, failure


async def _opened(method: Any, errands: _Errands, request: Any, **options: Any) -> Replies:
    call = method(request, **options)
    errands.streams.append(call)
    return await errands.aside(Replies, call, options["timeout"])
