"""What users of the Python client hand in, checked before anything is sent."""

import math
import operator
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from numbers import Real
from os import PathLike, fspath
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import BadImage, InvalidArgument
from serving.rpc.limits import MAX_EXCLUDED, MAX_K, MAX_MESSAGE_BYTES

__all__ = [
    "ImageFile",
    "ImageLike",
    "at_hand",
    "check_k",
    "check_number",
    "check_score",
    "check_version",
    "check_whole",
    "excluded",
    "floats_of",
    "image_bytes",
    "many",
    "text",
    "texts",
]


class ImageFile(Protocol):
    """A file opened in binary mode, or what reads like one: an upload, a response, a member of an archive."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes at most, none at the end."""


ImageLike: TypeAlias = bytes | bytearray | memoryview | str | PathLike[str] | ImageFile
"""The bytes of an image file, where it lies, or the open file, which is read from where it stands."""

# A whole image must fit a message with its key and metadata; what the server reads is less.
_MOST_BYTES = MAX_MESSAGE_BYTES - 2**20


def many(values: Iterable[Any], what: str) -> Iterator[Any]:
    """Go through several values, and refuse a single one that happens to have parts.

    Raises:
        InvalidArgument: if it is a string, bytes, a path, a file, a mapping, or nothing that has elements.
    """
    single = isinstance(values, str | bytes | bytearray | memoryview | PathLike | Mapping)
    single = single or hasattr(values, "read")  # a file would give its lines
    try:
        if not single:
            return iter(values)
    except TypeError:
        pass
    raise InvalidArgument(
        f"{what} must be a list; found {type(values).__name__}. Put a single one in brackets: {what}=[...]."
    )


def at_hand(values: Any) -> bool:
    """Whether going through some inputs neither reads a file nor runs code of the caller's."""
    return isinstance(values, list | tuple) and all(
        isinstance(getattr(each, "image", each), bytes | bytearray | memoryview | None) for each in values
    )


def text(value: str, what: str) -> str:
    """Check that a value is a string that can be sent.

    Raises:
        InvalidArgument: if it is not a string, or holds a lone surrogate.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a string; found {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} {value[:80]!a} is not valid Unicode: {error.reason}.") from error
    return value


def texts(values: Iterable[str], what: str) -> Iterator[str]:
    """Go through several strings, and check each when its turn comes.

    Raises:
        InvalidArgument: at once, if they are no list; later, if one cannot be sent.
    """
    return (text(value, f"{what}[{i}]") for i, value in enumerate(many(values, what)))


def excluded(values: Iterable[str]) -> list[str]:
    """Check the keys that a search leaves out.

    Raises:
        InvalidArgument: if they are no list of strings, or too many.
    """
    keys = list(texts(values, "exclude"))
    if len(keys) > MAX_EXCLUDED:
        raise InvalidArgument(f"exclude has {len(keys)} keys; a search takes at most {MAX_EXCLUDED:,}.")
    return keys


def check_k(k: int) -> int:
    """Check a number of neighbours.

    Raises:
        InvalidArgument: if it is not a whole number from 1 to `MAX_K`.
    """
    try:
        number = operator.index(k)
    except TypeError as error:
        raise InvalidArgument(f"k must be a whole number; found {type(k).__name__}.") from error
    if isinstance(k, bool) or not 1 <= number <= MAX_K:
        raise InvalidArgument(f"k cannot be {k}; it must be from 1 to {MAX_K:,}.")
    return number


def check_score(score: float | None) -> float | None:
    """Check a least score.

    Raises:
        InvalidArgument: if it is not a number from -1 to 1.
    """
    return None if score is None else check_number(score, "minimum_score", least=-1)


def check_number(number: float, what: str, *, least: float, most: float = 1) -> float:
    """Check a number.

    Raises:
        InvalidArgument: if it is not one from `least` to `most`.
    """
    if not isinstance(number, Real) or isinstance(number, bool):
        raise InvalidArgument(f"{what} must be a number; found {type(number).__name__}.")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not least <= value <= most:  # the negation also finds NaN
        raise InvalidArgument(f"{what} cannot be {value}; it must lie between {least} and {most:,}.")
    return value


def check_whole(number: int, what: str, *, most: int) -> int:
    """Check a whole number.

    Raises:
        InvalidArgument: if it is not one from 0 to `most`.
    """
    try:
        value = operator.index(number)
    except TypeError as error:
        raise InvalidArgument(f"{what} must be a whole number; found {type(number).__name__}.") from error
    if isinstance(number, bool) or not 0 <= value <= most:
        raise InvalidArgument(f"{what} cannot be {number}; it must be from 0 to {most:,}.")
    return value


def check_version(version: int, what: str) -> int:
    """Check the version that an item is expected to have.

    Raises:
        InvalidArgument: if it is not a whole number of 0 or more that can be sent.
    """
    return check_whole(version, what, most=2**64 - 1)


def floats_of(values: ArrayLike, what: str, shape: str) -> NDArray[np.float32]:
    """Read an array of numbers.

    Args:
        values: Whatever NumPy makes an array of.
        what: How it is called in a message.
        shape: Its axes, as "(queries, components)".

    Returns:
        float32 with as many axes.

    Raises:
        InvalidArgument: if it holds no real numbers, or has other axes.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(f"{what} must be an array of numbers {shape}: {error}.") from error
    if array.dtype.kind not in "fiub":
        raise InvalidArgument(
            f"{what} must be an array of numbers {shape}; found {type(values).__name__} of {array.dtype}."
        )
    if array.ndim != shape.count(",") + (not shape.endswith(",)")):
        raise InvalidArgument(f"{what} has shape {array.shape}; expected {shape}.")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def image_bytes(image: ImageLike) -> bytes:
    """Read an image that may be on disk, if it is small enough to be sent.

    Raises:
        BadImage: if the file cannot be read or is too large.
        InvalidArgument: if it is neither bytes nor a path nor a file of bytes.
    """
    if type(image) is bytes:
        data, name = image, "The image"
    elif isinstance(image, bytes | bytearray | memoryview):
        data, name = bytes(image), "The image"
    elif isinstance(image, str | PathLike):
        name = f"The image {str(image)!r}"
        try:
            with open(fspath(image), "rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError) as error:  # a ValueError tells of a path with NUL in it
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadImage(f"{name} cannot be read ({reason}); check its path.") from error
    elif hasattr(image, "read"):
        data, name = _read(image), f"The image in {type(image).__name__}"
    else:
        raise InvalidArgument(
            "An image must be the bytes of an image file, its path, or the file opened in binary mode; found "
            f"{type(image).__name__}. Encode pixels first, as PNG for example."
        )
    if len(data) > _MOST_BYTES:
        raise BadImage(f"{name} is larger than the {_MOST_BYTES:,} bytes that can be sent; shrink it.")
    return data


def _read(file: ImageFile) -> bytes:
    """Read a file to its end, or a little more of it than can be sent; some give less at a time."""
    kind, parts, left = type(file).__name__, list[bytes](), _MOST_BYTES + 1
    while left > 0:
        try:
            part: Any = file.read(left)
        except (OSError, ValueError) as error:  # a ValueError tells of a file that was closed
            raise BadImage(f"The image in {kind} cannot be read ({error}); open it again.") from error
        if isinstance(part, Coroutine):
            part.close()
        if not isinstance(part, bytes):
            raise InvalidArgument(
                f"The image in {kind} reads as {type(part).__name__}; open the file in binary mode, or give "
                "the bytes (of an asynchronous file, `await file.read()`)."
            )
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
