"""A line for each write: who did what to which gallery, and what came of it."""

from typing import Any

__all__ = ["Audit"]


class Audit:
    """Writes the lines."""

    def record(self, rpc: str, request: Any, code: str, *, peer: str) -> None:
        """Note a write that has ended, well or not; other calls are passed over.

        Args:
            rpc: Service and method, such as `GalleryService/UpsertItems`.
            request: Its message; None if that could not be read.
            code: Name of the status that it ended with.
            peer: Where it came from.
        """
