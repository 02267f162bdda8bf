"""Several processes on one port: a supervisor that starts and replaces them, and what each of them does."""

import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from serving.cores import in_daemon, usable_cores
from serving.errors import CrossbatchError, Unavailable
from serving.observability.logs import configure_logs, flush_logs
from serving.observability.metrics import served_metrics
from serving.rpc.address import barred_ipv6, check_host, held_port, written_address
from serving.server.signals import Signals, live, reload_safely
from serving.settings import Settings

__all__ = ["Supervisor", "work"]

logger = logging.getLogger(__name__)

WORKER = "serving.server.supervisor"
TOLD = "CROSSBATCH_WORKER"
"""The environment variable that tells a worker its number, its settings and the file of generations."""
SERVES = "serves"  # what a worker says on standard output when it does; one that cannot start says why
STEADY_SECONDS = 30.0
"""A worker that served this long is replaced at once, and one that did not after a pause that doubles."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
LOAD_SECONDS = 600.0
"""Longest time to load every model and open every gallery; a worker that takes longer is killed."""
END_SECONDS = 5.0  # beyond the grace, to flush and to close; what has not ended by then is killed
LOOK_SECONDS = 0.2  # between two looks of a worker at whether all are to load anew


class Supervisor:
    """Holds the port and keeps `workers` processes listening on it. Loads no engine itself."""

    is_loading = False

    def __init__(self, settings: Settings) -> None:
        """Keep the settings; nothing runs yet."""
        self.address = ""
        self._settings = settings
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._asked = threading.Event()  # set when a reload is asked for: what was amiss may be mended
        self._held = ExitStack()
        self._folder = Path(self._held.enter_context(TemporaryDirectory(prefix="crossbatch-")))
        self._generation = self._folder / "generation"
        self._generation.touch()

    def start(self) -> None:
        """Take the port, start the workers, and wait until each of them serves; raises what prevents it."""
        settings = self._settings
        try:
            check_host(settings.host, insecure=settings.insecure, encrypted=bool(settings.tls_certificate))
            port = self._held.enter_context(held_port(settings.host, settings.port, shared=True))
            self._held.enter_context(barred_ipv6(settings.host, port))
            self._settings = settings.model_copy(update={"port": port})
            if settings.metrics_port is not None:
                registry, place = CollectorRegistry(), (settings.metrics_host, settings.metrics_port)
                MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
                self._held.enter_context(served_metrics(*place, registry))
            for number in range(1, settings.workers + 1):
                self._begin(number)
            for number in self._workers:
                self._await_serving(number)
        except BaseException:
            self._end()
            raise
        self.address = written_address(settings.host, port)
        for number in self._workers:
            threading.Thread(target=self._keep, args=(number,), daemon=True).start()

    def stop(self, grace: float) -> None:
        """Let every worker drain, and end those that have not done so a while after the grace, in seconds."""
        self._stopping.set()
        self._asked.set()
        workers = list(self._workers.values())
        for process in workers:
            process.send_signal(signal.SIGTERM)
        longest = self._settings.drain_delay + grace + END_SECONDS
        until = time.monotonic() + longest
        for process in workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        if late := sum(process.poll() is None for process in workers):
            logger.error("%d workers have not ended after %g s and are killed", late, longest)
        self._end()

    def reload(self) -> None:
        """Let the workers load anew, one after the other; each logs what comes of it."""
        _touch(self._generation)
        self._asked.set()

    def _begin(self, number: int) -> None:
        """Start a worker, which learns that the supervisor is gone by the end of its standard input."""
        settings = self._settings
        told = [number, settings.model_dump(mode="json"), str(self._generation)]
        # Other users would see a command line. FAISS would search with every core in every worker.
        share = max(1, usable_cores() // settings.workers)
        variables = {"OMP_NUM_THREADS": str(share), **os.environ, TOLD: json.dumps(told)}
        if settings.metrics_port is not None:
            variables["PROMETHEUS_MULTIPROC_DIR"] = str(self._folder)
        self._workers[number] = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C on a terminal goes to the supervisor alone, which lets the workers drain.
            start_new_session=True,
            env=variables,
        )

    def _await_serving(self, number: int) -> None:
        """Wait until a worker serves; raises Unavailable if it ends before, or takes too long."""
        process = self._workers[number]
        with cast(IO[bytes], process.stdout) as said:
            if not select.select([said], [], [], LOAD_SECONDS)[0]:
                process.kill()
                raise Unavailable(f"Worker {number} has not loaded within {LOAD_SECONDS:g} s and is killed.")
            told = said.readline().decode().rstrip()
        if told != SERVES:
            status = process.wait()
            raise Unavailable(
                told or f"Worker {number} ended with status {status} before it served; its log tells more."
            )
        logger.info("worker %d serves", number, extra={"worker": number, "pid": process.pid})

    def _keep(self, number: int) -> None:
        """Replace a worker whenever it ends."""
        pause = 0.0
        while True:
            began = time.monotonic()
            process = self._workers[number]
            with process:
                status = process.wait()
            if self._stopping.is_set():
                return
            mark_process_dead(process.pid, str(self._folder))  # type: ignore[no-untyped-call]
            steady = time.monotonic() - began >= STEADY_SECONDS
            pause = 0.0 if steady else min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            # The kernel kills by SIGKILL where memory runs out.
            by = next((f" by {each.name}" for each in signal.Signals if each == -status), "")
            told = {"worker": number, "status": status}
            logger.error("worker %d ended%s; another starts in %g s", number, by, pause, extra=told)
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
            with process:
                process.wait()
        self._held.close()


def work() -> int:
    """Be a worker, as the environment tells; returns 2 if it cannot start, 1 if it can embed no more."""
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print
    number, told, generation = json.loads(os.environ[TOLD])
    settings = Settings.model_validate(told)
    configure_logs(settings.log_level, worker=number)
    signals = Signals(once=True)  # systemd tells every process of a service, and so does the supervisor
    try:
        return _serve(number, settings, Path(generation), signals, pipe)
    except (CrossbatchError, OSError) as error:
        _say(pipe, str(error))
        return 2
    finally:
        flush_logs()


def _serve(number: int, settings: Settings, generation: Path, signals: Signals, pipe: int) -> int:
    # Here, as a supervisor loads no engine, and imports take time in which the signals must work.
    from serving.server.server import Server

    seen = generation.stat().st_mtime_ns
    server = Server(settings, worker=number, asked_to_reload=lambda: _touch(generation))

    def reload() -> None:
        with generation.open() as file:  # one process after the other, so that the others have the cores
            fcntl.flock(file, fcntl.LOCK_EX)
            reload_safely(server)

    def attend() -> None:
        nonlocal seen
        while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            if server.failed.is_set():  # make room for a worker that works
                signals.stop()
            if signals.serving and (now := generation.stat().st_mtime_ns) != seen:
                seen = now
                in_daemon(reload)
        logger.warning("the supervisor is gone")  # its end of the pipe is closed, however it died
        if signals.stopping:  # it was told twice
            signals.end()
        signals.stop()

    in_daemon(attend)
    live(server, signals, settings.grace, serving=lambda: _say(pipe, SERVES))
    return int(server.failed.is_set())


def _say(pipe: int, text: str) -> None:
    with suppress(BrokenPipeError):  # that the supervisor is gone shows elsewhere
        os.write(pipe, f"{text}\n".encode())


def _touch(generation: Path) -> None:
    """Let all workers load anew, which watch the time of this file."""
    now = time.time_ns()  # that of the file system goes by ticks
    os.utime(generation, ns=(now, now))


if __name__ == "__main__":
    sys.exit(work())
