"""The place of long computations behind the event loop, which every call has to pass."""

import os
import sys
import threading

__all__ = ["step_back"]

NICENESS = 10


def step_back() -> None:
    """Let the calling thread, and those that it makes, leave the cores to others that want them.

    Else an overloaded server refuses late, since the event loop waits for a core like any thread that decodes
    or runs a model. Linux gives each thread a niceness of its own; elsewhere it would be the whole process.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # A process that is nicer already could not be made less so.
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
