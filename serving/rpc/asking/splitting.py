"""How the client splits many inputs into calls, and what it makes of a call whose inputs are all bad."""

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from serving.errors import CrossbatchError, InvalidArgument, NotFound
from serving.rpc.asking.caller import faults_of
from serving.rpc.limits import MAX_MESSAGE_BYTES

__all__ = ["answered_each", "answers_to", "chunks_of", "moved_field"]

T = TypeVar("T")
R = TypeVar("R")

# A chunk is sent when the next input would pass this, so a chunk of one largest image still fits a message.
_CHUNK_BYTES = MAX_MESSAGE_BYTES // 2 - 65_536
_INPUT = re.compile(r"(images|queries|items)\[(\d+)\]")


def answers_to(
    inputs: Iterator[T],
    size: Callable[[T], int],
    at_once: int,
    call: Callable[[list[T]], list[R | CrossbatchError]],
    *,
    raising: bool,
) -> list[Any]:
    """Answer each input for itself, in as many calls as the limits demand.

    Args:
        inputs: What is to be answered.
        size: Bytes of one input.
        at_once: Most inputs in a call.
        call: Answers each input, or raises what `Caller.call` raised.
        raising: Whether the first bad input raises its error.

    Returns:
        One answer an input; or an error in its place.

    Raises:
        CrossbatchError: if a call failed, or that of the first bad input, whose place it then tells.
    """
    answers: list[R | CrossbatchError] = []
    for chunk in chunks_of(inputs, size, at_once):
        for answer in answered_each(chunk, call):
            if raising and isinstance(answer, CrossbatchError):
                raise type(answer)(f"input {len(answers)}: {answer}") from answer
            answers.append(answer)
    return answers


def answered_each(
    inputs: list[T], call: Callable[[list[T]], list[R | CrossbatchError]]
) -> list[R | CrossbatchError]:
    """Make one call; when it fails since each of its inputs is bad, give each its own error.

    Args:
        inputs: What one call takes.
        call: Answers each input, or raises what `Caller.call` raised.

    Returns:
        One answer or error an input.

    Raises:
        CrossbatchError: if the call failed for a reason that is not its inputs'.
    """
    try:
        return call(inputs)
    except (InvalidArgument, NotFound) as error:
        faults = faults_of(error)
        if not faults or not all(_INPUT.match(fault.field) for fault in faults):
            raise
        if len(faults) == len(inputs):
            return [fault.error for fault in faults]
    # More are bad than a status has room to name.
    half = len(inputs) // 2
    return answered_each(inputs[:half], call) + answered_each(inputs[half:], call)


def chunks_of(inputs: Iterator[T], size: Callable[[T], int], at_once: int) -> Iterator[list[T]]:
    """Cut a stream into lists that fit into one call each; holds one list at a time.

    Args:
        inputs: What is to be sent.
        size: Bytes of one input.
        at_once: Most inputs in a list.

    Returns:
        Lists of 1 to `at_once` inputs and at most about half a message, unless a single one is larger.
    """
    chunk: list[T] = []
    total = 0
    for each in inputs:
        if chunk and (len(chunk) == at_once or total + size(each) > _CHUNK_BYTES):
            yield chunk
            chunk, total = [], 0
        chunk.append(each)
        total += size(each)
    if chunk:
        yield chunk


def moved_field(field: str, by: int) -> str:
    """Name a field by its place among all inputs: `items[3].image` of the second chunk is `items[259].image`.

    Returns:
        The field, its first index raised.
    """
    return _INPUT.sub(lambda found: f"{found[1]}[{int(found[2]) + by}]", field, count=1)
