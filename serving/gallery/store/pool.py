"""Idle connections of a store, kept for the next transaction; one that has become stale is closed."""

import threading
from typing import Generic, Protocol, TypeVar

from serving.gallery.store.access import Access

__all__ = ["Pool"]


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Pool(Generic[C]):
    """Connections that were opened one way; every method is thread-safe."""

    def __init__(self, access: Access) -> None:
        self._guard = threading.Lock()  # of the three fields below
        self._access = access
        self._idle: list[C] = []
        self._keeping = True

    def take(self, access: Access) -> tuple[C | None, bool]:
        """Return a connection opened in that way, None where none is idle.

        Returns:
            It, and whether the way is another than the last one; all that were idle are closed then.
        """
        with self._guard:
            if access == self._access:
                return self._idle.pop() if self._idle else None, False
            stale, self._idle, self._access = self._idle, [], access
        for connection in stale:
            connection.close()
        return None, True

    def give_back(self, connection: C, access: Access) -> None:
        """Keep a connection that was opened in that way, or close it where it is of no more use."""
        with self._guard:
            if self._keeping and access == self._access:
                self._idle.append(connection)
                return
        connection.close()

    def keep_none(self) -> None:
        """Close every connection that is idle or comes back."""
        with self._guard:
            self._keeping = False
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
