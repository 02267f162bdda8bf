"""Carries out the steps of a plan with blocking calls; those begun beside it, in threads."""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import grpc

from serving.rpc.asking.attempts import Attempts, error_of
from serving.rpc.asking.line import Line
from serving.rpc.asking.splitting import IN_FLIGHT
from serving.rpc.asking.step import Begin, Call, Finish, Give, Open, Pause, Plan, Receive, Step, Take

__all__ = ["Driver"]

T = TypeVar("T")


class Driver:
    """Carries out plans over one line; may be used from several threads."""

    def __init__(self, line: Line) -> None:
        """Keep the line."""
        self._line = line

    def run(self, plan: Plan[T]) -> T:
        """Carry out a plan.

        Returns:
            Its result.

        Raises:
            Exception: what the plan raises.
        """
        walk = self.stream(plan)
        while True:
            try:
                next(walk)
            except StopIteration as end:
                result: T = end.value
                return result

    def stream(self, plan: Plan[T]) -> Generator[Any, None, T]:
        """Carry out a plan as the values that it gives are asked for.

        Yields:
            The values.
        """
        answer = partial(plan.send, None)
        with ExitStack() as cleanup:
            # Nothing that was begun outlives the plan: threads are waited for, streams broken off.
            errands = _Errands(cleanup)
            cleanup.callback(plan.close)
            while True:
                try:
                    step = answer()
                except StopIteration as end:
                    result: T = end.value
                    return result
                if isinstance(step, Give):
                    yield step.value
                    answer = partial(plan.send, None)
                    continue
                try:
                    answer = partial(plan.send, self._carry_out(step, errands))
                except Exception as error:
                    answer = partial(plan.throw, error)

    def _carry_out(self, step: Step, errands: "_Errands") -> Any:
        match step:
            case Call():
                return self._tried(step, self._line.method(step.request))
            case Open(call):
                return self._tried(call, partial(_opened, self._line.method(call.request), errands.cleanup))
            case Receive(stream):
                return self._received(stream)
            case Take(source):
                return next(source, None)
            case Begin(plan):
                return errands.pool().submit(self.run, plan)
            case Finish(begun):
                return begun.result()
            case Pause(seconds):
                time.sleep(seconds)
        return None

    def _tried(self, call: Call, method: Any) -> Any:
        """Make a call, and make it again while it was refused for a passing reason and time is left."""
        attempts = Attempts(self._line, call)
        while True:
            try:
                return method(call.request, timeout=attempts.left(), metadata=self._line.metadata)
            except grpc.RpcError as failure:
                pause = attempts.pause_after(failure)
            time.sleep(pause)

    def _received(self, stream: "Replies") -> Any:
        try:
            return stream.next()
        except grpc.RpcError as failure:
            raise error_of(failure, self._line, stream.timeout) from failure


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
    """What a plan has begun, ended with it."""

    def __init__(self, cleanup: ExitStack) -> None:
        self.cleanup = cleanup
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        """Threads for the plans that are begun; made when the first is."""
        if self._pool is None:
            self._pool = self.cleanup.enter_context(ThreadPoolExecutor(IN_FLIGHT, "crossbatch"))
        return self._pool


def _opened(method: Any, cleanup: ExitStack, request: Any, *, timeout: float, metadata: Any) -> Replies:
    call = method(request, timeout=timeout, metadata=metadata)
    cleanup.callback(call.cancel)
    return Replies(call, timeout)
