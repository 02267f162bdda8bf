"""Making the next FAISS file of a gallery: one process at a time, beside the searches, published at once."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from serving.cores import usable_cores
from serving.errors import CrossbatchError, Overloaded
from serving.gallery.disk import disk_error
from serving.gallery.index.build import Advance
from serving.gallery.index.draft import GivenUp
from serving.gallery.index.policy import RebuildPolicy
from serving.gallery.index.renewal import Renewal
from serving.gallery.lock import alone
from serving.gallery.store.store import Replaced, Store
from serving.gallery.store.transaction import State

__all__ = ["RebuildPolicy", "Rebuilder"]

_NICE = 10  # steps; each gives about a tenth less of a busy core
_PAUSE = 30.0  # seconds until a background rebuild that failed is tried again
_PATIENCE = 0.5  # seconds

_log = logging.getLogger(__name__)


class Rebuilder:
    """Rebuilds one gallery's index, when asked or in a thread of its own."""

    def __init__(self, store: Store, policy: RebuildPolicy) -> None:
        self._store = store
        self._folder = store.path.parent
        self._policy = policy
        self._guard = threading.Lock()  # of the thread and the time below
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self._stopping = threading.Event()

    def consider(self, state: State, *, damaged: bool = False) -> None:
        """Start a rebuild in the background if it is due and none is running."""
        if not self._policy.automatic or not (damaged or self._policy.is_due(state)):
            return
        with self._guard:
            running = self._thread is not None and self._thread.is_alive()
            if running or self._stopping.is_set() or time.monotonic() < self._not_before:
                return
            # A daemon, since a process may end in the middle: what is built aside is then thrown away.
            self._thread = threading.Thread(
                target=self._in_background, args=(damaged,), name=f"rebuild {self._folder.name}", daemon=True
            )
            self._thread.start()

    def run(self, *, whole: bool = True, timeout: float = 600.0, progress: Advance = lambda *_: None) -> None:
        """Bring the index to every item there is and publish it.

        Args:
            whole: Whether to build it anew even where adding to it would do.
            timeout: Seconds to wait for a rebuild by another thread or process.
            progress: Called with the stage, what is done of it and its total; what it raises ends the work.

        Raises:
            Overloaded: That one took too long, or the disk is full.
            ReadOnly: The folder cannot be written.
            Replaced: The gallery was closed meanwhile, or has lost its name.
        """
        try:
            with alone(self._folder, timeout, waiting=lambda: progress("wait", 0, 0)):
                self._renew(threads=usable_cores(), whole=whole, only_if_due=False, progress=progress)
        except GivenUp as error:
            raise Replaced(
                f"the gallery {self._folder} was closed while its index was made; open it again"
            ) from error
        except OSError as error:
            self._store.check_name()  # or the folder is not there because the gallery was dropped
            if isinstance(error, FileNotFoundError):
                raise Replaced(
                    f"the gallery {self._folder} had another name for a moment; try again"
                ) from error
            raise disk_error(error, f"the index of the gallery {self._folder}") from error

    def close(self) -> None:
        """Stop the background rebuild, if one runs, at its next block.

        One that is within a long step of FAISS is not waited for: it finds out later, and publishes nothing.
        """
        self._stopping.set()
        with self._guard:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _in_background(self, damaged: bool) -> None:
        _lower_priority()
        began = time.monotonic()
        try:
            with alone(self._folder, 0.0):
                _log.info("the index of %s is being rebuilt", self._folder)
                self._renew(threads=self._policy.background_threads, whole=damaged, only_if_due=not damaged)
            _log.info("the index of %s is rebuilt after %.1f s", self._folder, time.monotonic() - began)
        except GivenUp:
            return
        except (Overloaded, Replaced) as error:  # most often another process is at it
            self._later(f"the index of {self._folder} is not rebuilt now: {error}", logging.INFO)
        except CrossbatchError as error:
            self._later(f"the index of {self._folder} was not rebuilt: {error}", logging.WARNING)
        except OSError as error:
            told = disk_error(error, f"the index of {self._folder}")
            self._later(f"the index of {self._folder} was not rebuilt: {told}", logging.WARNING)
        except Exception:
            self._later(f"the index of {self._folder} was not rebuilt", logging.ERROR, trace=True)

    def _later(self, message: str, level: int, *, trace: bool = False) -> None:
        if self._stopping.is_set():
            return
        _log.log(level, "%s; searches go on without it", message, exc_info=trace)
        with self._guard:
            self._not_before = time.monotonic() + _PAUSE

    def _renew(
        self, *, threads: int, whole: bool, only_if_due: bool, progress: Advance = lambda *_: None
    ) -> None:
        def advance(stage: str, done: int, total: int) -> None:
            if self._stopping.is_set():
                raise GivenUp
            progress(stage, done, total)

        Renewal(self._store, self._policy, threads, advance).run(whole=whole, only_if_due=only_if_due)


def _lower_priority() -> None:
    """Let other threads go first; those that this one starts inherit it."""
    if sys.platform == "linux":  # elsewhere only a whole process has a priority
        thread = threading.get_native_id()
        with suppress(OSError):
            lower = os.getpriority(os.PRIO_PROCESS, thread) + _NICE
            os.setpriority(os.PRIO_PROCESS, thread, lower)  # the least there is where that is lower still
