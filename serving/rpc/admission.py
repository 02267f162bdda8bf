"""Permits: how many images may be on their way through the server at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import Draining, InvalidArgument, Overloaded

__all__ = ["Admission"]

SMOOTHING = 0.1
SHORTEST_RETRY, LONGEST_RETRY = 0.05, 5.0


class Admission:
    """Counts inputs in flight, not calls, so that a call with many images cannot pass by the limit.

    Belongs to one event loop; takes no lock.
    """

    def __init__(self, limit: int) -> None:
        """Set the limit.

        Args:
            limit: Most inputs in flight.

        Raises:
            ValueError: if the limit is below 1.
        """
        if limit < 1:
            raise ValueError(f"a limit of {limit} inputs in flight admits nothing")
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self._usual_stay = SHORTEST_RETRY

    @contextmanager
    def admit(self, inputs: int) -> Iterator[None]:
        """Hold a permit for each input while the block runs; refuses at once rather than wait.

        Raises:
            Draining: if the server is stopping.
            InvalidArgument: if the call could never be admitted.
            Overloaded: if too many inputs are in flight now; tells when to try again.
        """
        if self.draining:
            raise Draining("The server is stopping and takes no new work; try another one.")
        if inputs > self.limit:
            raise InvalidArgument(
                f"The call holds {inputs} inputs and this server takes at most {self.limit} at a time; "
                "split it into several calls."
            )
        if self.in_flight + inputs > self.limit:
            raise Overloaded(
                f"{self.in_flight} of at most {self.limit} inputs are in flight, {inputs} more do not fit; "
                "try again later.",
                retry_after=min(max(self._usual_stay, SHORTEST_RETRY), LONGEST_RETRY),
            )
        self.in_flight += inputs
        began = time.monotonic()
        try:
            yield
        finally:
            self.in_flight -= inputs
            # A place becomes free about when a call of usual length ends, so that is when to come back.
            self._usual_stay += SMOOTHING * (time.monotonic() - began - self._usual_stay)
