"""Memory that this process holds and bytes that it has read, as Linux counts them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def read_bytes() -> int:
    """Return the bytes read from files so far, from disk or cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def forget_peak() -> None:
    """Reset the peak (VmHWM), so that the next one covers only what follows."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def anonymous_growth() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the largest growth of memory outside files, in bytes, sampled by a thread.

    A mapped file is not counted: the system reclaims its pages when needed.
    """
    before, most, ended = status("RssAnon"), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, status("RssAnon") - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most
    finally:
        ended.set()
        thread.join()
