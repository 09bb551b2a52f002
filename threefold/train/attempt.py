"""Attempt of a run: one start of all its ranks, which a launcher may repeat, and what outlives it in memory."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from threefold.errors import UserError

COPIES: Final = 2  # number of copies of a rank's state in memory: one stays whole while the other is written


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Attributes:
        number, most: starts by the same launcher before this one, and the maximum number of restarts.
        began: `time.time()` at the beginning of the start.
        failure: what ended the previous attempt, as a clause such as `rank 3 failed: …`; empty for the first.
        layout: fallback layout that the run continues in; empty for its own layout.
        memory: for each rank, the files in memory that hold its states (`memory_files`); empty if states are not kept.
    """

    number: int = 0
    most: int = 0
    began: float = field(default_factory=time.time)
    failure: str = ""
    layout: str = ""
    memory: tuple[tuple[Path, ...], ...] = ()

    def lines(self, start: str) -> list[str]:
        """Return the lines to print at the start of this attempt, given a sentence about its starting point."""
        if not self.number:
            return [f"{start}."] if start else []
        count = f"{self.number:,} of {self.most:,}" if self.most else f"{self.number:,}"
        why = f", as {self.failure}" if self.failure else ""
        layout = f" in layout {self.layout}" if self.layout else ""
        begin = start or "Starting again with step 1, as nothing was saved"
        return [f"Restart {count}{layout}{why}. {begin}."]


def memory_files(ranks: int) -> tuple[tuple[Path, ...], ...]:
    """Create empty files in memory for the states of `ranks` ranks, `COPIES` for each.

    They exist as long as this process, or another one that opened them, so nothing remains when all are killed. Raises
    a `UserError` on systems without such files.
    """
    if sys.platform != "linux":
        raise UserError("checkpoint.memory_every is not 0 but needs files in memory, which only Linux has; use 0.")
    return tuple(
        tuple(Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'threefold-rank-{rank}')}") for _ in range(COPIES))
        for rank in range(ranks)
    )


def fresh_files(files: tuple[tuple[Path, ...], ...]) -> tuple[tuple[Path, ...], ...]:
    """Close these files, whose states cannot be trusted, and create as many empty ones."""
    for each in files:
        for file in each:
            os.close(int(file.name))
    return memory_files(len(files)) if files else ()
