"""How the C library hands out the memory of tensors on a CPU."""

import ctypes
import functools

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Keep what is freed for the next tensor, instead of faulting its pages in anew.

    glibc maps each block above 32 MiB afresh, and the kernel clears it page by page: for the maps of a
    network that can cost more than what is computed on them. The process stays as large as at its peak.

    Returns:
        Whether the C library could be told so; others than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _LARGEST))
