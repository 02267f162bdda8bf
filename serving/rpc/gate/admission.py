"""Permits: how many inputs, and how many bytes, may be on their way through the server at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import Draining, Overloaded
from serving.rpc.limits import MAX_BYTES_IN_FLIGHT

__all__ = ["Admission"]

SMOOTHING = 0.1
SHORTEST_RETRY, LONGEST_RETRY = 0.05, 5.0


class Admission:
    """Counts inputs and bytes in flight, not calls, so that a call that holds many cannot pass by the limits.

    Every call is received, which counts its message before anything is unpacked, and then admitted with the
    inputs that it turned out to hold. Both refuse at once rather than let a call wait. Belongs to one event
    loop; takes no lock.
    """

    def __init__(self, most_inputs: int, most_bytes: int = MAX_BYTES_IN_FLIGHT) -> None:
        """Set the limits; each must be at least what the largest call needs, which else is never admitted.

        Args:
            most_inputs: Most inputs in flight.
            most_bytes: Most bytes of the messages in flight.

        Raises:
            ValueError: if a limit is below 1.
        """
        if most_inputs < 1 or most_bytes < 1:
            raise ValueError(f"a limit of {most_inputs} inputs and {most_bytes} bytes admits nothing")
        self.most_inputs, self.most_bytes = most_inputs, most_bytes
        self.inputs = 0
        self.bytes = 0
        self.draining = False
        self._usual_stay = SHORTEST_RETRY

    @contextmanager
    def receive(self, size: int) -> Iterator[None]:
        """Account for the bytes of a call's message while the block runs.

        Raises:
            Draining: if the server is stopping.
            Overloaded: if there is no room for so many bytes now.
        """
        if self.draining:
            raise Draining("The server is stopping and takes no new work; try another one.")
        if self.bytes + size > self.most_bytes:
            raise self._full(f"{self.bytes:,} of at most {self.most_bytes:,} bytes", f"{size:,} more")
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size

    @contextmanager
    def admit(self, inputs: int = 1) -> Iterator[None]:
        """Hold a permit for each input while the block runs; a call without inputs holds one.

        Raises:
            Overloaded: if too many inputs are in flight now.
        """
        if self.inputs + inputs > self.most_inputs:
            raise self._full(f"{self.inputs} of at most {self.most_inputs} inputs", f"{inputs} more")
        self.inputs += inputs
        began = time.monotonic()
        try:
            yield
        finally:
            self.inputs -= inputs
            # A place becomes free about when a call of usual length ends, so that is when to come back.
            self._usual_stay += SMOOTHING * (time.monotonic() - began - self._usual_stay)

    def _full(self, taken: str, wanted: str) -> Overloaded:
        return Overloaded(
            f"{taken} are in flight, {wanted} do not fit; try again later.",
            retry_after=min(max(self._usual_stay, SHORTEST_RETRY), LONGEST_RETRY),
        )
