"""What a caller gives to a gallery: texts, numbers, metadata and vectors, each within its bounds.

Every check raises InvalidArgument and names what was given.
"""

import json
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import InvalidArgument

__all__ = [
    "MAX_METADATA_BYTES", "MAX_METADATA_LEVELS", "BadVector", "as_vector", "check_metadata",
    "check_text", "check_whole", "metadata_json", "normalize", "normalize_queries",
]  # fmt: skip

MAX_METADATA_BYTES = 65_536
MAX_METADATA_LEVELS = 30  # Protocol Buffers read 100 levels of messages; one of metadata takes up to three
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

_NORM_TOLERANCE = 1e-3  # a half-precision model is off by less
_EXACT_TOLERANCE = 1e-6  # within it the bits are kept, so storing what was read changes nothing


class BadVector(InvalidArgument):
    """A vector is no embedding: not finite, or not of unit norm; `row` is its place among those given."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


def check_text(text: str, what: str, *, least: int, most: int) -> str:
    """Return a text of so many bytes of UTF-8 and without NUL."""
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
    """Return a whole number, of Python or NumPy, within bounds."""
    whole = operator.index(number)
    if not least <= whole <= most:
        raise InvalidArgument(f"{what} is {whole}; expected {least} to {most}")
    return whole


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check that metadata can travel: a mapping of few levels, whose numbers are within those of a double."""
    _check_value(metadata, MAX_METADATA_LEVELS)


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Return metadata, once it is checked, as the JSON object that is stored."""
    check_metadata(metadata)
    if not all(isinstance(name, str) for name in metadata):
        raise InvalidArgument("metadata must be a JSON object: every name in it must be a string")
    try:
        text = _JSON.encode(dict(metadata))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(f"metadata is {size} bytes of JSON; the limit is {MAX_METADATA_BYTES}")
    return text


def _check_value(value: Any, left: int) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise InvalidArgument("metadata holds a whole number larger than a double; write it as a string")
        return
    if not left:
        raise InvalidArgument(f"metadata is nested more than {MAX_METADATA_LEVELS} levels deep")
    for each in inner:
        _check_value(each, left - 1)


def normalize_queries(vectors: ArrayLike, *, dimension: int) -> NDArray[np.float32]:
    """Return query vectors (Q, d) as `normalize` does."""
    rows = _floats(vectors, "the query vectors")
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise InvalidArgument(f"the query vectors have shape {rows.shape}; expected (queries, {dimension})")
    return normalize(rows, lambda _: "query vector")


def as_vector(vector: ArrayLike, what: str, *, dimension: int) -> NDArray[np.floating[Any]]:
    """Return one vector as float32 or float64 (d,), its norm not looked at yet."""
    row = _floats(vector, what)
    if row.shape != (dimension,):
        raise InvalidArgument(f"{what} has shape {row.shape}; expected ({dimension},) in this gallery")
    return row


def normalize(rows: NDArray[np.floating[Any]], name: Callable[[int], str]) -> NDArray[np.float32]:
    """Bring rows (n, d) to unit norm; each comes out the same in whichever company it is.

    A norm that differs from 1 by more than 1e-3 is refused by BadVector rather than mended: it shows that the
    vector is not an embedding of the model. Smaller differences (half precision, other sums) are divided out.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))  # (n,)
        off = np.abs(norms - 1.0)
    for row in np.flatnonzero(~(off <= _NORM_TOLERANCE))[:1]:  # the negation also finds NaN
        if not np.isfinite(rows[row]).all():
            raise BadVector(f"{name(row)} holds a value that is not finite; send finite numbers", int(row))
        raise BadVector(
            f"{name(row)} has norm {norms[row]:.6g}; expected unit norm to within {_NORM_TOLERANCE}: "
            "divide the vector by its norm",
            int(row),
        )
    exact = off <= _EXACT_TOLERANCE
    if exact.all():
        return rows.astype(np.float32, order="C")
    return np.ascontiguousarray(rows / np.where(exact, 1.0, norms)[:, None], dtype=np.float32)


def _floats(values: ArrayLike, what: str) -> NDArray[np.floating[Any]]:
    try:
        array = np.asarray(values)
        # float16 cannot hold the norm to the tolerance, float64 may arrive from Python lists.
        return (
            array
            if array.dtype in (np.float32, np.float64)
            else array.astype(np.float32, casting="same_kind")
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"expected real numbers in {what}, found {type(values).__name__}") from error
