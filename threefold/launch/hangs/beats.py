"""The thread of a rank that beats: it shows that the process runs, whatever the thread that trains is doing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from threefold.comm.heartbeat import Heartbeat

INTERVAL: Final = 0.5
"""Seconds between two beats."""


@contextmanager
def beating(heartbeat: Heartbeat, on_request: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Beat within the block.

    Args:
        heartbeat: of this rank.
        on_request: called once where a reader of the page asks for it.
    """
    over = threading.Event()

    def beat() -> None:
        while True:
            heartbeat.beat()
            if heartbeat.is_asked:
                on_request()
                heartbeat.answer()
            if over.wait(INTERVAL):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
