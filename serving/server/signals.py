"""What signals tell a server: to stop, to stop at once, to load anew."""

import asyncio
import os
import signal
from types import FrameType

from serving.observability.logs import flush_logs

__all__ = ["Signals", "ignore_hangups"]

LAST_LINES_SECONDS = 0.2  # for the log of a process that ends at once


def ignore_hangups() -> None:
    """Let no SIGHUP end the process, which it does by default; for the time until there are `Signals`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Signals:
    """Listens to SIGTERM, SIGINT and SIGHUP of a process. Belongs to the event loop that runs.

    Told to stop before it is ready, or for the second time, the process ends at once with the status of a
    process that the signal ended. Nothing is lost by that: what a gallery acknowledged is on disk. The first
    process of a container is not ended by any signal that it has no handler for, hence not by the defaults.
    """

    def __init__(self, *, once: bool = False) -> None:
        """Listen from now on.

        Args:
            once: Whether to pass over a second signal to stop. A worker does, which its supervisor tells to
                stop, and systemd and the like tell too.
        """
        self._once = once
        self.ready = False
        self.stopping = asyncio.Event()
        self.reloading = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop, number)
        # Not by the loop, which at its end would bring the default back.
        signal.signal(signal.SIGHUP, self._hang_up)

    def stop(self, number: int) -> None:
        """Stop, as if told by the signal of that number."""
        if not self.ready or (self.stopping.is_set() and not self._once):
            self.end(number)
        self.stopping.set()

    def end(self, number: int) -> None:
        """End the process at once, as if by the signal of that number."""
        flush_logs(LAST_LINES_SECONDS)
        os._exit(128 + number)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        if self.ready and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.reloading.set)
