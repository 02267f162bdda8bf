"""The serve command: one process, or several under a supervisor, from start to drained stop."""

import logging
import resource
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from serving.observability.logs import configure_logs
from serving.server import loop
from serving.server.place import check_place
from serving.server.process import live
from serving.server.signals import Signals, ignore_hangups
from serving.server.supervisor import Supervisor
from serving.settings import Settings

if TYPE_CHECKING:
    from serving.server.process import Serves

__all__ = ["Settings", "render", "run"]

logger = logging.getLogger(__name__)


def run(settings: Settings) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        The address that was served and for how many seconds.

    Raises:
        CrossbatchError: if the model or the folder cannot be used, or the port is taken.
    """
    ignore_hangups()
    configure_logs(settings.log_level)
    check_place(settings.galleries)
    _allow_connections()
    return loop.run(_serve(settings))


def render(result: dict[str, Any]) -> str:
    """Say in one line what was served."""
    return f"served {result['address']} for {result['seconds']:.0f} s"


async def _serve(settings: Settings) -> dict[str, Any]:
    signals = Signals()
    server = Supervisor(settings) if settings.workers > 1 else _alone(settings)
    began = time.monotonic()

    def announce() -> None:
        nonlocal began
        began = time.monotonic()
        # Scripts that chose port 0, or that wait for the start, read this line.
        sys.stdout.write(f"serving on {server.address}\n")
        sys.stdout.flush()
        logger.info("serving on %s", server.address, extra={"address": server.address})

    await live(server, signals, settings.grace, serving=announce)
    seconds = time.monotonic() - began
    logger.info("stopped after %.0f s", seconds)
    return {"address": server.address, "seconds": round(seconds, 3)}


def _alone(settings: Settings) -> "Serves":
    # Here, since a supervisor loads no engine, and since imports take time in which Ctrl-C must work.
    from serving.engine.library import Library
    from serving.gallery.directory import GalleryDirectory
    from serving.server.server import Server

    galleries = GalleryDirectory(settings.galleries.absolute(), device=settings.search_device)
    return Server(Library(settings), galleries, settings)


def _allow_connections() -> None:
    """Allow as many open files as the system does; the usual 1,024 are as many connections and no more."""
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
