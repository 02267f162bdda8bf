"""A worker: one of the processes that share a port, as it sees itself.

It is told its number and its settings by a line on standard input, which stays open for as long as its
supervisor lives, and tells how it fares by lines of JSON on standard output.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving.engine.library import Library
from serving.engine.plan import Kind, Plan, read_plans, written_plans
from serving.errors import CrossbatchError
from serving.observability.logs import configure_logs
from serving.server import loop
from serving.server.process import Serves, live
from serving.server.server import Server
from serving.server.signals import Signals
from serving.server.watch import Watch
from serving.settings import Settings

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until told to stop or left alone.

    Returns:
        The exit status: 0, 2 if it could not start, 1 if it cannot embed any more.
    """
    told = json.loads(sys.stdin.readline() or "{}")
    if not told:  # the supervisor ended before it said anything
        return 0
    settings = Settings.model_validate(told["settings"])
    number = int(told["worker"])
    plans = read_plans(told["plans"])
    configure_logs(settings.log_level, worker=number)
    try:
        folder = Path(told["metrics"]) if told["metrics"] else None
        return loop.run(_work(settings, Watch(settings, worker=number, folder=folder), plans))
    except CrossbatchError as error:
        _tell(failed=str(error))
    except OSError as error:
        what = error.strerror or type(error).__name__
        _tell(failed=f"{error.filename}: {what}" if error.filename else what)
    return 2


async def _work(settings: Settings, watch: Watch, plans: Mapping[Kind, Plan]) -> int:
    from serving.gallery.directory import GalleryDirectory

    signals = Signals(once=True)
    galleries = GalleryDirectory(settings.galleries.absolute(), device=settings.search_device)
    server = Server(Library(settings), galleries, settings, watch=watch, plans=plans)
    server.asked_to_reload = lambda: _tell_of(server, reload=True)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), _listen, signals)
    failing = asyncio.create_task(_stop_when_failed(server, signals))
    try:
        await live(
            server,
            signals,
            settings.grace,
            serving=lambda: _tell_of(server, serving=server.address),
            reloaded=lambda failure: _tell_of(server, reloaded=failure),
        )
    finally:
        failing.cancel()
        loop.remove_reader(sys.stdin.fileno())
    return int(server.failed.is_set())


def _listen(signals: Signals) -> None:
    """Notice that the supervisor has ended: its end of the pipe closes, however it died."""
    if not os.read(sys.stdin.fileno(), 1_024):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        logger.warning("the supervisor is gone")
        if signals.stopping.is_set():  # it was told twice
            signals.end(signal.SIGTERM)
        signals.stop(signal.SIGTERM)


async def _stop_when_failed(server: Serves, signals: Signals) -> None:
    """Make room for a worker that works; alone on its port, a server stays and says NOT_SERVING."""
    await server.failed.wait()
    if not signals.stopping.is_set():
        signals.stop(signal.SIGTERM)


def _tell_of(server: Server, **said: Any) -> None:
    """Tell how models are run before what lets the supervisor start others, or let them load anew."""
    _tell(plans=written_plans(server.plans()))
    _tell(**said)


def _tell(**said: Any) -> None:
    with suppress(BrokenPipeError):  # that the supervisor is gone shows elsewhere
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
