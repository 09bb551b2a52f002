"""What a run needs to survive restarts: which attempt it is, its state in memory, and the ledger of its goodput."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from threefold.errors import UserError

COPIES: Final = 2
"""Copies of a rank's state in memory: one stays whole while the other is written."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Attributes:
        number: how often the same launcher has started them before; 0 for the first attempt.
        most: how often it may start them again.
        began: `time.time()` at which its start began.
        failure: what ended the attempt before it, a clause such as `rank 3 failed: …`; empty where none did.
        layout: the layout in which it goes on, where that is a fallback; else empty.
        memory: for each rank the files in memory that hold its states (`memory_files`); none where states are not kept.
    """

    number: int = 0
    most: int = 0
    began: float = field(default_factory=time.time)
    failure: str = ""
    layout: str = ""
    memory: tuple[tuple[Path, ...], ...] = ()

    def lines(self, start: str) -> list[str]:
        """What the reporting rank prints about the start of this attempt, given where it goes on."""
        if not self.number:
            return [f"{start}."] if start else []
        count = f"{self.number:,} of {self.most:,}" if self.most else f"{self.number:,}"
        why = f", as {self.failure}" if self.failure else ""
        layout = f" in layout {self.layout}" if self.layout else ""
        begin = start or "Starting again with step 1, as nothing was saved"
        return [f"Restart {count}{layout}{why}. {begin}."]


def memory_files(ranks: int) -> tuple[tuple[Path, ...], ...]:
    """Files in memory for the states of `ranks` ranks, empty at first, `COPIES` for each.

    They exist as long as this process or one that opened them, so that nothing is left where all are killed.

    Raises:
        UserError: this system has no such files.
    """
    if sys.platform != "linux":
        raise UserError("checkpoint.memory_every is not 0 but needs files in memory, which only Linux has; use 0.")
    return tuple(
        tuple(Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'threefold-rank-{rank}')}") for _ in range(COPIES))
        for rank in range(ranks)
    )


def fresh_files(files: tuple[tuple[Path, ...], ...]) -> tuple[tuple[Path, ...], ...]:
    """As many empty files as these, which are given up, for states that are not to be trusted."""
    for each in files:
        for file in each:
            os.close(int(file.name))
    return memory_files(len(files)) if files else ()
