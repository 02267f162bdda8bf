"""What MATLAB's .mat files hold (versions 5 to 7), as far as lists of images are made of it.

Not by SciPy: its reader can end the whole process on a file of which one byte is damaged, where this one
raises. The form is that of MathWorks' "MAT-File Format": elements, each a tag of type and size before its
bytes, and arrays that are elements of elements.
"""

import math
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from serving.errors import BadData

__all__ = ["read_arrays"]

_MOST_BYTES: Final = 1 << 26  # of the file; the published ones have less than 1 MiB
_MOST_UNPACKED: Final = 1 << 28
_DEEPEST: Final = 8  # arrays within arrays
_MATRIX, _PACKED = 14, 15  # types of elements
_CELL, _STRUCT, _CHAR, _NUMBERS = 1, 2, 4, range(6, 16)  # classes of arrays
_MOST_NUMBERS: Final = 1 << 20
_CODES: Final = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}


def read_arrays(path: Path, needed: Collection[str]) -> dict[str, Any]:
    """Read the named arrays of a file.

    Returns:
        By name: a string for characters, a list of numbers, a list of values for cells, a list of dicts of
        values for structs; elements in MATLAB's order, columns first, and without their shape.

    Raises:
        BadData: Not readable, too large, damaged, of another version, or without an array that is needed.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadData(f"{path} is larger than {_MOST_BYTES >> 20} MiB; take the published file")
        data = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order and struct.unpack_from(f"{order}H", data, 124)[0] == 0x0200:
        raise BadData(
            f"{path} is a .mat file of version 7.3, which cannot be read; take the published file, or save it"
            " with -v7"
        )
    found = dict[str, Any]()
    try:
        if not order:
            raise ValueError("no head of a .mat file")
        at = 128
        while at < len(data):
            kind, content, at = _element(memoryview(data), at, order)
            if kind == _PACKED:
                kind, content, _ = _element(_unpacked(content), 0, order)
            if kind == _MATRIX:
                name, value = _array(content, order, needed)
                found[name] = value
    except (ValueError, struct.error, zlib.error) as error:
        found_out = f" ({error})" if type(error) is ValueError else ""  # the others' words are of Python
        raise BadData(f"{path} is damaged or no .mat file{found_out}; take the published file") from error
    if lacking := [name for name in needed if name not in found]:
        raise BadData(f"{path} has no {' and no '.join(lacking)}; take the published file")
    return {name: found[name] for name in needed}


def _element(data: memoryview, at: int, order: str) -> tuple[int, memoryview, int]:
    """Return the type and the bytes of the element at a place, and the place of the next."""
    kind, size = struct.unpack_from(f"{order}II", data, at)
    if kind >> 16:  # a small one: the size is in the first half of the type, the bytes are where it would be
        kind, size, start, after = kind & 0xFFFF, kind >> 16, at + 4, at + 8
    else:
        start = at + 8
        after = start + (size if kind == _PACKED else -(-size // 8) * 8)
    if start + size > min(after, len(data)):
        raise ValueError(f"an element at byte {at} is longer than what it is in")
    return kind, data[start : start + size], after


def _unpacked(content: memoryview) -> memoryview:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(content, _MOST_UNPACKED)
    if not unpacker.eof:  # which the check sum is found at, too
        raise ValueError(f"an array is cut off, or larger than {_MOST_UNPACKED >> 20} MiB")
    return memoryview(data)


def _array(
    data: memoryview, order: str, needed: Collection[str] | None = None, depth: int = 0
) -> tuple[str, Any]:
    """Return the name and the value of an array; no value where the name is not one that is needed."""
    if not data:
        return "", []
    if depth > _DEEPEST:
        raise ValueError(f"arrays lie within each other more than {_DEEPEST} deep")
    _, flags, at = _element(data, 0, order)
    _, shape, at = _element(data, at, order)
    _, letters, at = _element(data, at, order)
    name = bytes(letters).decode("latin-1")
    if needed is not None and name not in needed:
        return name, None
    kind = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    count = math.prod(struct.unpack(f"{order}{len(shape) // 4}I", shape))
    if kind == _CELL:
        return name, _arrays(data, at, order, count, depth)
    if kind == _STRUCT:
        return name, _structs(data, at, order, count, depth)
    if kind == _CHAR or kind in _NUMBERS:
        type_, content, _ = _element(data, at, order)
        return name, _characters(type_, content, order) if kind == _CHAR else _numbers(type_, content, order)
    raise ValueError(f"an array is of the class {kind}, which is none that is read")


def _structs(data: memoryview, at: int, order: str, count: int, depth: int) -> list[dict[str, Any]]:
    _, width, at = _element(data, at, order)
    _, letters, at = _element(data, at, order)
    (step,) = struct.unpack(f"{order}I", width)
    if not step or len(letters) % step:
        raise ValueError("the names of an array's fields are cut off")
    names = [
        bytes(letters[start : start + step]).partition(b"\0")[0].decode("latin-1")
        for start in range(0, len(letters), step)
    ]
    values = _arrays(data, at, order, count * len(names), depth)
    return [
        dict(zip(names, values[i : i + len(names)], strict=True)) for i in range(0, len(values), len(names))
    ]


def _arrays(data: memoryview, at: int, order: str, count: int, depth: int) -> list[Any]:
    """Return the values of so many arrays, one after the other."""
    if count > len(data) // 8:  # each has a tag
        raise ValueError(f"an array says that it has {count} elements, for which it has no room")
    values = []
    for _ in range(count):
        kind, content, at = _element(data, at, order)
        if kind != _MATRIX:
            raise ValueError(f"an element of an array is of the type {kind}, which is no array")
        values.append(_array(content, order, depth=depth + 1)[1])
    return values


def _numbers(kind: int, content: memoryview, order: str) -> list[float]:
    if kind not in _CODES:
        raise ValueError(f"numbers are of the type {kind}, which is none that is known")
    code = _CODES[kind]
    if len(content) > _MOST_NUMBERS * struct.calcsize(code):
        raise ValueError(f"an array has more than {_MOST_NUMBERS:,} numbers, and no list is that long")
    return list(struct.unpack(f"{order}{len(content) // struct.calcsize(code)}{code}", content))


def _characters(kind: int, content: memoryview, order: str) -> str:
    ends = "utf-16-le" if order == "<" else "utf-16-be"
    encoding = {1: "latin-1", 2: "latin-1", 4: ends, 16: "utf-8", 17: ends}.get(kind)
    if encoding is None:
        raise ValueError(f"characters are of the type {kind}, which is none that is known")
    return bytes(content).decode(encoding)
