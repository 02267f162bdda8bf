"""Memory that is freed is there for the next tensor."""

import subprocess
import sys

import pytest

from training.loop.allocator import keep_freed_memory

FAULTS = """
import resource, sys, torch
from training.loop.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(32):
    torch.ones(16 * 2**20)  # 64 MiB
print(faults() - before)
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="not the C library of GNU")
def test_pages_are_faulted_in_once() -> None:
    def faults(how: str) -> int:
        words = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < faults("given back") / 2
