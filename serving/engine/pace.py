"""How quick the searches of each gallery are: whether the event loop itself may answer one."""

__all__ = ["QUICK", "SLOW", "Pace"]

QUICK = 0.002
"""Seconds that a quick search takes at most."""
SLOW = 0.01
"""Seconds of one that must not hold up the event loop again; before that, a core may have been wanting."""
ENOUGH = 16
"""So many have to have been quick, one after the other."""
PENANCE = 1_000
"""Further ones that must be quick after one that was slow in the event loop."""
_MOST_GALLERIES = 1_024


class Pace:
    """Counts, of each gallery, how many searches were quick since the last slow one. Serves any thread.

    A hand-over to a thread and back costs about a third of a quick search. A search that turns out slow holds
    up the event loop once, and then its gallery's are left to threads for long.
    """

    def __init__(self) -> None:
        """Know nothing yet, so that threads come first."""
        self._quick: dict[str, int] = {}

    def is_quick(self, gallery: str) -> bool:
        """Tell whether the next search of a gallery will be quick, as far as can be told."""
        return self._quick.get(gallery, 0) >= ENOUGH

    def note(self, gallery: str, seconds: float, *, in_loop: bool) -> None:
        """Take up how long a search took, in a thread or in the event loop."""
        if seconds <= QUICK:
            self._quick[gallery] = min(ENOUGH, self._quick.get(gallery, 0) + 1)
        elif in_loop and seconds > SLOW:
            self._quick[gallery] = -PENANCE
        else:  # what is owed stays
            self._quick[gallery] = min(0, self._quick.get(gallery, 0))
        if len(self._quick) > _MOST_GALLERIES:
            self._quick.clear()
