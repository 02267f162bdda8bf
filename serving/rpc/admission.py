"""Permits: how many inputs, and how many bytes, may be on their way through the server at once."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil

from serving.errors import Draining, Overloaded
from serving.observability.call import current_call
from serving.rpc.access import identity
from serving.rpc.limits import MAX_BYTES_IN_FLIGHT, MAX_MESSAGE_BYTES

__all__ = ["Admission"]

SMALL_REPLY = 65_536
"""Bytes of a reply that is counted, yet never refused."""
SMOOTHING = 0.1
SHORTEST_RETRY, LONGEST_RETRY = 0.05, 5.0


class Admission:
    """Counts inputs and bytes in flight, not calls, so that a call that holds many cannot pass by the limits.

    Every call is received, which counts its message before anything is unpacked, and then admitted with the
    inputs that it turned out to hold. Both refuse at once rather than let a call wait. A client, told by the
    name of his key, may have a limit below the common one, so that when he is at it there is room for others.
    Belongs to one event loop; takes no lock.
    """

    def __init__(
        self, most_inputs: int, most_bytes: int = MAX_BYTES_IN_FLIGHT, *, most_a_client: int = 0
    ) -> None:
        """Set the limits; each must be at least what the largest call needs, which else is never admitted.

        Args:
            most_inputs: Most inputs in flight.
            most_bytes: Most bytes of the messages in flight, and as many of replies.
            most_a_client: Most inputs of one client, who then has the same share of the bytes, yet room for
                one message; 0 for no limit of his own.

        Raises:
            ValueError: if a limit is below 1.
        """
        if most_inputs < 1 or most_bytes < 1:
            raise ValueError(f"a limit of {most_inputs} inputs and {most_bytes} bytes admits nothing")
        self.most_inputs, self.most_bytes = most_inputs, most_bytes
        self.most_a_client = most_a_client or most_inputs
        share = most_bytes * self.most_a_client // most_inputs
        self._most_bytes_a_client = max(share, min(most_bytes, MAX_MESSAGE_BYTES))
        self.inputs = 0
        self.bytes = 0
        self.reply_bytes = 0
        self.refusals = Counter(inputs=0, bytes=0, client_inputs=0, client_bytes=0)
        """How many calls were refused by each limit; all told from the start, or the first is missed."""
        self._inputs_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._replies_of: Counter[str] = Counter()
        self.draining = False
        self._usual_stay = SHORTEST_RETRY

    @staticmethod
    def draining_error() -> Draining:
        """Make what a call is told that comes while the server stops."""
        return Draining("The server is stopping and takes no new work; try another one.")

    def check_open(self) -> None:
        """Find out whether the server takes calls.

        Raises:
            Draining: if it is stopping.
        """
        if self.draining:
            raise self.draining_error()

    def check_room(self) -> None:
        """Find out, before a message is received, whether a call with one input would be admitted.

        Raises:
            Draining: if the server is stopping.
            Overloaded: if it would not.
        """
        self.check_open()
        self._check_inputs(identity.get().name, 1, "any")  # how many it brings is not known yet

    @contextmanager
    def receive(self, size: int) -> Iterator[None]:
        """Account for the bytes of a call's message while the block runs.

        Raises:
            Draining: if the server is stopping.
            Overloaded: if there is no room for so many bytes now.
        """
        self.check_open()
        client = identity.get().name
        if self.bytes + size > self.most_bytes:
            taken = f"{self.bytes:,} of at most {self.most_bytes:,} bytes"
            raise self._full("bytes", taken, f"{size:,}")
        if self._bytes_of[client] + size > self._most_bytes_a_client:
            most = f"{self._most_bytes_a_client:,} bytes of the key {client}"
            taken = f"{self._bytes_of[client]:,} of at most {most}"
            raise self._full("client_bytes", taken, f"{size:,}")
        self.bytes += size
        self._bytes_of[client] += size
        try:
            yield
        finally:
            self.bytes -= size
            _give_back(self._bytes_of, client, size)

    def send(self, size: int, holder: str, *, must: bool = False) -> Callable[[], None]:
        """Account for the bytes of a reply until it has gone out; apart, or requests would cost replies.

        Args:
            size: Of the reply.
            holder: Who is to take it, whose replies may have half of the bytes, yet room for one.
            must: It goes out however many there are: what it tells of is done.

        Returns:
            What to call when it has gone out.

        Raises:
            Overloaded: if there is no room for so many bytes now.
        """
        held = self._replies_of[holder]
        if not must and size > SMALL_REPLY:
            most = max(self.most_bytes // 2, min(self.most_bytes, MAX_MESSAGE_BYTES))
            if self.reply_bytes + size > self.most_bytes:
                taken = f"{self.reply_bytes:,} of at most {self.most_bytes:,} bytes of replies"
                raise self._full("bytes", taken, f"{size:,}")
            if held + size > most:
                taken = f"{held:,} of at most {most:,} bytes of replies to {holder}"
                raise self._full("client_bytes", taken, f"{size:,}")
        self.reply_bytes += size
        self._replies_of[holder] += size
        return partial(self._gone, size, holder)

    @contextmanager
    def admit(self, inputs: int = 1) -> Iterator[None]:
        """Hold a permit for each input while the block runs; a call without inputs holds one.

        Not for a call that goes on for minutes: it would make the others come back too late.

        Raises:
            Overloaded: if too many inputs are in flight now.
        """
        client = identity.get().name
        self._check_inputs(client, inputs, f"{inputs}")
        self.inputs += inputs
        self._inputs_of[client] += inputs
        call = current_call.get()
        if call is not None:
            call.inputs += inputs
        began = time.monotonic()
        try:
            yield
        finally:
            self.inputs -= inputs
            _give_back(self._inputs_of, client, inputs)
            # A place becomes free about when a call of usual length ends, so that is when to come back.
            self._usual_stay += SMOOTHING * (time.monotonic() - began - self._usual_stay)

    def _check_inputs(self, client: str, inputs: int, wanted: str) -> None:
        if self.inputs + inputs > self.most_inputs:
            taken = f"{self.inputs} of at most {self.most_inputs} inputs"
            raise self._full("inputs", taken, wanted)
        if self._inputs_of[client] + inputs > self.most_a_client:
            most = f"{self.most_a_client} inputs of the key {client}"
            taken = f"{self._inputs_of[client]} of at most {most}"
            raise self._full("client_inputs", taken, wanted)

    def _gone(self, size: int, holder: str) -> None:
        self.reply_bytes -= size
        _give_back(self._replies_of, holder, size)

    def _full(self, limit: str, taken: str, wanted: str) -> Overloaded:
        self.refusals[limit] += 1
        return Overloaded(
            f"{taken} are in flight, and there is no room for {wanted} more; try again later.",
            # In steps, so that one answer serves for many refusals.
            retry_after=min(max(1, ceil(self._usual_stay / SHORTEST_RETRY)) * SHORTEST_RETRY, LONGEST_RETRY),
        )


def _give_back(held: Counter[str], client: str, amount: int) -> None:
    held[client] -= amount  # of none at all, too: an empty message counts nothing
    if not held[client]:  # names of the past take no room
        del held[client]
