"""A process that serves, whatever it serves."""

import asyncio
import gc
import signal
from collections.abc import Iterator

import pytest

from serving.server.process import live
from serving.server.signals import Signals


class Idle:
    """Serves nothing."""

    address = "nowhere"

    def __init__(self) -> None:
        self.failed = asyncio.Event()

    async def start(self) -> None:
        pass

    async def stop(self, grace: float) -> None:
        pass

    async def reload(self) -> None:
        pass


@pytest.fixture
def as_before() -> Iterator[None]:
    hung_up = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, hung_up)
    gc.unfreeze()


@pytest.mark.usefixtures("as_before")
def test_no_call_waits_while_what_was_loaded_is_looked_through_for_garbage() -> None:
    frozen: list[int] = []

    async def run() -> None:
        signals = Signals()

        def serving() -> None:
            frozen.append(gc.get_freeze_count())
            signals.stop(signal.SIGTERM)

        await live(Idle(), signals, 1.0, serving=serving)

    gc.collect()
    before = len(gc.get_objects())
    asyncio.run(run())
    assert frozen[0] > 0.9 * before  # some of it the server itself has thrown away
