"""How many cores this process may use, who goes first on them, and threads that nobody waits for."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["in_daemon", "lower_priority", "usable_cores"]

T = TypeVar("T")
_NICE = 10  # steps; each gives about a tenth less of a busy core
_SELF = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Count the cores that this process may run on, which in a container are fewer than the machine has.

    A quota of time (`docker run --cpus 2`, a limit of Kubernetes, systemd's `CPUQuota`) counts as so many
    whole cores: more threads than it pays for would all be stopped for the rest of each period.
    """
    return max(1, min([_runnable(), *map(int, _quotas())]))


def lower_priority() -> None:
    """Let other threads go before the calling one, and before those that it starts, which inherit it."""
    if sys.platform == "linux":  # elsewhere only a whole process has a priority
        thread = threading.get_native_id()
        with suppress(OSError):  # past the lowest priority there is, Linux takes that one
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


def in_daemon(work: Callable[[], T]) -> "Future[T]":
    """Do work in a daemon thread: the process may end before the work does."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _runnable() -> int:
    """The cores that the process's mask allows."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def _quotas() -> list[float]:
    """How many cores' time each control group of this process may take, from its own up to the root."""
    found: list[float] = []
    for group in _groups():
        try:
            limits = [int(word) for word in (group / "cpu.max").read_text().split()]  # cgroup v2
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if len(limits) == 2 and min(limits) > 0:
            found.append(limits[0] / limits[1])
    return found


def _groups() -> list[Path]:
    try:
        lines = _SELF.read_text().splitlines()
    except OSError:  # no Linux
        return []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = _GROUPS / own.lstrip("/")
    return [group, *(each for each in group.parents if each.is_relative_to(_GROUPS))]
