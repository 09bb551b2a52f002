"""Attempt of a run: one start of all its ranks, which a launcher may repeat, and what outlives it in memory."""

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Attributes:
        number, most: starts by the same launcher before this one, and the maximum number of restarts.
        began: `time.time()` at the beginning of the start.
        failure: what ended the previous attempt, as a clause such as `rank 3 failed: …`; empty for the first.
        layout: fallback layout that the run continues in; empty for its own layout.
        memory: for each rank, the files in memory that hold its states; empty if states are not kept.
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
