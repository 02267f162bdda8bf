"""One unary call from the client's side: deadline, retries, and errors of our own tree."""

import random
import time
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from serving.errors import (
    CrossbatchError,
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from serving.rpc.asking.given import text
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import Violation, from_status, violations_of

__all__ = ["Caller", "faults_of", "pause_before"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
LONGEST_TIMEOUT = 86_400


class Caller:
    """A channel to one address, and how often and how long a call over it is tried."""

    def __init__(self, address: str, *, timeout: float, retries: int) -> None:
        """Make the channel; it connects with the first call.

        Args:
            address: host:port.
            timeout: Seconds that a call has, tries and pauses together.
            retries: Most tries after the first.

        Raises:
            InvalidArgument: if an argument makes no sense.
        """
        text(address, "The address")
        numbers = isinstance(timeout, Real) and isinstance(retries, Integral)
        if not numbers or not 0 < timeout <= LONGEST_TIMEOUT or retries < 0:
            raise InvalidArgument(
                f"timeout={timeout!r}, retries={retries!r} cannot make a call; the timeout must be above 0 "
                f"and at most {LONGEST_TIMEOUT:,} seconds, and retries 0 or more."
            )
        self.address = address
        self.timeout = timeout
        self.retries = retries
        self._closed = False
        self.channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.enable_retries", 0),  # ours know of RetryInfo
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1_000),
            ],
        )

    def call(self, method: Any, request: Any, *, idempotent: bool = True) -> Any:
        """Make a call, and make it again while it was refused for a passing reason and time is left.

        Args:
            method: A method of a stub on `channel`.
            request: Its message.
            idempotent: Whether a call that may have been carried out can be made again without harm.

        Returns:
            The reply.

        Raises:
            CrossbatchError: of the class that the server named; `faults_of` tells the fields.
            InvalidArgument: if the channel has been closed.
        """
        if self._closed:
            raise InvalidArgument("The client has been closed; make another one.")
        deadline = time.monotonic() + self.timeout
        tries = 0
        while True:
            try:
                return method(request, timeout=deadline - time.monotonic())
            except grpc.RpcError as failure:
                error = self._error_of(failure)
                passing = (Overloaded, Draining, Unavailable) if idempotent else (Overloaded, Draining)
                pause = pause_before(tries, error)
                late = time.monotonic() + pause >= deadline
                if not isinstance(error, passing) or tries >= self.retries or late:
                    raise error from failure
            time.sleep(pause)
            tries += 1

    def pages(self, method: Any, request: Any) -> Iterator[Any]:
        """Make a call for each page of a list.

        Args:
            method: A method of a stub on `channel`, whose request has a `page_token`.
            request: The message that asks for the first page.

        Returns:
            One reply a page, each asked for when its turn comes.

        Raises:
            CrossbatchError: as `call` does.
        """
        asked = type(request)()
        asked.CopyFrom(request)
        while True:
            reply = self.call(method, asked)
            yield reply
            if not reply.next_page_token:
                return
            asked.page_token = reply.next_page_token

    def close(self) -> None:
        """Close the channel."""
        self._closed = True
        self.channel.close()

    def _error_of(self, failure: Any) -> CrossbatchError:
        code, details = failure.code(), failure.details() or ""
        status = _status_of(failure)
        if status is not None and status.details:
            return from_status(status)
        # From here on it is gRPC that speaks, not the server.
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(
                f"No server answers at {self.address} ({details}); "
                "start one with `crossbatch serve`, or give its address."
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"The server at {self.address} did not answer within {self.timeout:g} s.")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(
                f"The server at {self.address} does not know this call; it is not a crossbatch server."
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            return InvalidArgument(f"The message is larger than {MAX_MESSAGE_BYTES:,} bytes; split the call.")
        return from_status(status_pb2.Status(code=code.value[0], message=details))


def pause_before(tries: int, error: CrossbatchError) -> float:
    """Choose how long to wait before a call is tried again.

    Args:
        tries: Tries after the first that have been made.
        error: What the last try ended with; an overload tells when to come back.

    Returns:
        Seconds: twice as long each time, with jitter so that clients refused together do not return together.
    """
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**tries) * random.uniform(0.5, 1.0)  # noqa: S311
    if isinstance(error, Overloaded):
        return max(pause, error.retry_after * random.uniform(1.0, 1.5))  # noqa: S311
    return pause


def faults_of(error: CrossbatchError) -> tuple[Violation, ...]:
    """Read which fields of a request the server complained about.

    Args:
        error: What `Caller.call` raised.

    Returns:
        One violation a field; none if no field is to blame.
    """
    if not isinstance(error.__cause__, grpc.RpcError):
        return ()
    status = _status_of(error.__cause__)
    return () if status is None else violations_of(status)


def _status_of(failure: Any) -> status_pb2.Status | None:
    """The rich status of a call; None when there is none or when it contradicts the code."""
    try:
        status: status_pb2.Status | None = rpc_status.from_call(failure)
    except ValueError:
        return None
    return status
