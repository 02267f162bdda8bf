"""The serve command: one process, or several under a supervisor, from start to drained stop."""

import logging
import resource
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import BadSetting, NotFound
from serving.gallery.store.schema import FILE_NAME
from serving.observability.logs import configure_logs, flush_logs
from serving.server.signals import Signals, live
from serving.server.supervisor import Supervisor
from serving.settings import Settings

if TYPE_CHECKING:  # it comes with an extra
    from serving.web.app import Page

__all__ = ["Settings", "render", "run"]

logger = logging.getLogger(__name__)


def run(settings: Settings) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C; return the address that was served and for how many seconds."""
    signals = Signals()
    if isinstance(settings.galleries, Path):
        _check_folder(settings.galleries)
    configure_logs(settings.log_level)
    with suppress(OSError, ValueError):  # the usual 1,024 open files are as many connections and no more
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _page(settings) as page:
        if settings.workers > 1:
            server: Any = Supervisor(settings)
        else:  # here, as a supervisor loads no engine, and imports take time in which Ctrl-C must work
            from serving.server.server import Server

            server = Server(settings)

        def announce() -> None:
            # Scripts that chose port 0, or that wait for the start, read this line.
            _say(f"serving on {server.address}", server.address)
            if page is not None:
                page.start(server.address)
                _say(f"page on {page.address}", page.address)

        def end() -> None:
            if page is not None:
                page.stop()

        try:
            seconds = live(server, signals, settings.grace, serving=announce, stopping=end)
            logger.info("stopped after %.0f s", seconds)
        finally:
            flush_logs()
    told = {} if page is None else {"page": page.address}
    return {"address": server.address, **told, "seconds": round(seconds, 3)}


def render(result: dict[str, Any]) -> str:
    """Say in one line what was served."""
    return f"served {result['address']} for {result['seconds']:.0f} s"


def _say(text: str, address: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    logger.info("%s", text, extra={"address": address})


def _page(settings: Settings) -> "AbstractContextManager[Page | None]":
    """Take the port of the page, if it is to be served."""
    if settings.web_port is None:
        return nullcontext()
    try:
        from serving.web.app import Page
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        told = f"--web-port needs the package {error.name!r}, which is not installed"
        raise BadSetting(f"{told}: pip install 'crossbatch[web]'.") from error
    return Page(settings)


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
