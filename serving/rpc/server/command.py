"""The serve command: from start to drained stop."""

import asyncio
import logging
import signal
import sys
import time
from typing import Any

from serving.rpc.gate.address import check_address
from serving.rpc.server.server import Server
from serving.rpc.server.settings import Settings
from serving.rpc.work.library import Library
from serving.telemetry import configure_logs

__all__ = ["Settings", "render", "run"]

logger = logging.getLogger(__name__)


def run(settings: Settings) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        The address that was served and for how many seconds.

    Raises:
        CrossbatchError: if the model or the folder cannot be used, or the port is taken.
    """
    from serving.gallery.folder.directory import GalleryDirectory

    configure_logs(settings.log_level)
    # Before the seconds that models take to load.
    check_address(
        settings.host,
        settings.port,
        insecure=settings.insecure,
        encrypted=settings.tls_certificate is not None,
    )
    galleries = GalleryDirectory(settings.galleries.absolute(), device=settings.search_device)
    return asyncio.run(_serve(Server(Library(settings), galleries, settings), settings.grace))


def render(result: dict[str, Any]) -> str:
    """Say in one line what was served."""
    return f"served {result['address']} for {result['seconds']:.0f} s"


async def _serve(server: Server, grace: float) -> dict[str, Any]:
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop.set)
    await server.start()
    began = time.monotonic()
    # Scripts that chose port 0, or that wait for the start, read this line.
    sys.stdout.write(f"serving on {server.address}\n")
    sys.stdout.flush()
    logger.info("serving on %s", server.address, extra={"address": server.address})
    await told_to_stop.wait()
    logger.info("draining for up to %g s", grace)
    await server.stop(grace)
    seconds = time.monotonic() - began
    logger.info("stopped after %.0f s", seconds)
    return {"address": server.address, "seconds": round(seconds, 3)}
