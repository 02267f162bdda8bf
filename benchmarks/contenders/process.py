"""A contender's process as the benchmark sees it: asked for one thing at a time, and allowed to fail."""

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["Failed", "Process"]

_ROOT: Final = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """The contender could not do what was asked; the text says why in one line."""


class Process:
    """A worker that runs until it is closed."""

    def __init__(self, name: str, folder: Path, *, python: str, cores: int, patience: float) -> None:
        """Start it.

        Args:
            name: As `benchmarks.contenders.worker` takes it.
            folder: Where the contender keeps what it builds.
            python: The interpreter, which has to have the contender's package.
            cores: That it may use; 0: all.
            patience: Seconds until a request that is not answered is given up.

        Raises:
            Failed: The interpreter cannot be run.
        """
        self._patience = patience
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder.with_name(f"{folder.name}.log")
        words = ["-m", "benchmarks.contenders.worker", name, str(folder), "--cores", str(cores)]
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [python, *words],
                    env=os.environ | {"PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        except OSError as error:
            raise Failed(f"{python} cannot be run: {error.strerror}") from error

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            Failed: The process ended instead, or took too long.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._patience, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"do": do} | options) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if not line:
            self._process.wait()
            raise Failed(f"{do} took longer than {self._patience:g} s" if late else f"{do}: {self._reason()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, with what it started."""
        with suppress(Failed):
            self.ask("close")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reason(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        if lines and lines[-1].startswith("ModuleNotFoundError"):
            return f"not installed ({lines[-1].partition(': ')[2]})"
        return lines[-1] if lines else f"ended with status {self._process.returncode}"
