"""Permits: how many inputs, and how many bytes, may be on their way through the server at once."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from math import ceil

from serving.errors import Draining, Overloaded
from serving.observability.call import Call
from serving.rpc.limits import MAX_BYTES_IN_FLIGHT, MAX_MESSAGE_BYTES

__all__ = ["LIMITS", "Admission"]

LIMITS = ("inputs", "bytes", "client_inputs", "client_bytes")
"""What a call may be refused for."""

SMOOTHING = 0.1
SHORTEST_RETRY, LONGEST_RETRY = 0.05, 5.0  # seconds


class Admission:
    """Counts inputs and bytes in flight, not calls: one with many inputs cannot pass by the limits.

    Refuses at once rather than let a call wait. A client, known by the name of his key, may have a limit
    below the common one, so that when he is at it there is room for others.
    """

    def __init__(
        self,
        most_inputs: int,
        most_bytes: int = MAX_BYTES_IN_FLIGHT,
        *,
        most_a_client: int = 0,
        refused: Callable[[str], None] = lambda limit: None,
    ) -> None:
        """Set the limits; each must be at least what the largest call needs.

        Of the inputs one client may have `most_a_client`, and the same share of the bytes, yet room for one
        message; 0 for no limit of his own. `refused` is told which of `LIMITS` a call was refused for.
        """
        self.most_inputs, self.most_bytes = most_inputs, most_bytes
        self.most_a_client = most_a_client or most_inputs
        share = most_bytes * self.most_a_client // most_inputs
        self._most_bytes_a_client = max(share, min(most_bytes, MAX_MESSAGE_BYTES))
        self.inputs = self.bytes = 0
        self.draining = False
        self._inputs_of = Counter[str]()
        self._bytes_of = Counter[str]()
        self._refused = refused
        self._usual_stay = SHORTEST_RETRY
        self._lock = threading.Lock()

    def check_room(self, client: str, inputs: int = 1) -> None:
        """Raise, before a message is received, what a call with so many inputs would be refused for."""
        self._check_open()
        if inputs:
            self._check_inputs(client, inputs)

    def receive(self, call: Call, size: int) -> None:
        """Account for the bytes of a call's message, until it is released; raises where there is no room."""
        self._check_open()
        with self._lock:
            held = self._bytes_of[call.client]
            if self.bytes + size > self.most_bytes:
                raise self._full("bytes", f"{self.bytes:,} of at most {self.most_bytes:,} bytes", size)
            if held + size > self._most_bytes_a_client:
                most = f"{self._most_bytes_a_client:,} bytes of the key {call.client}"
                raise self._full("client_bytes", f"{held:,} of at most {most}", size)
            self.bytes += size
            self._bytes_of[call.client] += size
            call.bytes += size

    def admit(self, call: Call, inputs: int = 1) -> None:
        """Hold a permit for each input until the call is released; a call without inputs holds one.

        Not for a call that goes on for minutes: it would make the others come back too late.
        """
        with self._lock:
            self._check_inputs(call.client, inputs)
            self.inputs += inputs
            self._inputs_of[call.client] += inputs
            call.inputs += inputs
            call.admitted = time.monotonic()

    def release(self, call: Call) -> None:
        """Give back all that a call holds, once."""
        with self._lock:
            self.inputs -= call.inputs
            self.bytes -= call.bytes
            for held, amount in ((self._inputs_of, call.inputs), (self._bytes_of, call.bytes)):
                held[call.client] -= amount
                if not held[call.client]:  # names of the past take no room
                    del held[call.client]
            if call.inputs:
                # A place becomes free about when a call of usual length ends: that is when to come back.
                self._usual_stay += SMOOTHING * (time.monotonic() - call.admitted - self._usual_stay)

    def _check_open(self) -> None:
        if self.draining:
            raise Draining("The server is stopping and takes no new work; try another one.")

    def _check_inputs(self, client: str, inputs: int) -> None:
        if self.inputs + inputs > self.most_inputs:
            raise self._full("inputs", f"{self.inputs} of at most {self.most_inputs} inputs", inputs)
        held = self._inputs_of.get(client, 0)
        if held + inputs > self.most_a_client:
            most = f"{self.most_a_client} inputs of the key {client}"
            raise self._full("client_inputs", f"{held} of at most {most}", inputs)

    def _full(self, limit: str, taken: str, wanted: int) -> Overloaded:
        self._refused(limit)
        # In steps, so that one answer serves for many refusals.
        steps = max(1, ceil(self._usual_stay / SHORTEST_RETRY))
        return Overloaded(
            f"{taken} are in flight, and there is no room for {wanted:,} more; try again later.",
            retry_after=min(steps * SHORTEST_RETRY, LONGEST_RETRY),
        )
