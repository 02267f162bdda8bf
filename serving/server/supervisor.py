"""Several processes on one port: started, replaced when they die, told to load anew, drained."""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from prometheus_client.multiprocess import mark_process_dead

from serving.cores import usable_cores
from serving.errors import CrossbatchError, Unavailable
from serving.observability.metrics import serve_metrics
from serving.rpc.address import written_address
from serving.server.port import Port
from serving.settings import Settings

__all__ = ["Supervisor", "touch"]

logger = logging.getLogger(__name__)

WORKER = "serving.server.worker"
STEADY_SECONDS = 30.0
"""A worker that served this long is replaced at once, and one that did not after a pause that doubles."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
LOAD_SECONDS = 600.0
"""Longest time to load every model and open every gallery; a worker that takes longer is killed."""
END_SECONDS = 5.0
"""Beyond the grace, to flush and to close; what has not ended by then is killed."""


class Supervisor:
    """Holds the port and keeps `workers` processes listening on it. Loads no engine itself.

    The kernel deals new connections out among the workers (SO_REUSEPORT). Since a client keeps its connection
    each worker hangs up gently after a while.
    """

    def __init__(self, settings: Settings) -> None:
        """Keep the settings; nothing runs yet."""
        self.address = ""
        self.metrics_address = ""
        self._settings = settings
        self._folder = TemporaryDirectory(prefix="crossbatch-")
        self._generation = Path(self._folder.name, "generation")
        self._generation.touch()
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._asked = threading.Event()  # set when a reload is asked for: what was amiss may be mended
        self._stops: list[Callable[[], None]] = [self._folder.cleanup]

    def start(self) -> None:
        """Take the port, start the workers, and wait until each of them serves.

        Raises:
            BadSetting: The host may not be used.
            Unavailable: The port is in use, or a worker cannot start; with its reason.
        """
        try:
            port = Port(self._settings)
            self._stops.append(port.close)
            self._settings = self._settings.model_copy(update={"port": port.number})
            if self._settings.metrics_port is not None:
                self.metrics_address, stop = serve_metrics(
                    self._settings.metrics_host, self._settings.metrics_port, folder=Path(self._folder.name)
                )
                self._stops.append(stop)
            numbers = range(1, self._settings.workers + 1)
            for number in numbers:
                self._begin(number)
            for number in numbers:
                self._await_serving(number)
        except BaseException:
            self._end()
            raise
        self.address = written_address(self._settings.host, port.number)
        for number in numbers:
            threading.Thread(target=self._keep, args=(number,), name=f"keep {number}", daemon=True).start()

    def stop(self, grace: float) -> None:
        """Let every worker drain, and end those that have not done so a while after the grace, in seconds."""
        self._stopping.set()
        self._asked.set()
        for process in list(self._workers.values()):
            process.send_signal(signal.SIGTERM)
        longest = self._settings.drain_delay + grace + END_SECONDS
        until = time.monotonic() + longest
        late = 0
        for process in list(self._workers.values()):
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late += 1
        if late:
            logger.error("%d workers have not ended after %g s and are killed", late, longest)
        self._end()

    def reload(self) -> None:
        """Let the workers load anew, one after the other; each logs what comes of it."""
        touch(self._generation)
        self._asked.set()

    def _begin(self, number: int) -> None:
        """Start a worker; its settings travel by a pipe, as other users see a command line."""
        share = str(max(1, usable_cores() // self._settings.workers))
        # FAISS would search with every core in every worker. prometheus_client reads the other one.
        variables = {"OMP_NUM_THREADS": share} | os.environ
        if self._settings.metrics_port is not None:
            variables["PROMETHEUS_MULTIPROC_DIR"] = self._folder.name
        process = self._workers[number] = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C on a terminal goes to the supervisor alone, which lets the workers drain.
            start_new_session=True,
            env=variables,
        )
        told = {
            "worker": number,
            "settings": self._settings.model_dump(mode="json"),
            "generation": str(self._generation),
        }
        stdin = cast(IO[bytes], process.stdin)
        with suppress(BrokenPipeError):  # one that has ended already is noticed when it should serve
            stdin.write(json.dumps(told).encode() + b"\n")
            stdin.flush()

    def _await_serving(self, number: int) -> None:
        """Wait until a worker serves; raises Unavailable if it ends before, or takes too long."""
        process = self._workers[number]
        with selectors.DefaultSelector() as selector, cast(IO[bytes], process.stdout) as said:
            selector.register(said, selectors.EVENT_READ)
            if not selector.select(LOAD_SECONDS):
                process.kill()
                raise Unavailable(f"Worker {number} has not loaded within {LOAD_SECONDS:g} s and is killed.")
            told = json.loads(said.readline() or b"{}")
        if "serving" not in told:
            status = process.wait()
            raise Unavailable(
                told.get("failed")
                or f"Worker {number} ended with status {status} before it served; its log tells more."
            )
        logger.info("worker %d serves", number, extra={"worker": number, "pid": process.pid})

    def _keep(self, number: int) -> None:
        """Replace a worker whenever it ends."""
        pause = 0.0
        while True:
            began = time.monotonic()
            process = self._workers[number]
            status = _wait(process)
            if self._stopping.is_set():
                return
            mark_process_dead(process.pid, self._folder.name)  # type: ignore[no-untyped-call]
            steady = time.monotonic() - began >= STEADY_SECONDS
            pause = 0.0 if steady else min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            told = {"worker": number, "status": status}
            logger.error("worker %d ended%s; another starts in %g s", number, _by(status), pause, extra=told)
            self._asked.clear()
            if self._asked.wait(pause):
                pause = 0.0
            if self._stopping.is_set():
                return
            try:
                self._begin(number)
                self._await_serving(number)
            except (CrossbatchError, OSError) as error:
                logger.error("worker %d cannot start: %s", number, error, extra={"worker": number})

    def _end(self) -> None:
        for process in list(self._workers.values()):
            process.kill()
            _wait(process)
        while self._stops:
            self._stops.pop()()


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait until a process has ended, and close the pipes to it."""
    with suppress(BrokenPipeError), process:  # it may not have taken all that it was told
        process.wait()
    return process.returncode


def touch(generation: Path) -> None:
    """Let all workers load anew, which watch the time of this file."""
    now = time.time_ns()  # that of the file system goes by ticks
    os.utime(generation, ns=(now, now))


def _by(status: int) -> str:
    """Name the signal that ended a process: the kernel kills by SIGKILL where memory runs out."""
    return next((f" by {each.name}" for each in signal.Signals if each == -status), "")
