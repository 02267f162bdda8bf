"""Threads that compute step back behind the event loop."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.engine.priority import NICENESS, step_back


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no niceness of its own here")
def test_a_thread_steps_back_with_those_that_it_makes_and_no_other() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def of_a_child() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(niceness).result()

    before = niceness()
    with ThreadPoolExecutor(1, initializer=step_back) as pool:
        assert pool.submit(niceness).result() == max(before, NICENESS)
        assert pool.submit(of_a_child).result() == max(before, NICENESS)
    assert niceness() == before
