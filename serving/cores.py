"""How many cores this process may use."""

import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Count the cores that this process may run on, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS
