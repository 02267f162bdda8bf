"""What the parts of the server tell of their work."""

from collections import Counter

from serving.observability.call import Call

__all__ = ["Metrics"]


class Metrics:
    """Takes note of nothing: for a server whose metrics nobody asked for, and the base of those that count.

    Every method is cheap, never fails, and may be called from any thread.
    """

    def __init__(self) -> None:
        self.in_flight = Counter[str]()
        """Calls on their way now, by RPC."""

    def began(self, call: Call) -> None:
        """Note that a call has come in."""

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "", late: bool = False) -> None:
        """Note that it has ended.

        Args:
            call: With all that was learned of it.
            code: Name of its status.
            seconds: From its message being there to its reply.
            reason: Of the error, as the caller reads it; empty when it went well or was given up.
            late: Whether its deadline has passed.
        """

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Note one run of a model on so many images."""
