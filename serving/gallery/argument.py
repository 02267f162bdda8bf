"""What a caller gives as a text or a number: of that kind, and within bounds."""

import operator
from numbers import Real
from typing import SupportsIndex

from serving.errors import InvalidArgument

__all__ = ["check_number", "check_text", "check_whole"]


def check_text(text: str, what: str, *, least: int, most: int) -> str:
    """Return a text of so many bytes of UTF-8 and without NUL.

    Raises:
        InvalidArgument: It is another, or none; `what` is named.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"the {what} must be a string, found {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the {what} {text[:80]!r} is not valid Unicode: {error.reason}") from error
    if "\0" in text:
        raise InvalidArgument(f"the {what} {text[:80]!r} holds a NUL character; take it out")
    if not least <= size <= most:
        shown = f"{text[:40]!r}... " if size > most else ""
        raise InvalidArgument(f"the {what} {shown}is {size} bytes of UTF-8; expected {least} to {most}")
    return text


def check_whole(number: SupportsIndex, what: str, *, least: int, most: int) -> int:
    """Return a whole number, of Python or NumPy, within bounds.

    Raises:
        InvalidArgument: It is another, or none; `what` is named.
    """
    try:
        whole = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        whole = None
    if whole is None:
        raise InvalidArgument(
            f"{what} is no whole number but a {type(number).__name__}; expected {least} to {most}"
        )
    if not least <= whole <= most:
        raise InvalidArgument(f"{what} is {whole}; expected {least} to {most}")
    return whole


def check_number(number: float, what: str) -> float:
    """Return a number, of Python or NumPy.

    Raises:
        InvalidArgument: It is none; `what` is named.
    """
    if not isinstance(number, Real):
        raise InvalidArgument(f"{what} must be a number, found {type(number).__name__}")
    return number
