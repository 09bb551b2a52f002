"""What this process holds in memory, and what it has read, as Linux counts it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def status(key: str) -> int:
    """Bytes of one entry of this process's status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def read_bytes() -> int:
    """What this process has read from files so far, from the disk or its cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def forget_peak() -> None:
    """Let the next peak (VmHWM) be of what follows."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def anonymous_growth() -> Iterator[Callable[[], int]]:
    """By how many bytes the memory that is no part of a file grows at most, as a thread sees it that looks often.

    A file that is mapped is not counted: the system takes its pages back when it needs them.
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
