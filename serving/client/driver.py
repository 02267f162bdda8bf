"""Carries out the steps of a plan with blocking calls; those begun beside it, in threads."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc

from serving.client.attempts import Attempts, error_of
from serving.client.line import Line
from serving.client.options import Options, headers_of
from serving.client.splitting import IN_FLIGHT
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

__all__ = ["Driver"]

T = TypeVar("T")


class Driver:
    """Carries out one operation over a line, a plan with all that it begins."""

    def __init__(self, line: Line, options: Options) -> None:
        """Keep the line, and choose the request id."""
        self._line = line
        self._options = options
        self._request_id = options.request_id or new_request_id()
        self._headers = headers_of(options, self._request_id, line.headers)

    def run(self, plan: Plan[T]) -> T:
        """Carry out a plan.

        Returns:
            Its result.

        Raises:
            Exception: what the plan raises.
        """
        errands = _Errands()
        resume: Callable[[], Step] = partial(plan.send, None)
        try:
            while True:
                resume = self._resumption(plan, resume(), errands)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            errands.close()
            plan.close()
            del resume  # it has the error, whose traceback has this frame

    def stream(self, plan: Plan[None]) -> Iterator[Any]:
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
                    resume = self._resumption(plan, step, errands)
        except StopIteration:
            return
        finally:
            errands.close()
            plan.close()
            del resume  # it has the error, whose traceback has this frame

    def _resumption(self, plan: Plan[Any], step: Step, errands: "_Errands") -> Callable[[], Step]:
        """Carry out a step; gives what goes on with the plan, told what came of it."""
        try:
            return partial(plan.send, self._carry_out(step, errands))
        except Exception as error:
            return partial(plan.throw, error)

    def _carry_out(self, step: Step, errands: "_Errands") -> Any:
        match step:
            case Call():
                return self._tried(step, self._line.method(step.request))
            case Open(call):
                return self._tried(call, partial(_opened, self._line.method(call.request), errands.streams))
            case Receive(stream):
                return self._received(stream)
            case Take(source):
                return next(source, None)
            case Begin(plan):
                return errands.pool().submit(self.run, plan)
            case Finish(begun):
                return begun.result()
            case Identify():
                return self._request_id
            case Pause(seconds):
                time.sleep(seconds)
        return None

    def _tried(self, call: Call, method: Any) -> Any:
        """Make a call, and make it again while it was refused for a passing reason and time is left."""
        attempts = Attempts(self._line, self._options, self._request_id, call)
        while True:
            try:
                return method(call.request, timeout=attempts.left(), metadata=self._headers)
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure)
            time.sleep(pause)

    def _received(self, stream: "Replies") -> Any:
        try:
            return stream.next()
        except grpc.RpcError as failure:
            raise error_of(failure, self._line, stream.timeout, self._request_id) from failure


class Replies:
    """The replies of one streamed call, of which the first is there already."""

    def __init__(self, call: Any, timeout: float) -> None:
        """Wait for the first reply; an error is raised as gRPC does."""
        self.timeout = timeout
        self._call = call
        self._first = next(call, None)

    def next(self) -> Any:
        """Return the next reply; None at the end."""
        first, self._first = self._first, None
        return next(self._call, None) if first is None else first


class _Errands:
    """What a plan has begun, ended with it: threads are waited for, streams broken off."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        """Threads for the plans that are begun; made when the first is."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(IN_FLIGHT, "crossbatch")
        return self._pool

    def close(self) -> None:
        for call in self.streams:
            call.cancel()
        if self._pool is not None:
            self._pool.shutdown()


def _opened(method: Any, streams: list[Any], request: Any, *, timeout: float, metadata: Any) -> Replies:
    call = method(request, timeout=timeout, metadata=metadata)
    streams.append(call)
    return Replies(call, timeout)
