"""How the client splits many inputs into calls, and what it makes of a call whose inputs are all bad."""

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from serving.client.attempts import faults_of
from serving.client.step import Begin, Call, Finish, Identify, Plan, Take
from serving.errors import CrossbatchError, InvalidArgument, NotFound
from serving.rpc.limits import MAX_MESSAGE_BYTES

__all__ = [
    "IN_FLIGHT",
    "Piece",
    "answered_each",
    "answered_in_turn",
    "answers_to",
    "chunks_of",
    "moved_field",
    "pieces_of",
]

T = TypeVar("T")
R = TypeVar("R")

IN_FLIGHT = 4
"""Most calls of one long operation that are on their way at once."""

# A chunk is sent when the next input would pass this, so a chunk of one largest image still fits a message.
_CHUNK_BYTES = MAX_MESSAGE_BYTES // 2 - 65_536
_INPUT = re.compile(r"(images|queries|items)\[(\d+)\]")

Answers: TypeAlias = list[R | CrossbatchError]


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """What one call takes: `inputs`, of which the first is input number `place`; `last` if none follow."""

    place: int
    inputs: list[T]
    last: bool


def answers_to(
    inputs: Iterator[T],
    size: Callable[[T], int],
    at_once: int,
    reply_to: Callable[[list[T]], Call],
    read: Callable[[Any], Answers[R]],
    *,
    raising: bool,
    waits: bool,
) -> Plan[list[Any]]:
    """Answer each input for itself, in as many calls as the limits demand.

    Args:
        inputs: What is to be answered.
        size: Bytes of one input.
        at_once: Most inputs in a call.
        reply_to: The call that answers some inputs.
        read: Reads its reply: one answer or error an input.
        raising: Whether the first bad input raises its error.
        waits: Whether taking an input may last.

    Returns:
        One answer an input; or an error in its place.

    Raises:
        CrossbatchError: if a call failed, or that of the first bad input, whose place it then tells.
    """

    def answer(piece: Piece[T]) -> Plan[list[Any]]:
        answers = yield from answered_each(piece.inputs, reply_to, read)
        for place, each in enumerate(answers, piece.place):
            if isinstance(each, CrossbatchError):
                each.request_id = each.request_id or (yield Identify())
                if raising:
                    raise each.saying(f"input {place}: {each}") from each
        return answers

    answers: list[Any] = []
    yield from answered_in_turn(pieces_of(inputs, size, at_once), answer, answers, waits=waits)
    return answers


def answered_in_turn(
    pieces: Iterator[Piece[T]],
    answer: Callable[[Piece[T]], Plan[list[R]]],
    answers: list[R],
    *,
    waits: bool,
    identity: Callable[[T], Hashable] | None = None,
) -> Plan[None]:
    """Answer pieces several at a time, and collect the answers in the order of the inputs.

    Args:
        pieces: What is to be answered, each taken when there is room for it.
        answer: Answers one piece.
        answers: Gets the answers; when an error is raised, those of all inputs before the piece that failed.
        waits: Whether taking a piece may last.
        identity: What two inputs must not share while both are on their way, as the later one is to win.

    Raises:
        CrossbatchError: that of the first piece that failed. No further piece is begun then.
    """
    on_their_way: deque[tuple[Any, set[Hashable]]] = deque()
    while True:
        try:
            piece: Piece[T] | None = yield Take(pieces, waits)
        except Exception:
            # What was begun before may still succeed, and then counts.
            while on_their_way:
                answers += yield Finish(on_their_way.popleft()[0])
            raise
        if piece is None:
            break
        if piece.last and not on_their_way:
            answers += yield from answer(piece)
            return
        names = set() if identity is None else {identity(each) for each in piece.inputs}
        met = any(names & others for _, others in on_their_way)
        while on_their_way and (met or len(on_their_way) == IN_FLIGHT):
            answers += yield Finish(on_their_way.popleft()[0])
        on_their_way.append(((yield Begin(answer(piece))), names))
    while on_their_way:
        answers += yield Finish(on_their_way.popleft()[0])


def answered_each(
    inputs: list[T], reply_to: Callable[[list[T]], Call], read: Callable[[Any], Answers[R]]
) -> Plan[Answers[R]]:
    """Make one call; when it fails since each of its inputs is bad, give each its own error.

    Args:
        inputs: What one call takes.
        reply_to: The call that answers them.
        read: Reads its reply.

    Returns:
        One answer or error an input.

    Raises:
        CrossbatchError: if the call failed for a reason that is not its inputs'.
    """
    try:
        return read((yield reply_to(inputs)))
    except (InvalidArgument, NotFound) as error:
        faults = faults_of(error)
        if not faults or not all(_INPUT.match(fault.field) for fault in faults):
            raise
        if len(faults) == len(inputs):
            return [fault.error for fault in faults]
    # More are bad than a status has room to name.
    half = len(inputs) // 2
    first = yield from answered_each(inputs[:half], reply_to, read)
    return first + (yield from answered_each(inputs[half:], reply_to, read))


def pieces_of(inputs: Iterator[T], size: Callable[[T], int], at_once: int) -> Iterator[Piece[T]]:
    """Cut a stream into what is sent in one call each.

    What fits one call is one piece. Of more, each piece is as much smaller as there may be calls on their
    way, so that all of them together are no more than one call's worth, for the server as for this process.

    Args:
        inputs: What is to be sent.
        size: Bytes of one input.
        at_once: Most inputs in a call.

    Returns:
        Pieces of 1 to `at_once` inputs and at most about half a message, unless a single one is larger.
    """
    held: deque[T] = deque()
    total = 0
    for each in inputs:
        if held and (len(held) == at_once or total + size(each) > _CHUNK_BYTES):
            place = 0
            small = (size, max(1, at_once // IN_FLIGHT), _CHUNK_BYTES // IN_FLIGHT)
            for chunk in chunks_of(_drained(held, each, inputs), *small):
                yield Piece(place, chunk, last=False)
                place += len(chunk)
            return
        held.append(each)
        total += size(each)
    if held:
        yield Piece(0, list(held), last=True)


def chunks_of(
    inputs: Iterator[T], size: Callable[[T], int], at_once: int, most_bytes: int = 0
) -> Iterator[list[T]]:
    """Cut a stream into lists that fit into one call each; holds one list at a time.

    Args:
        inputs: What is to be sent.
        size: Bytes of one input.
        at_once: Most inputs in a list.
        most_bytes: Most bytes of a list, unless a single input is larger; about half a message when 0.

    Returns:
        Lists of 1 to `at_once` inputs.
    """
    chunk: list[T] = []
    total = 0
    for each in inputs:
        if chunk and (len(chunk) == at_once or total + size(each) > (most_bytes or _CHUNK_BYTES)):
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


def _drained(held: "deque[T]", following: T, inputs: Iterator[T]) -> Iterator[T]:
    """Go on with what was held back, keeping none of it."""
    while held:
        yield held.popleft()
    yield following
    yield from inputs
