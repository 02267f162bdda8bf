"""What callers hand in: images, arrays and lists, read and checked before anything is sent."""

from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import BadImage, InvalidArgument
from serving.rpc.limits import MAX_MESSAGE_BYTES

__all__ = ["MAX_IMAGE_BYTES", "ImageFile", "ImageLike", "floats", "image_bytes", "many"]


class ImageFile(Protocol):
    """A file opened in binary mode, or what reads like one: an upload, a response, a member of an archive."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes at most, none at the end."""


ImageLike: TypeAlias = bytes | bytearray | memoryview | str | PathLike[str] | ImageFile
"""The bytes of an image file, where it lies, or the open file, which is read from where it stands."""

MAX_IMAGE_BYTES = MAX_MESSAGE_BYTES - 2**20
"""Most bytes of an image that fits a message with its key and metadata; the server takes fewer."""


def many(values: Iterable[Any], what: str) -> Iterable[Any]:
    """Refuse a single value where several are wanted: a string, bytes, a path, an open file, a mapping."""
    single = isinstance(values, str | bytes | bytearray | memoryview | PathLike | Mapping)
    if single or hasattr(values, "read") or not isinstance(values, Iterable):
        found = f"found {type(values).__name__}. Put a single one in brackets: {what}=[...]"
        raise InvalidArgument(f"{what} must be a list; {found}.")
    return values


def floats(values: ArrayLike, what: str, axes: int) -> NDArray[np.float32]:
    """Read an array of real numbers with so many axes."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fiub" and array.ndim == axes:
            with np.errstate(over="ignore"):
                return array.astype(np.float32)
        found = f"{array.dtype} of shape {array.shape}"
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        found = f"{type(values).__name__} ({error})"
    raise InvalidArgument(f"{what} must be an array of numbers with {axes} axes; found {found}.")


def image_bytes(image: ImageLike) -> bytes:
    """Read an image that is small enough to be sent.

    Raises:
        BadImage: if its file cannot be read or is too large.
        InvalidArgument: if it is neither bytes nor a path nor a file of bytes.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        data, name = bytes(image), "The image"
    elif isinstance(image, str | PathLike):
        name = f"The image {str(image)!r}"
        try:
            with open(fspath(image), "rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        except (OSError, ValueError) as error:  # a ValueError tells of a path with NUL in it
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadImage(f"{name} cannot be read ({reason}); check its path.") from error
    elif hasattr(image, "read"):
        name = f"The image in {type(image).__name__}"
        data = _contents(image, name)
    else:
        raise InvalidArgument(
            "An image must be the bytes of an image file, its path, or the file opened in binary mode; found "
            f"{type(image).__name__}. Encode pixels first, as PNG for example."
        )
    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"{name} is larger than the {MAX_IMAGE_BYTES:,} bytes that can be sent; shrink it.")
    return data


def _contents(file: ImageFile, name: str) -> bytes:
    """Read a file to its end, or a little more of it than can be sent; some give less at a time."""
    data, part = bytearray(), b"..."
    while part and len(data) <= MAX_IMAGE_BYTES:
        try:
            part = file.read(MAX_IMAGE_BYTES + 1 - len(data))
        except (OSError, ValueError) as error:  # a ValueError tells of a file that was closed
            raise BadImage(f"{name} cannot be read ({error}); open it again.") from error
        if not isinstance(part, bytes):
            getattr(part, "close", bool)()  # a coroutine would warn that nobody awaited it
            raise InvalidArgument(
                f"{name} reads as {type(part).__name__}; open the file in binary mode, or give the bytes (of "
                "an asynchronous file, `await file.read()`)."
            )
        data += part
    return bytes(data)
