"""A worker: one of the processes that share a port.

It is told its number and its settings by a line on standard input, which stays open for as long as its
supervisor lives, and says by a line on standard output that it serves, or why it does not.
"""

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from serving.errors import CrossbatchError
from serving.observability.logs import configure_logs, flush_logs
from serving.server.signals import Signals, live, reload_safely
from serving.server.supervisor import touch
from serving.settings import Settings

__all__ = ["main"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2  # between two looks at whether another process has been told to load anew


def main() -> int:
    """Serve until told to stop or left alone.

    Returns:
        The exit status: 0, 2 if it could not start, 1 if it cannot embed any more.
    """
    said = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print
    told = json.loads(sys.stdin.readline() or "{}")
    if not told:  # the supervisor ended before it said anything
        return 0
    number = int(told["worker"])
    settings = Settings.model_validate(told["settings"])
    configure_logs(settings.log_level, worker=number)
    signals = Signals(once=True)
    try:
        return _serve(number, settings, Path(told["generation"]), signals, said)
    except CrossbatchError as error:
        _say(said, failed=str(error))
    except OSError as error:
        what = error.strerror or type(error).__name__
        _say(said, failed=f"{error.filename}: {what}" if error.filename else what)
    finally:
        flush_logs()
    return 2


def _serve(number: int, settings: Settings, generation: Path, signals: Signals, said: int) -> int:
    # Here, as imports take time in which the signals must work.
    from serving.engine.repository import ModelRepository
    from serving.gallery.directory import GalleryDirectory
    from serving.server.server import Server

    seen = generation.stat().st_mtime_ns
    directory = GalleryDirectory(settings.galleries.absolute(), device=settings.search_device)
    server = Server(
        ModelRepository(settings),
        directory,
        settings,
        worker=number,
        asked_to_reload=lambda: touch(generation),
    )

    def begin() -> None:
        _say(said, serving=server.address)
        for work in (follow, leave):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def follow() -> None:
        """Load anew when all are to, one process after the other, so that the others have the cores."""
        nonlocal seen
        while True:
            time.sleep(LOOK_SECONDS)
            if (now := generation.stat().st_mtime_ns) != seen:
                seen = now
                with generation.open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    reload_safely(server)

    def leave() -> None:
        """Make room for a worker that works; alone on its port, a server stays and says NOT_SERVING."""
        server.failed.wait()
        signals.stop(signal.SIGTERM)

    threading.Thread(target=_listen, args=(signals,), name="listen", daemon=True).start()
    live(server, signals, settings.grace, serving=begin)
    return int(server.failed.is_set())


def _listen(signals: Signals) -> None:
    """Notice that the supervisor has ended: its end of the pipe closes, however it died."""
    while os.read(sys.stdin.fileno(), 1_024):
        pass
    logger.warning("the supervisor is gone")
    if signals.stopping:  # it was told twice
        signals.end(signal.SIGTERM)
    signals.stop(signal.SIGTERM)


def _say(pipe: int, **told: str) -> None:
    with suppress(BrokenPipeError):  # that the supervisor is gone shows elsewhere
        os.write(pipe, json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
