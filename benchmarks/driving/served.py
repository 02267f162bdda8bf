"""A server as a process of its own: started, watched and ended, whatever becomes of the benchmark."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

__all__ = ["ROOT", "Failed", "Served", "cpu_of", "crossbatch", "end_with_parent", "family"]

ROOT: Final = Path(__file__).resolve().parents[2]
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_LIBC: Final = ctypes.CDLL(None)  # loaded here, since nothing should be between a fork and its program
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A process could not be started, or did not do what was asked; the text says why in one line."""


class Served:
    """A process that says on standard output where it answers."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        ready: str = r"serving on (\S+)",
        environment: Mapping[str, str] | None = None,
        patience: float = 120.0,
    ) -> None:
        """Start it and wait for its address.

        Args:
            command: What to run.
            log: File that its standard error is added to.
            ready: Pattern of the line that says it answers; its group is the address.
            environment: Variables on top of this process's own.
            patience: Seconds until it must have said so.

        Raises:
            Failed: It ended instead, or took too long.
        """
        self.log = log
        self.address = ""
        self._found = threading.Event()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    command,
                    env=os.environ | {"PYTHONPATH": path} | dict(environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
        except OSError as error:
            raise Failed(f"{command[0]} cannot be run: {error.strerror}") from error
        self._reader = threading.Thread(target=self._read, args=(re.compile(ready),), daemon=True)
        self._reader.start()
        self._found.wait(patience)
        if not self.address:
            if self._found.is_set():  # its output has ended, and it is about to
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
            reason = self._last_words()
            ended = self._process.poll() is not None
            self.close(grace=1.0)
            raise Failed(reason if ended else f"did not answer within {patience:g} s; {reason}")

    @property
    def alive(self) -> bool:
        """Whether it runs still."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def memory(self) -> int:
        """Return the resident bytes of it and of the processes that it started."""
        return sum(_status(each, "VmRSS") for each in family(self.pid))

    def own_memory(self) -> int:
        """Return those of them that are not pages of files, which the kernel may drop."""
        return sum(_status(each, "RssAnon") + _status(each, "RssShmem") for each in family(self.pid))

    def cpu(self) -> float:
        """Return the seconds of processor time that they have used."""
        return sum(map(cpu_of, family(self.pid)))

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def close(self, grace: float = 20.0) -> int:
        """End it and all that it started, by force after `grace` seconds; returns its exit status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        self._reader.join(5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, ready: re.Pattern[str]) -> None:
        """Read on for as long as it runs, so that it never waits for a reader."""
        for line in self._process.stdout or ():
            found = None if self.address else ready.search(line)
            if found:
                self.address = found[1]
                self._found.set()
        self._found.set()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with status {self._process.poll()}"


def crossbatch(model: Path, galleries: Path, log: Path, *words: str) -> Served:
    """Start `crossbatch serve` on a free port, as a user would.

    Args:
        model: The ONNX file.
        galleries: Folder of galleries.
        log: File that its log is added to.
        words: Further words of the command.

    Raises:
        Failed: It does not start.
    """
    paths = ["--model", str(model), "--galleries", str(galleries), "--port", "0"]
    return Served([sys.executable, "-m", "crossbatch", "serve", *paths, *words], log)


def cpu_of(pid: int) -> float:
    """Return the seconds of processor time that one process has used; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends."""
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def family(*processes: int) -> list[int]:
    """Return processes and all their descendants, each once."""
    found = list(processes)
    for each in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                with suppress(OSError):
                    children = map(int, (thread / "children").read_text().split())
                    found += [child for child in children if child not in found]
    return found


def _status(pid: int, name: str) -> int:
    """Return the bytes of one line of a process's status; 0 for one that is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
