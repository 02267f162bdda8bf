"""A table of distinct strings, sorted, that can lie in a mapped file."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Texts"]


class Texts(Sequence[str]):
    """Distinct strings, ascending by code points; each is decoded when it is asked for."""

    def __init__(self, ends: NDArray[np.int64], content: NDArray[np.uint8]) -> None:
        """Take the strings' UTF-8 one after the other, uint8 (b,), and where each ends, int64 (t,)."""
        self.ends = ends
        self.content = content

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Return the table of `texts`, which are ascending.

        Raises:
            UnicodeEncodeError: One holds a lone surrogate.
        """
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        return cls(ends, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        start = int(self.ends[at - 1]) if at else 0
        return self.content[start : int(self.ends[at])].tobytes().decode()

    def find(self, text: str) -> int | None:
        """Return the place of a string, or None where it is not in the table."""
        place = bisect_left(self, text)
        return place if place < len(self) and self[place] == text else None
