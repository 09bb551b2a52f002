"""What a process on a CPU is told before it trains, and what it has."""

import ctypes
import os
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next allocation instead of giving it back to the system.

    Activations of some megabytes are allocated and freed hundreds of times in a step; by default each one is mapped,
    zeroed page by page and unmapped again, a sixth of the time of a small model's step. Does nothing without glibc.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
