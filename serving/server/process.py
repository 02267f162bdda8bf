"""A process that serves, from start to drained stop: what one alone, a worker and their supervisor share."""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from serving.engine.memory import keep_little
from serving.errors import CrossbatchError
from serving.server.signals import Signals

__all__ = ["Serves", "live"]

logger = logging.getLogger(__name__)


class Serves(Protocol):
    """A server, or a supervisor of several."""

    address: str
    failed: asyncio.Event
    """Set when it cannot do its work any more."""

    async def start(self) -> None:
        """Load everything and answer."""

    async def stop(self, grace: float) -> None:
        """Finish what runs, within that many seconds, and end."""

    async def reload(self) -> Any:
        """Load models and galleries anew, without dropping a call, and log what has changed."""


async def live(
    server: Serves,
    signals: Signals,
    grace: float,
    *,
    serving: Callable[[], None],
    reloaded: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until told to stop.

    Args:
        server: What to start and stop.
        signals: Of this process.
        grace: Seconds that running calls have once it is told to stop.
        serving: Called when it answers.
        reloaded: Called after each reload with why it failed, or an empty text.

    Raises:
        CrossbatchError: if it cannot start.
    """
    keep_little()
    await server.start()
    # What is there now stays, and looking through it for garbage takes tens of milliseconds each time, for
    # which every call waits.
    gc.collect()
    gc.freeze()
    signals.ready = True
    serving()
    reloading = asyncio.create_task(_reload_when_told(server, signals, reloaded))
    await signals.stopping.wait()
    reloading.cancel()
    with suppress(asyncio.CancelledError):
        await reloading
    logger.info("draining for up to %g s", grace)
    await server.stop(grace)


async def _reload_when_told(server: Serves, signals: Signals, reloaded: Callable[[str], None]) -> None:
    while True:
        await signals.reloading.wait()
        signals.reloading.clear()
        failure = ""
        try:
            await server.reload()
        except CrossbatchError as error:
            failure = str(error)
            logger.error("nothing was loaded anew, everything stays as it is: %s", failure)
        except Exception as error:  # a bug that a reload shows must not end a server that answers
            failure = str(error) or type(error).__name__
            logger.exception("nothing was loaded anew, everything stays as it is")
        reloaded(failure)
