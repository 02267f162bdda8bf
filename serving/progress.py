"""Progress of long work: a bar on a terminal, one line a minute elsewhere."""

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

__all__ = ["progress"]

T = TypeVar("T")


def progress(items: Iterable[T], label: str, *, total: int | None = None, unit: str = "it") -> "tqdm[T]":
    """Wrap `items` so that standard error shows the count, the rate and the time left.

    Args:
        items: What is worked through, one step an item; pass `()` and call `update(n)` for uneven steps.
        label: A word or two put in front.
        total: Number of steps, where `items` has no length.
        unit: What one step is, singular.

    Returns:
        An iterable over `items`, which is also a context manager with `update(n)`.
    """
    terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=label,
        total=total,
        unit=unit,
        file=sys.stderr,
        dynamic_ncols=terminal,
        mininterval=0.1 if terminal else 60.0,
        maxinterval=10.0 if terminal else 60.0,
        miniters=None if terminal else 1,
        leave=True,
    )
