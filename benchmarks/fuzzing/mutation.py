"""Bytes that are nearly right: images and messages changed in the ways in which programs break."""

import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from benchmarks.driving.messages import varint

__all__ = ["image", "message"]

_HEADER: Final = 64
_LENGTHS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_VARINTS: Final = (
    0,
    1,
    0x7F,
    0x80,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_TEXTS: Final = (
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\x00",
    b"..",
    b"a" * 2000,
    "é".encode() * 40,
    b"\xf8\x88\x80\x80",
)


def image(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the images, changed once to three times; now and then bytes that never were one."""
    if random.random() < 0.02:
        return random.randbytes(random.randrange(2000))
    data = random.choice(seeds)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = random.choice(_IMAGE)(random, data, seeds)
    return data


def message(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return a message, changed once to three times; now and then as it was, or bytes that never were one."""
    chance = random.random()
    if chance < 0.3:
        return data
    if chance < 0.35:
        return random.randbytes(random.randrange(300))
    for _ in range(random.choice((1, 1, 2, 3))):
        data = random.choice(_MESSAGE)(random, data, others)
    return data


Change = Callable[[Random, bytes, Sequence[bytes]], bytes]


def _truncated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _flipped(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 2, 4, 16)) if data else 0):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _header(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randrange(1, 4) if data else 0):
        changed[random.randrange(min(_HEADER, len(data)))] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def _length(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Write a number of 2 or 4 bytes, such as a length, anywhere."""
    form = random.choice((">H", "<H", ">I", "<I"))
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = random.randrange(len(data) - size + 1)
    value = random.choice(_LENGTHS) % (1 << 8 * size)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def _spliced(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = random.choice(others)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _removed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start + random.randrange(1, 64) :]


def _repeated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data) + 1)
    stop = start + random.randrange(1, 128)
    return data[:stop] + data[start:stop] * random.choice((1, 2, 50)) + data[stop:]


def _inserted(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.randrange(1, 32)) + data[at:]


def _zeroed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data) + 1)
    some = data[start : start + random.randrange(1, 64)]
    return data[:start] + bytes(len(some)) + data[start + len(some) :]


def _sound(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the data of a chunk of a PNG and mend its checksum, so that it is read at all."""
    if not data.startswith(b"\x89PNG") or len(data) < 33:
        return _flipped(random, data, others)
    chunks, at = [], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        if at + 12 + size > len(data):
            break
        chunks.append((at, size))
        at += 12 + size
    if not chunks:
        return data
    at, size = random.choice(chunks)
    body = data[at + 4 : at + 8] + _header(random, data[at + 8 : at + 8 + size], others)
    return data[: at + 4] + body + struct.pack(">I", zlib.crc32(body)) + data[at + 12 + size :]


def _unknown(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Add a field of any number and wire type, groups included."""
    number, kind = random.choice((1, 2, 3, 7, 15, 16, 1000, (1 << 29) - 1)), random.randrange(8)
    value = random.choice((varint(random.choice(_VARINTS)), random.randbytes(random.randrange(1, 12))))
    return _put(random, data, varint(number << 3 | kind) + value)


def _huge(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Add a field that says to be longer than the message."""
    number = random.randrange(1, 8)
    return _put(random, data, varint(number << 3 | 2) + varint(random.choice(_VARINTS)))


def _nested(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Put a field into itself, many times: a filter that is negated, a list of lists."""
    number, inner = random.randrange(1, 8), random.choice(others)[:40]
    for _ in range(random.choice((3, 31, 99, 101, 400))):
        inner = varint(number << 3 | 2) + varint(len(inner)) + inner
    return _put(random, data, inner)


def _text(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Add a text that is no UTF-8, is odd, or is long, to a field that may want one."""
    text = random.choice(_TEXTS)
    return _put(random, data, varint(random.randrange(1, 9) << 3 | 2) + varint(len(text)) + text)


def _twice(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Say everything again, or something else as well: the last word counts, lists grow, one-ofs clash."""
    return data + random.choice((data, *others)) * random.choice((1, 1, 1, 300))


def _put(random: Random, data: bytes, field: bytes) -> bytes:
    return random.choice((data + field, field + data))


_ANY: Final[tuple[Change, ...]] = (_truncated, _flipped, _length, _spliced, _removed, _repeated, _inserted)
_IMAGE: Final[tuple[Change, ...]] = (*_ANY, _header, _header, _zeroed, _sound, _sound)
_MESSAGE: Final[tuple[Change, ...]] = (
    *_ANY,
    _unknown,
    _unknown,
    _huge,
    _nested,
    _nested,
    _text,
    _text,
    _twice,
)
