"""How often one call is tried, how long it pauses between, and what its failure is called in our own tree."""

import logging
import random
import time
from typing import Any

import grpc
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from serving.client.line import Line
from serving.client.options import REQUEST_ID, Options
from serving.client.step import Call
from serving.client.unreached import is_lasting, unreached
from serving.errors import (
    CrossbatchError,
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import Violation, from_status, violations_of

__all__ = ["Attempts", "error_of", "faults_of", "pause_before"]

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class Attempts:
    """The tries of one call: all of them share its deadline."""

    def __init__(self, line: Line, options: Options, request_id: str, call: Call) -> None:
        """Start the clock."""
        self._line = line
        self._request_id = request_id
        self._timeout = options.timeout if call.timeout is None else call.timeout
        self._most = options.retries if call.retries is None else call.retries
        began = time.monotonic()
        self._deadline = began + self._timeout
        # Work that may take an hour is not begun for an hour where no server is.
        self._last_start = began + min(self._timeout, options.timeout)
        # Refused calls were not carried out; what came of one that found no server, nobody knows.
        self._passing = (Overloaded, Draining, Unavailable) if call.idempotent else (Overloaded, Draining)
        self._tries = 0

    def left(self) -> float:
        """Tell how many seconds the next try has.

        Raises:
            InvalidArgument: if the line can make no call.
        """
        self._line.check()
        return self._deadline - time.monotonic()

    def pause_after(self, failure: Any) -> float:
        """Tell how many seconds to wait before the next try.

        Raises:
            CrossbatchError: what the failure means, if there is to be no other try; `faults_of` tells the
                fields.
        """
        error = error_of(failure, self._line, self._timeout, self._request_id)
        pause = pause_before(self._tries, error)
        late = time.monotonic() + pause >= self._last_start
        lasting = _is_lasting(failure) or not isinstance(error, self._passing)
        if lasting or self._tries >= self._most or late:
            try:
                raise error from failure
            finally:
                # Else its traceback leads back to it, and the request stays until the next collection.
                del error
        self._tries += 1
        logger.debug("%s (request id %s); trying again in %.2f s", error, self._request_id, pause)
        return pause


def pause_before(tries: int, error: CrossbatchError) -> float:
    """Choose how long to wait before a call is tried again.

    Args:
        tries: Tries after the first that have been made.
        error: What the last try ended with; an overload tells when to come back.

    Returns:
        Seconds: twice as long each time, with jitter so that clients refused together do not return together.
    """
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries, 30)) * random.uniform(0.5, 1.0)  # noqa: S311
    if isinstance(error, Overloaded):
        return max(pause, error.retry_after * random.uniform(1.0, 1.5))  # noqa: S311
    return pause


def error_of(failure: Any, line: Line, timeout: float, request_id: str) -> CrossbatchError:
    """Say in our own words what a failed call ended with.

    Args:
        failure: What gRPC raised.
        line: To the server.
        timeout: Seconds that the call had.
        request_id: What the call was sent with; a proxy may have put another one in its place.

    Returns:
        An error of the class that the server named, or else of the nearest one, which tells which call it
        was; a traceback shows that, too.
    """
    error = _meaning_of(failure, line, timeout)
    error.code = failure.code().name
    error.request_id = next(
        (str(value) for key, value in failure.trailing_metadata() or () if key == REQUEST_ID), request_id
    )
    error.add_note(f"request id {error.request_id}, {error.code}")
    return error


def _meaning_of(failure: Any, line: Line, timeout: float) -> CrossbatchError:
    code, details, address = failure.code(), failure.details() or "", line.address
    status = _status_of(failure)
    if status is not None and status.details:
        return from_status(status)
    # From here on it is gRPC that speaks, not the server.
    if code is grpc.StatusCode.UNAVAILABLE:
        return unreached(address, details, encrypted=line.encrypted)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"The server at {address} did not answer within {timeout:g} s.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(
            f"The server at {address} does not know this call; it is no crossbatch server, or an older one."
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidArgument(f"The message is larger than {MAX_MESSAGE_BYTES:,} bytes; split the call.")
    return from_status(status_pb2.Status(code=code.value[0], message=details))


def faults_of(error: CrossbatchError) -> tuple[Violation, ...]:
    """Read which fields of a request the server complained about.

    Args:
        error: What a call raised.

    Returns:
        One violation a field; none if no field is to blame.
    """
    if not isinstance(error.__cause__, grpc.RpcError):
        return ()
    status = _status_of(error.__cause__)
    return () if status is None else violations_of(status)


def _is_lasting(failure: Any) -> bool:
    """Whether a call would end alike each time: of three codes that pass elsewhere, those that gRPC gives."""
    if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # a message or its metadata may be too large
        status = _status_of(failure)
        return status is None or not any(each.Is(RetryInfo.DESCRIPTOR) for each in status.details)
    if failure.code() is grpc.StatusCode.UNAVAILABLE:
        return _status_of(failure) is None and is_lasting(failure.details() or "")
    return failure.code() is grpc.StatusCode.UNIMPLEMENTED


def _status_of(failure: Any) -> status_pb2.Status | None:
    """The rich status of a call; None when there is none or when it contradicts the code."""
    try:
        status: status_pb2.Status | None = rpc_status.from_call(failure)
    except ValueError:
        return None
    return status
