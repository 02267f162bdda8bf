"""The serve command as a process of its own, as a user starts it."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def command(model: Path, galleries: Path | str, *words: str) -> list[str]:
    paths = ["--model", str(model), "--galleries", str(galleries)]
    return [sys.executable, "-m", "crossbatch", "serve", *paths, "--port", "0", *words]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Launched:
    """A server that serves."""

    process: "subprocess.Popen[str]"
    address: str
    errors: Path

    def workers(self) -> list[int]:
        """The ids of its child processes."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()  # each thread has children of its own
        return sorted(int(each) for task in tasks for each in (task / "children").read_text().split())

    def records(self) -> list[dict[str, Any]]:
        """What it has logged; whole lines only."""
        lines = self.errors.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def said(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        """The records whose message has a text in it, and that have these fields."""
        return [each for each in self.records() if text in each["message"] and fields.items() <= each.items()]


@contextmanager
def launched(model: Path, galleries: Path | str, *words: str) -> Iterator[Launched]:
    """Start a server; it is killed at the end, unless it has ended."""
    errors = model.with_name(f"{Path(galleries).name}-{time.monotonic_ns()}.log")
    with (
        errors.open("w") as log,
        subprocess.Popen(
            command(model, galleries, *words), stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"serving on (127\.0\.0\.\d:\d+)\n", line)
            assert found, (line, errors.read_text())
            yield Launched(process, found[1], errors)
        finally:
            process.kill()
