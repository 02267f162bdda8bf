"""When the index of a gallery is made anew by itself, and how much of the machine that takes."""

from dataclasses import dataclass

from serving.cores import usable_cores
from serving.gallery.store.transaction import State

__all__ = ["RebuildPolicy"]


@dataclass(frozen=True, slots=True)
class RebuildPolicy:
    """When the index is made anew without being asked for, and how much of the machine that takes.

    Attributes:
        least: Changes below which it never is; items up to here are searched in a plain matrix.
        share: The part of the index's items that may have changed before it is.
        most: New items above which it is, however large the index.
        automatic: Whether it is at all.
        threads: How many threads it takes, at lowered priority where there is one for a thread; 0 stands
            for half the cores.
    """

    least: int = 4096
    share: float = 0.1
    most: int = 32_768
    automatic: bool = True
    threads: int = 0

    def is_due(self, state: State) -> bool:
        """Tell whether so much is newer than the index, or deleted from it, that searches are slowed."""
        fresh = state.last_seq - state.covers_seq
        return fresh > max(self.least, min(self.most, self.share * state.index_count)) or self.is_worn(state)

    def is_worn(self, state: State) -> bool:
        """Tell whether so much was deleted since the index was built whole that it must be again."""
        removed = state.last_removal - state.covers_removal
        return removed > max(self.least, self.share * state.index_count)

    @property
    def background_threads(self) -> int:
        """How many threads a rebuild that nobody waits for takes."""
        return self.threads or max(1, usable_cores() // 2)
