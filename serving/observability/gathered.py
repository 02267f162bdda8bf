"""The metrics of several workers in one place: each keeps its own in a folder, which their supervisor reads.

gathered = Gathered(host, port)                     # the supervisor, before its workers
Watch(settings, worker=3, folder=gathered.folder)   # each worker, with its number, handed to its Server
gathered.forget(3)                                  # the supervisor, when that worker has died
gathered.close()                                    # the supervisor, at the end
"""

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from serving.observability.exposition import serve
from serving.observability.gauges import Gauges
from serving.observability.state import State

__all__ = ["Gathered", "forget", "tell", "told"]

PREFIX = "crossbatch-metrics-"
LOCK = "supervisor.lock"


class Gathered:
    """Serves what workers have counted and told, from a folder that is made and removed with it."""

    def __init__(self, host: str, port: int) -> None:
        """Make the folder, and serve what is in it from now on.

        Raises:
            Unavailable: if it cannot listen there.
        """
        _sweep()
        self.folder, self._lock = _make_folder()
        registry = CollectorRegistry()
        registry.register(Gauges(lambda: told(self.folder)))
        MultiProcessCollector(registry, str(self.folder))  # type: ignore[no-untyped-call]
        try:
            self._endpoint = serve(registry, host, port)
        except BaseException:
            self._remove_folder()
            raise
        self.address = self._endpoint.address
        """As `host:port`, with the port that was chosen."""

    def forget(self, worker: int) -> None:
        """Tell the state of a worker no more, since it is dead; what it has counted stays."""
        forget(self.folder, worker)

    def close(self) -> None:
        """Serve no more, and remove the folder."""
        self._endpoint.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def tell(folder: Path, state: State) -> None:
    """Write how a worker stands, for the `Gathered` whose folder it is."""
    path = _state_file(folder, state.worker)
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(state.as_json()), encoding="utf-8")
    aside.replace(path)


def forget(folder: Path, worker: int) -> None:
    """Remove what a worker has told."""
    _state_file(folder, worker).unlink(missing_ok=True)


def told(folder: Path) -> list[State]:
    """Read how the workers stand that are there, by number."""
    states = []
    for path in folder.glob("state-*.json"):
        try:
            states.append(State.of_json(json.loads(path.read_text(encoding="utf-8"))))
        except FileNotFoundError:  # it died while we looked
            continue
    return sorted(states, key=lambda each: each.worker)


def _state_file(folder: Path, worker: int) -> Path:
    return folder / f"state-{worker}.json"


def _make_folder() -> tuple[Path, int]:
    """A new folder, and the lock that says it is in use; it has its name only once it is locked."""
    aside = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
    lock = os.open(aside / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return aside.rename(aside.with_name(aside.name.removeprefix("new-"))), lock


def _sweep() -> None:
    """Remove the folders of supervisors that were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(held)
