"""What callers hand in: images, arrays and lists, read, checked and cut into calls of a bounded size."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.client.connection import Request, faults_of
from serving.errors import BadImage, CrossbatchError, InvalidArgument
from serving.rpc.limits import MAX_INPUTS, MAX_MESSAGE_BYTES

__all__ = ["IN_FLIGHT", "BulkRequest", "ImageFile", "ImageLike", "Part", "floats", "image_bytes", "many"]


class ImageFile(Protocol):
    """A file opened in binary mode, or what reads like one: an upload, a response, a member of an archive."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes at most, none at the end."""


ImageLike: TypeAlias = bytes | bytearray | memoryview | str | PathLike[str] | ImageFile
"""The bytes of an image file, where it lies, or the open file, which is read from where it stands."""

MAX_IMAGE_BYTES = MAX_MESSAGE_BYTES - 2**20  # a message has room for a key and metadata beside it
CHUNK_BYTES = MAX_MESSAGE_BYTES // 2 - 65_536
"""Bytes that the inputs of one call do not pass, unless one alone does."""
IN_FLIGHT = 4
"""Most calls of one long operation that are on their way at once."""


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
    """Read an image that is small enough to be sent; what cannot be read or is too large is a BadImage."""
    name = f"The image in {type(image).__name__}"
    try:
        if isinstance(image, bytes | bytearray | memoryview):
            name, data = "The image", bytes(image)
        elif isinstance(image, str | PathLike):
            name = f"The image {str(image)!r}"
            with open(image, "rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        elif hasattr(image, "read"):
            data = _contents(image, name)
        else:
            raise InvalidArgument(
                "An image must be the bytes of an image file, its path, or the file opened in binary mode; "
                f"found {type(image).__name__}. Encode pixels first, as PNG for example."
            )
    except (OSError, ValueError) as error:  # a ValueError tells of a closed file, or a path with NUL in it
        reason = getattr(error, "strerror", None) or error
        raise BadImage(f"{name} cannot be read ({reason}); check its path, or open it again.") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"{name} is larger than the {MAX_IMAGE_BYTES:,} bytes that can be sent; shrink it.")
    return data


def _contents(file: ImageFile, name: str) -> bytes:
    """Read a file to its end, or a little more of it than can be sent; some give less at a time."""
    data, part = bytearray(), b"..."
    while part and len(data) <= MAX_IMAGE_BYTES:
        part = file.read(MAX_IMAGE_BYTES + 1 - len(data))
        if not isinstance(part, bytes):
            getattr(part, "close", bool)()  # a coroutine would warn that nobody awaited it
            raise InvalidArgument(
                f"{name} reads as {type(part).__name__}; open the file in binary mode, or give the bytes (of "
                "an asynchronous file, `await file.read()`)."
            )
        data += part
    return bytes(data)


@dataclass(slots=True)
class Part:
    """One call for some inputs, the first of which is number `place`; `last` if none follow."""

    request: Request[list[Any]]
    place: int
    count: int
    last: bool
    call: Any = None


class BulkRequest:
    """Inputs of any number, in calls within the limits of one: each is `whole` with some of them in `field`.

    What fits one call is one. Of more, each is as much smaller as there may be calls on their way, so that
    all of them together are no more than one call's worth.
    """

    def __init__(
        self,
        whole: Request[list[Any]],
        field: str,
        inputs: Any,
        convert: Callable[[Any], Any],
        most: int = MAX_INPUTS,
        on_error: str = "raise",
    ) -> None:
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f"on_error cannot be {on_error!r}; it must be 'raise' or 'return'.")
        self.whole, self.field, self.inputs = whole, field, inputs
        self._convert, self._raising = convert, on_error == "raise"
        self._most, self._most_bytes, self._one = most, CHUNK_BYTES, True
        self._held, self._bytes, self._place = list[Any](), 0, 0

    def parts(self) -> Iterator[Part]:
        """Take the inputs as they are asked for, and cut them into calls."""
        for each in many(self.inputs, self.field):
            yield from self.add(each)
        yield from self.rest()

    def add(self, value: Any) -> Iterator[Part]:
        """Take one input; gives the calls that have no room for it."""
        return self._add(self._convert(value))

    def rest(self) -> Iterator[Part]:
        """Give the call that is left at the end, if any is."""
        if self._held:
            yield self._cut(last=True)

    def answers(self, part: Part, outcome: list[Any] | CrossbatchError) -> list[Any]:
        """Give each input of a call its answer, which may be an error.

        Raises:
            CrossbatchError: that of the call, unless it failed since all of its inputs are bad; or that of
                the first bad input, if errors are to be raised.
        """
        answers = outcome if isinstance(outcome, list) else self._blamed(part, outcome)
        for i, each in enumerate(answers, part.place):
            if isinstance(each, CrossbatchError):
                each.request_id = each.request_id or part.request.id
                if self._raising:
                    raise each.saying(f"input {i}: {each}") from each
        return answers

    def _add(self, each: Any) -> Iterator[Part]:
        size = len(each) if isinstance(each, bytes) else each.ByteSize()
        if self._held and (len(self._held) == self._most or self._bytes + size > self._most_bytes):
            if self._one:
                again, self._held, self._bytes, self._one = self._held, [], 0, False
                self._most, self._most_bytes = self._most // IN_FLIGHT, self._most_bytes // IN_FLIGHT
                for one in [*again, each]:
                    yield from self._add(one)
                return
            yield self._cut(last=False)
        self._held.append(each)
        self._bytes += size

    def _cut(self, *, last: bool) -> Part:
        whole, made = self.whole, type(self.whole.message)(**{self.field: self._held})
        made.MergeFrom(whole.message)
        # Made again after a lost reply, a conditional write would find itself and report a conflict.
        conditional = self.field == "items" and any(each.HasField("expected_version") for each in made.items)
        request = Request(whole.method, made, whole.read, repeatable=not conditional, id=whole.id)
        part = Part(request, self._place, len(self._held), last)
        self._place, self._held, self._bytes = self._place + part.count, [], 0
        return part

    def _blamed(self, part: Part, error: CrossbatchError) -> list[Any]:
        """Give each input its own error, if the server says that all of them are bad."""
        faults = faults_of(error)
        found = [re.fullmatch(rf"{self.field}\[(\d+)\](.*)", fault.field) for fault in faults]
        if not found or not all(found):
            raise error
        if self.field == "items" and found[0]:  # which are stored all or none
            place = f"items[{int(found[0][1]) + part.place}]{found[0][2]}"
            raise error.saying(f"{place}: {faults[0].error}") from error
        # A status has room for ten; it does not say why the others are bad.
        unnamed = error.saying("This input is bad, like all others of its call; send it alone to hear why.")
        return [*(fault.error for fault in faults), *[unnamed] * (part.count - len(faults))]
