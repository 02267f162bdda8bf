"""A thread that alone uses what several threads may not use at once, and works for all who ask."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.errors import Overloaded, Unavailable

__all__ = ["Owner"]

T = TypeVar("T")


class Owner:
    """One thread with a bounded queue; each caller waits for the result, or the exception, of his own job."""

    def __init__(self, name: str, *, most_waiting: int = 64, timeout: float = 30.0) -> None:
        """Name the thread, which starts with the first job.

        Args:
            name: What it owns.
            most_waiting: How many jobs may wait or run.
            timeout: Seconds that a job may wait for a place among them.
        """
        self._name = name
        self._places = threading.BoundedSemaphore(most_waiting)
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def call(self, job: Callable[[], T]) -> T:
        """Return what `job` returns, done by the owner's thread; what it raises is raised here.

        Raises:
            Overloaded: So many jobs wait that this one found no place in time.
            Unavailable: The owner has been closed.
        """
        if not self._places.acquire(timeout=self._timeout):
            raise Overloaded(f"too many searches wait for {self._name}; try again", retry_after=1.0)
        try:
            try:
                done = self._thread.submit(job)
            except RuntimeError as error:
                raise Unavailable(f"{self._name} has been closed; open the gallery again") from error
            return done.result()
        finally:
            self._places.release()

    def leave(self, job: Callable[[], object]) -> None:
        """Have `job` done after those that wait, and wait for nothing; of a closed owner, nobody does it."""
        try:
            self._thread.submit(job)
        except RuntimeError:
            return

    def close(self) -> None:
        """Finish the jobs that wait, then end the thread."""
        self._thread.shutdown()
