"""What the printing rank shows: where the run stands, and at its end what came out."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.errors import OutputLost
from threefold.train.callbacks.base import Callback, EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SPEED_OF = 20
"""Steps that the shown speed is the average of, about."""
_SECONDS_BETWEEN_PICTURES = 0.1


def on_terminal() -> bool:
    """Whether there is somebody to draw a live line for."""
    return sys.stdout.isatty()


def say(line: str) -> None:
    """Print a line at once; a console that is gone or full is no reason to end a run."""
    with suppress(OSError, OutputLost):
        print(line, flush=True)


class LiveLine(Callback):
    """One line at the bottom of a terminal: step, losses, speed and the time that is left; above it, what has happened.

    Args:
        steps: of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last: StepRecord | None = None
        self._speed, self._seconds, self._valid, self._drawn = 0.0, 0.0, "", 0.0

    def before_fit(self, start: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}"),
            console=Console(file=sys.stdout, highlight=False),
            auto_refresh=False,  # a refreshing thread would hold up the step's
        )
        self._task = self._progress.add_task(
            "", total=self.steps, completed=start, shown="the first step is the slowest"
        )
        self._progress.start()
        self._progress.refresh()

    def after_step(self, record: StepRecord) -> None:
        weight = max(1 / record.step, 2 / (_SPEED_OF + 1))
        self._speed += weight * (record.tokens_per_second - self._speed) if self._speed else record.tokens_per_second
        self._seconds += weight * (record.seconds - self._seconds) if self._seconds else record.seconds
        self._last = record
        if time.monotonic() - self._drawn > _SECONDS_BETWEEN_PICTURES or record.step == self.steps:
            self._draw()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._valid = f" · validation {record.loss:.4f}"
        self._print(f"step {record.step}: validation loss {record.loss:.4f}")
        self._draw()

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._print(f"step {step}: checkpoint {path}")

    def after_fit(self) -> None:
        self.close()  # what others say of the run goes below

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _draw(self) -> None:
        if self._progress is None or self._task is None or self._last is None:
            return
        left = clock((self.steps - self._last.step) * self._seconds)
        shown = f"loss {self._last.loss:.4f}{self._valid} · {self._speed:,.0f} tokens/s · {left} left"
        self._progress.update(self._task, completed=self._last.step, shown=shown, refresh=True)
        self._drawn = time.monotonic()

    def _print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.console.print(line, soft_wrap=True, markup=False)


class Summary(Callback):
    """A table of what came out, when all steps have been made.

    Args:
        places: what lies where, shown when it is there.
    """

    def __init__(self, places: dict[str, Path]) -> None:
        self.places = places
        self._last: StepRecord | None = None
        self._valid: EvaluationRecord | None = None
        self._steps, self._counted, self._read, self._padding = 0, 0, 0, 0
        self._seconds, self._started = 0.0, 0.0

    def before_fit(self, start: int) -> None:
        self._started = time.perf_counter()

    def after_step(self, record: StepRecord) -> None:
        self._last = record
        self._steps += 1
        self._counted += 0 if record.skipped else record.tokens
        self._read += record.tokens_read
        self._padding += record.padding
        self._seconds += record.seconds

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._valid = record

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.places["checkpoint"] = path

    def after_fit(self) -> None:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        say("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows))

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line."""
        if self._last is None:
            return []
        rows = [("training loss", f"{self._last.loss:.4f} at step {self._last.step}")]
        if self._valid is not None:
            rows.append(("validation loss", f"{self._valid.loss:.4f} at step {self._valid.step}"))
            rows += [(f"  of {name}", f"{loss:.4f}") for name, loss in self._valid.corpus_losses.items()]
        rows += [
            ("tokens trained on", f"{self._counted:,} in {self._steps:,} steps, those counted for the loss"),
            ("tokens read", f"{self._read:,}" + (f", and {self._padding:,} of padding" if self._padding else "")),
            ("time", f"{clock(time.perf_counter() - self._started)}, of which {clock(self._seconds)} in steps"),
            ("speed", f"{self._read / self._seconds:,.0f} tokens/s read" + self._padded_speed()),
        ]
        return rows + [(name, str(place)) for name, place in self.places.items() if place.exists()]

    def _padded_speed(self) -> str:
        if not self._padding:
            return ""
        return f", {(self._read + self._padding) / self._seconds:,.0f} with padding"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
