"""Large messages as pieces that are joined at last, so that packing one holds up no other call.

protobuf packs a message, and even counts its bytes, in one step during which no other thread runs: 60 MiB
take 0.1 s and more. While bytes are joined the others run, the event loop among them if that is in a thread.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from serving.errors import InvalidArgument
from serving.rpc.limits import MAX_MESSAGE_BYTES

__all__ = ["LARGE", "Pieces", "framed", "packed"]

LARGE = 1 << 20
"""A reply of more bytes is joined in a thread; for less that takes no longer than the way there and back."""


class Pieces:
    """A message as it travels, in pieces whose order is its own."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """Keep the pieces."""
        self._pieces = list(pieces)
        self.size = sum(map(len, self._pieces))
        """Bytes of the message."""

    def join(self) -> bytes:
        """Return the message; other threads run meanwhile if it is large."""
        return b"".join(self._pieces)


def framed(kind: Any, field: str, parts: Iterable[bytes]) -> list[bytes]:
    """Write a repeated field of messages, or of bytes, that are packed already.

    Args:
        kind: The class of the message that has it.
        field: Its name.
        parts: The packed messages.

    Returns:
        Pieces of a message of that class.
    """
    tag = _varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2)  # 2: a length and so many bytes
    return [piece for part in parts for piece in (tag + _varint(len(part)), part)]


async def packed(reply: Any) -> bytes:
    """Pack a reply, a message or `Pieces`; a large one of pieces beside the event loop.

    Raises:
        InvalidArgument: if it is larger than any that is sent.
    """
    if isinstance(reply, Pieces):
        _check_size(reply.size)
        return await asyncio.to_thread(reply.join) if reply.size > LARGE else reply.join()
    data: bytes = reply.SerializeToString()
    _check_size(len(data))
    return data


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"The reply has {size:,} bytes and at most {MAX_MESSAGE_BYTES:,} are sent; "
            "ask for fewer neighbours or split the call."
        )


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
