"""The client's process as the benchmark sees it."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.driving.served import ROOT, Failed, end_with_parent

__all__ = ["Client", "Target"]


@dataclass(frozen=True)
class Target:
    """What is sent where."""

    address: str
    method: str
    messages: Path
    """File of messages, as `benchmarks.driving.messages.write` makes it."""
    connections: int = 1


class Client:
    """A process that sends, and stays between two runs."""

    def __init__(self, cores: frozenset[int] | None = None) -> None:
        """Start it.

        Args:
            cores: That it may use; all when None.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.driving.sender"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        if cores is not None:
            os.sched_setaffinity(self._process.pid, cores)

    def closed(
        self, target: Target, *, in_flight: int, seconds: float, timeout: float = 60
    ) -> dict[str, Any]:
        """Keep so many calls in flight.

        Returns:
            `seconds` that it sent, `whole_seconds` until the last answer, `cpu_seconds` of this client. By
            the name of the status: `codes`, how many ended so, and `latency_ms`, p50, p95 and p99. The
            commonest errors are `said`.

        Raises:
            Failed: The process ended or hangs.
        """
        return self._ask("closed", target, timeout, in_flight=in_flight, seconds=seconds)

    def open(self, target: Target, *, rate: float, seconds: float, timeout: float) -> dict[str, Any]:
        """Send so many calls a second, whatever becomes of them; returns the same.

        Raises:
            Failed: The process ended or hangs.
        """
        return self._ask("open", target, timeout, rate=rate, seconds=seconds)

    def _ask(self, loop: str, target: Target, timeout: float, **how: float) -> dict[str, Any]:
        order = {
            "loop": loop,
            "address": target.address,
            "method": target.method,
            "messages": str(target.messages),
            "connections": target.connections,
            "timeout": timeout,
            "how": how,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(how["seconds"] + timeout + 60, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise Failed("the client ended or did not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
