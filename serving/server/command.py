"""The serve command: one process, or several under a supervisor, from start to drained stop."""

import logging
import resource
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from serving.errors import BadSetting, NotFound
from serving.gallery.store.schema import FILE_NAME
from serving.observability.logs import configure_logs, flush_logs
from serving.server.signals import Signals, live
from serving.server.supervisor import Supervisor
from serving.settings import Settings

__all__ = ["Settings", "render", "run"]

logger = logging.getLogger(__name__)


def run(settings: Settings) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C; return the address that was served and for how many seconds."""
    signals = Signals()
    _check_folder(settings.galleries)
    configure_logs(settings.log_level)
    with suppress(OSError, ValueError):  # the usual 1,024 open files are as many connections and no more
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if settings.workers > 1:
        server: Any = Supervisor(settings)
    else:  # here, as a supervisor loads no engine, and imports take time in which Ctrl-C must work
        from serving.server.server import Server

        server = Server(settings)

    def announce() -> None:
        # Scripts that chose port 0, or that wait for the start, read this line.
        sys.stdout.write(f"serving on {server.address}\n")
        sys.stdout.flush()
        logger.info("serving on %s", server.address, extra={"address": server.address})

    try:
        seconds = live(server, signals, settings.grace, serving=announce)
        logger.info("stopped after %.0f s", seconds)
    finally:
        flush_logs()
    return {"address": server.address, "seconds": round(seconds, 3)}


def render(result: dict[str, Any]) -> str:
    """Say in one line what was served."""
    return f"served {result['address']} for {result['seconds']:.0f} s"


def _check_folder(folder: Path) -> None:
    """Refuse a folder of galleries that cannot be meant: a misspelt one is not served as an empty one."""
    if (folder / FILE_NAME).is_file():
        raise BadSetting(
            f"--galleries {folder} is a gallery itself; give the folder that it is in, "
            f"{folder.absolute().parent}"
        )
    if folder.exists():
        return
    beside = sorted(each.parent.parent.name for each in folder.parent.glob(f"*/*/{FILE_NAME}"))
    if nearest := get_close_matches(folder.name, beside, 1):
        hint = f"did you mean {folder.parent / nearest[0]}? If not, make the folder first: mkdir {folder}"
        raise NotFound(f"--galleries {folder} is not there; {hint}")
    if not folder.absolute().parent.exists():
        raise NotFound(
            f"--galleries {folder} is not there, nor is {folder.parent}; make it first: mkdir -p {folder}"
        )
