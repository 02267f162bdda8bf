"""What was freed is the system's again."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from serving.rpc.work.memory import give_back

BLOCK, COUNT = 60_000, 1_000


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="of glibc alone"
)
def test_freed_memory_goes_back_though_something_lies_behind_it() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    kept = _resident()

    give_back()

    assert kept - _resident() > BLOCK * COUNT / 2
    libc.free(blocks[-1])


def test_a_c_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    give_back()
