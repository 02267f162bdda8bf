"""What was freed is the system's again."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.engine.memory import give_back, keep_little

BLOCK, COUNT = 60_000, 1_000

# Has twelve threads allocate at once, and prints how many pools glibc made for them.
THREADS = """
import ctypes, sys, threading
from serving.engine.memory import keep_little
if sys.argv[1] == "little":
    keep_little()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_there = threading.Barrier(12)
def allocate():
    all_there.wait()
    libc.malloc(60_000)
    all_there.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for each in threads: each.start()
for each in threads: each.join()
told = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, told)
libc.fclose(told)
print(open(sys.argv[2]).read().count("<heap nr="))
"""

of_glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="of glibc alone"
)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@of_glibc
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


@of_glibc
def test_threads_share_pools_of_memory(tmp_path: Path) -> None:
    def pools(kept: str) -> int:
        words = [sys.executable, "-c", THREADS, kept, str(tmp_path / "told.xml")]
        return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout)

    assert pools("little") <= 2 < pools("much")


def test_a_c_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    give_back()
    keep_little()
