"""The watch of ranks that are processes of this host: their launcher reads their pages in memory that they share."""

import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from threefold.comm.heartbeat import PAGE_BYTES, Heartbeat, Page, RankState, ask, read
from threefold.launch.failure import Failure
from threefold.launch.hangs.process_state import process_state, worked_seconds
from threefold.launch.hangs.watch import HangWatch

INTERVAL: Final = 0.25
"""Seconds between two looks at the pages."""
_LONGEST_STEP: Final = 4 * INTERVAL
"""Seconds that count at most between two looks: in more of them this process was stopped, as perhaps were the ranks."""
_ANSWERS_WITHIN: Final = 3.0
"""Seconds to wait for ranks that write what they know."""


class SharedPages:
    """A page for each rank in memory that this process shares with those that it starts.

    Args:
        context: of `multiprocessing`.
        ranks: how many.
    """

    def __init__(self, context: Any, ranks: int) -> None:
        self._ranks, self._memory = ranks, context.RawArray("b", ranks * PAGE_BYTES)

    def __len__(self) -> int:
        return self._ranks

    def page(self, rank: int) -> Page:
        """That of a rank."""
        return memoryview(self._memory).cast("B")[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES]

    def places(self) -> list[RankState | None]:
        """Where each rank is."""
        return [read(self.page(rank)) for rank in range(self._ranks)]

    def heartbeat(self, rank: int) -> Heartbeat:
        """To write a rank's page with."""
        return Heartbeat(self.page(rank), self.places)


class LocalWatch:
    """Finds the rank that does not answer.

    Args:
        pages: of the ranks.
        pids: of their processes.
        timeout: in seconds.
        asks: whether ranks are asked, before they are ended, to write what they know.
    """

    def __init__(self, pages: SharedPages, pids: Sequence[int], timeout: float, asks: bool = False) -> None:
        self._pages, self._asks = pages, asks
        self._watch = HangWatch(
            len(pages),
            timeout,
            state=lambda rank: process_state(pids[rank]),
            # Not as the rank tells, whose thread that beats cannot run where native code does not let it.
            worked=lambda rank, place: worked_seconds(pids[rank]),
        )
        self._looked = time.monotonic()

    def look(self, ended: Collection[int]) -> Failure | None:
        """The failure of the rank that does not answer; None where all do.

        Args:
            ended: ranks whose processes have ended.
        """
        now = time.monotonic()
        seconds, self._looked = min(now - self._looked, _LONGEST_STEP), now
        hang = self._watch.observe(self._pages.places(), seconds, ended)
        if hang is None:
            return None
        if self._asks:
            self._ask([rank for rank in range(len(self._pages)) if rank not in (*ended, *hang.ranks)])
        return Failure(hang.ranks[0], hang.error, time.monotonic(), silent=True)

    def _ask(self, ranks: Sequence[int]) -> None:
        pages = [self._pages.page(rank) for rank in ranks]
        for page in pages:
            ask(page)
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while time.monotonic() < deadline and not all(read(page).answered for page in pages):
            time.sleep(INTERVAL)
