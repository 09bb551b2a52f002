"""Progress of a command's work: a bar on a terminal, lines elsewhere."""

import sys
import time
from typing import Final, Self

QUIET: Final = 10.0
"""Seconds without a line in work that may take minutes."""


class Steps:
    """Transient progress bar on standard error; hidden if that is not a terminal.

    With `lines`, `tell` prints a line where standard error is not a terminal, for work of minutes: each, or where most
    work takes seconds, one after every `quiet` seconds.
    """

    def __init__(
        self, doing: str, total: int | None = None, *, shown: bool = True, lines: bool = False, quiet: float = 0.0
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._doing = doing
        self._prints = shown and lines and not console.is_terminal
        self._quiet, self._printed = quiet, time.monotonic()
        self._bars = Progress(
            *(TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn()),
            console=console,
            auto_refresh=False,  # no thread, because processes should not be forked beside one
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bars.add_task(doing if total else "", total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def advance(self, steps: int = 1) -> None:
        self._bars.update(self._task, advance=steps, refresh=True)

    def tell(self, part: str, done: int, parts: int) -> None:
        """Show the current part and how many parts are done."""
        self._bars.update(self._task, description=f"{self._doing} {part}", completed=done, total=parts, refresh=True)
        if self._prints and time.monotonic() - self._printed >= self._quiet:
            self._printed = time.monotonic()
            print(f"{self._doing} {part} ({done} of {parts} done)", file=sys.stderr, flush=True)
