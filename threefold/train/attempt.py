"""Attempt of a run that its launcher may restart, and what outlives one: states in memory, and the ledger of its time.

The ledger, RUN/goodput.json, is overwritten in place after each step, evaluation and checkpoint, so it is valid
whenever the processes are killed. *Goodput* is the share of time in steps made for the first time, as defined in
https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final, Self

from threefold.errors import UserError
from threefold.files import is_intact, read_text, seal_text

COPIES: Final = 2
"""Number of copies of a rank's state in memory: one stays whole while the other is written."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Attributes:
        number: starts by the same launcher before this one; 0 for the first attempt.
        most: maximum number of restarts.
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

    They exist as long as this process or another one that opened them, so nothing is left when all are killed. Raises a
    `UserError` on systems without such files.
    """
    if sys.platform != "linux":
        raise UserError("checkpoint.memory_every is not 0 but needs files in memory, which only Linux has; use 0.")
    return tuple(
        tuple(Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'threefold-rank-{rank}')}") for _ in range(COPIES))
        for rank in range(ranks)
    )


def fresh_files(files: tuple[tuple[Path, ...], ...]) -> tuple[tuple[Path, ...], ...]:
    """Close these files, whose states are not to be trusted, and create as many empty ones."""
    for each in files:
        for file in each:
            os.close(int(file.name))
    return memory_files(len(files)) if files else ()


GOODPUT_FILE: Final = "goodput.json"
LEDGER_SIZE: Final = 1024
"""Bytes of the ledger, which lie in one page of the kernel's cache: a kill leaves either the old or the new content."""


@dataclass
class Goodput:
    """Seconds of a run over its attempts, without the time between two commands.

    Attributes:
        steps: seconds in steps made for the first time.
        repeated: seconds in steps made again after a restart or after resuming from an older checkpoint.
        evaluating: seconds in evaluations.
        saving: seconds that steps waited for checkpoints.
        starting: seconds from the start of a command to its first step.
        lost: seconds from the last event before each failure to the first step after it.
        total: seconds of all of these, and of everything in between, such as callbacks.
        attempts: starts of all ranks.
        restarts: starts by a launcher after a failure.
        step: last step that the newest attempt finished, or its starting point.
        furthest: last step that any attempt finished.
        at: `time.time()` of the last event.
    """

    steps: float = 0.0
    repeated: float = 0.0
    evaluating: float = 0.0
    saving: float = 0.0
    starting: float = 0.0
    lost: float = 0.0
    total: float = 0.0
    attempts: int = 0
    restarts: int = 0
    step: int = 0
    furthest: int = 0
    at: float = 0.0

    @property
    def share(self) -> float:
        """The goodput, from 0 to 1."""
        return self.steps / self.total if self.total > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """Return the parts and the total, rounded to milliseconds."""
        names = ("steps", "repeated", "evaluating", "saving", "starting", "lost", "total")
        return {name: round(getattr(self, name), 3) for name in names}

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the ledger from a file; None if there is none, or it is damaged."""
        try:
            text = read_text(path).rstrip() + "\n"
            if not is_intact(text):
                return None
            held = json.loads(text)
            values = {each.name: held[each.name] for each in fields(cls)}
            if not all(type(value) in (int, float) for value in values.values()):
                return None
            return cls(**values)
        except (UserError, ValueError, KeyError, TypeError):
            return None

    def text(self) -> bytes:
        """Return the file's content, always of the same size."""
        return seal_text(json.dumps(asdict(self), indent=2)).encode().ljust(LEDGER_SIZE - 1) + b"\n"
