"""What a contender is: something that stores items, is opened, and finds the nearest of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHARDS", "Built", "Contender", "key_of", "shard_of"]

SHARDS = 100
"""Items bear the field `shard`, 0 to 99, so that `shard < 10` lets a tenth of them through."""


@dataclass(frozen=True)
class Built:
    """What storing all items took."""

    load_seconds: float
    """Until all were stored."""
    index_seconds: float
    """Until the index over them was made, beyond that."""
    about: str = ""
    """What was built, where the contender chose it."""


class Contender(Protocol):
    """Items are numbered from 0; each has a key and a shard by its number, and a unit vector."""

    ladder: Sequence[int]
    """Values of its search parameter, the fastest first; empty where it has set it itself."""

    def build(self, vectors: NDArray[np.float32]) -> Built:
        """Store the items of vectors (n, d) and index them, on disk; called in a process of its own."""

    def open(self) -> None:
        """Open what another process has built."""

    def set(self, value: int) -> None:
        """Search with this value of the ladder from now on."""

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        """Find the numbers of the k nearest items to each query (Q, d); only those whose shard is below."""

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        """Store more items (m, d), numbered from `first`, and delete some, without indexing anew."""

    def servers(self) -> Sequence[int]:
        """Return the ids of processes that work for this one and are none of its children."""

    def close(self) -> None:
        """Let go of what is open."""


def key_of(number: int) -> str:
    """Return the key of an item."""
    return f"item/{number:08d}"


def shard_of(number: int) -> int:
    """Return the shard of an item, which has nothing to do with where its vector lies."""
    return number * 7919 % SHARDS
