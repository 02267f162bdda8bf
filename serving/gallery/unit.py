"""What vectors a gallery takes: finite numbers, of the model's dimension, of unit norm."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import InvalidArgument

__all__ = ["floats", "unit", "unit_rows"]

_NORM_TOLERANCE = 1e-3  # a half-precision model is off by less
_NUMBERS = "biufO"  # kinds of NumPy's; of an object, each value is asked for its own
_EXACT_TOLERANCE = 1e-6  # within it the bits are kept, so storing what was read changes nothing


def unit_rows(vectors: ArrayLike, *, dimension: int) -> NDArray[np.float32]:
    """Check query vectors (Q, d) and bring them to unit norm.

    A norm that differs from 1 by more than 1e-3 is refused rather than mended: it shows that the vector is
    not an embedding of the model. Smaller differences (half precision, other sums) are divided out.

    Returns:
        float32 (Q, d), rows of unit norm.

    Raises:
        InvalidArgument: The shape is another, or a row is not finite or not of unit norm.
    """
    rows = _floats(vectors, "the query vectors")
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise InvalidArgument(f"the query vectors have shape {rows.shape}; expected (queries, {dimension})")
    return unit(rows, lambda row: f"query vector {row}" if len(rows) > 1 else "query vector")


def floats(vector: ArrayLike, what: str, *, dimension: int) -> NDArray[np.floating[Any]]:
    """Return one vector as float32 or float64 (d,), its norm not looked at yet.

    Raises:
        InvalidArgument: It is of another shape, or no numbers; `what` is named.
    """
    row = _floats(vector, what)
    if row.shape != (dimension,):
        raise InvalidArgument(f"{what} has shape {row.shape}; expected ({dimension},) in this gallery")
    return row


def unit(rows: NDArray[np.floating[Any]], name: Callable[[int], str]) -> NDArray[np.float32]:
    """Bring rows (n, d) to unit norm, as `unit_rows` does.

    Returns:
        float32 (n, d), each the same in whichever company it comes.

    Raises:
        InvalidArgument: A row is not finite or not of unit norm; `name` says what it is.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))  # (n,)
        off = np.abs(norms - 1.0)
    for row in np.flatnonzero(~(off <= _NORM_TOLERANCE))[:1]:  # the negation also finds NaN
        if not np.isfinite(rows[row]).all():
            raise InvalidArgument(f"{name(row)} holds a value that is not finite; send finite numbers")
        raise InvalidArgument(
            f"{name(row)} has norm {norms[row]:.6g}; expected unit norm to within {_NORM_TOLERANCE}: "
            "divide the vector by its norm"
        )
    exact = off <= _EXACT_TOLERANCE
    if exact.all():
        return rows.astype(np.float32, order="C")
    scale = np.where(exact, 1.0, norms)[:, None]
    return np.ascontiguousarray(rows / scale, dtype=np.float32)


def _floats(values: ArrayLike, what: str) -> NDArray[np.floating[Any]]:
    try:
        array = np.asarray(values)
        if array.dtype.kind not in _NUMBERS:
            raise InvalidArgument(f"expected real numbers in {what}, found {array.dtype}")
        # float16 cannot hold the norm to the tolerance, float64 may arrive from Python lists.
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"expected numbers in {what}, found {type(values).__name__}") from error
