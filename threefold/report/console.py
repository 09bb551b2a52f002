"""Output of a run for people: lines of its steps, the live line of a terminal, and the summary after the last step."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from threefold.errors import OutputLost
from threefold.files import counted, format_bytes
from threefold.report.door import CURVE_FILE, GOODPUT_FILE, METRICS_FILE, REPORT_FILE
from threefold.report.goodput import Goodput
from threefold.report.tensorboard import TENSORBOARD_FOLDER
from threefold.train.callbacks.base import Callback, RunContext, on_terminal
from threefold.train.callbacks.records import EvaluationRecord, MeanRates, StepRecord
from threefold.train.callbacks.step_log import EventLines

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_SAME: Final = 0.0005  # relative change of the loss that is not a change
_WORTH_SAYING: Final = 0.01  # fraction of a step that its ranks wait for each other, below which it is left out
_WORTH_A_LOOK: Final = 0.5  # fraction of a step that its ranks wait for each other, from which on it is coloured
_AVERAGED: Final = 20  # steps over which a live line averages speed and time
_WITH_BAR, _BAR = 150, 30  # columns of a terminal from which on a live line has a bar, and its cells
_SECONDS_BETWEEN_REFRESHES: Final = 0.1


class Part(NamedTuple):
    """Part of a running line; the text is empty if the run does not have it.

    A narrow terminal does without the parts of the largest `place` first, and always has those of 0. The style is as
    rich names it.
    """

    text: str
    place: int = 0
    style: str = ""


class RunningLines:
    """Lines of about 100 characters: `step 225/500  loss 5.4565 ↓  val 5.7829  lr 2.11e-03  4,275 tok/s  479 ms …`."""

    def __init__(self, steps: int) -> None:
        self.steps, self._loss, self._valid = steps, 0.0, ""

    def step(self, since: Sequence[StepRecord]) -> str:
        """Format the last of the steps since the previous line, with averages of speed and time over them."""
        before, self._loss = self._loss, since[-1].loss
        return self.of(since[-1].step, *(part.text for part in self.parts(since, before)))

    def evaluation(self, record: EvaluationRecord) -> str:
        self._valid = f"val {record.loss:.4f}"
        of_parts = [f"of {name} {loss:.4f}" for name, loss in record.corpus_losses.items()]
        of_parts += [f"{name} {mean:.4f}" for name, mean in record.terms.items()]
        if record.average_loss is not None:
            of_parts.insert(0, f"of the averaged weights {record.average_loss:.4f}")
        return self.of(record.step, f"validation loss {record.loss:.4f}", *of_parts, f"{record.seconds:.1f} s")

    def of(self, step: int, *parts: str) -> str:
        """Format parts of a line about a step; empty ones are left out."""
        width = len(f"{self.steps:,}")
        return "  ".join([f"step {step:>{width},}/{self.steps:,}", *(part for part in parts if part)])

    def parts(self, since: Sequence[StepRecord], before: float) -> Iterator[Part]:
        """Yield the parts after the step, for a loss that was `before`; 0 if there was none."""
        last, seconds = since[-1], sum(record.seconds for record in since)
        change = (last.loss - before) / before if before else 0.0
        trend = " ↓" if change < -_SAME else " ↑" if change > _SAME else ""
        yield Part(f"loss {last.loss:.4f}{trend}", style="bold yellow" if change > _SAME else "bold green")
        for name, mean in last.terms.items():
            yield Part(f"{name} {mean:.4f}", 5)
        yield Part(self._valid, 1, "cyan")
        yield Part(f"lr {last.lr:.2e}", 4, "dim")
        yield Part(f"loss scale {last.loss_scale:,.0f}" if last.loss_scale is not None else "", 6, "dim")
        unit = "tok" if last.unit == "tokens" else last.unit
        yield Part(f"{sum(record.tokens_read for record in since) / seconds:,.0f} {unit}/s", 2)
        each = seconds / len(since)
        shown = f"{1000 * each:,.0f} ms" if each < 10 else f"{each:,.1f} s"
        waited = sum(record.performance.waited for record in since if record.performance is not None) / seconds
        waiting = f" ({waited:.0%} waiting)" if waited >= _WORTH_SAYING else ""
        yield Part(shown + waiting, 3, "yellow" if waited >= _WORTH_A_LOOK else "")
        rates = MeanRates.over(since)
        if rates.last is not None:
            yield Part(f"{rates.mfu:.1%} MFU" if rates.mfu else "", 7)
            yield Part(format_bytes(rates.last.largest_memory), 8)
        yield Part(f"epoch {last.epoch + 1}" if last.epoch else "", 9)
        if left := self.steps - last.step:
            yield Part(f"{clock(left * each)} left")
        elif rates.last is not None:
            yield Part(f"{clock(rates.last.wall_clock)} in all")


class LiveLine(EventLines):
    """Live line at the bottom of a terminal: step, losses, speed, time left; evaluations and checkpoints above it."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback | None:
        return cls(run.config.train.max_steps) if on_terminal() else None

    def __init__(self, steps: int) -> None:
        super().__init__(most=_AVERAGED)
        self._steps, self._lines = steps, RunningLines(steps)
        self._live: Live | None = None
        self._drawn = 0.0

    def before_fit(self, start: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=sys.stdout, highlight=False)
        first = Text(self._lines.of(start, "the first step is the slowest"), "dim", end="")
        self._live = Live(first, console=console, auto_refresh=False)  # a refresh thread would slow the training thread
        self._live.start(refresh=True)

    def after_step(self, record: StepRecord) -> None:
        super().after_step(record)
        is_due = time.monotonic() - self._drawn > _SECONDS_BETWEEN_REFRESHES or record.step == self._steps
        if record.is_read and is_due:
            self._draw()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._print(self._lines.evaluation(record), "cyan")
        self._draw()

    def after_fit(self) -> None:
        self.close()  # other callbacks print below it

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, step: int, what: str, style: str) -> None:
        self._print(self._lines.of(step, what), style)

    def _draw(self) -> None:
        if self._live is None or not self._since:
            return
        self._live.update(live_text(self._lines, self._since, self._live.console.width), refresh=True)
        self._drawn = time.monotonic()

    def _print(self, line: str, style: str) -> None:
        if self._live is not None:
            self._live.console.print(line, style=style, soft_wrap=True, markup=False)


def live_text(lines: RunningLines, since: Sequence[StepRecord], width: int) -> "Text":
    """Return the line in colours, without parts that do not fit `width` columns, and with a bar if there is room
    for one.

    Speed and time are averaged over the steps `since`, and the loss is compared with the first of them.
    """
    from rich.text import Text

    step, parts = lines.of(since[-1].step), [part for part in lines.parts(since, since[0].loss) if part.text]
    while (room := width - len(step) - sum(2 + len(part.text) for part in parts)) < 1:
        if not (place := max(part.place for part in parts)):
            break
        parts = [part for part in parts if part.place != place]
    line = Text(step, "bold", no_wrap=True, overflow="ellipsis", end="")
    if width >= _WITH_BAR and room > _BAR + 2:
        done = _BAR * since[-1].step // lines.steps
        line.append("  ").append("━" * done, "green").append("─" * (_BAR - done), "dim")
    for part in parts:
        line.append("  ").append(part.text, part.style)
    return line


class Summary(Callback):
    """Print a table of the results after the last step, with those of `places` (label → file or folder) that exist."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        files = {"report": REPORT_FILE, "loss curve": CURVE_FILE, "metrics": METRICS_FILE}
        files["TensorBoard"] = TENSORBOARD_FOLDER
        return cls({name: run.run_dir / file for name, file in files.items()}, run.run_dir / GOODPUT_FILE)

    def __init__(self, places: dict[str, Path], ledger: Path | None = None) -> None:
        self.places, self.ledger = places, ledger
        self._last: StepRecord | None = None
        self._valid: EvaluationRecord | None = None
        self._steps, self._counted, self._read, self._padding, self._unknown = 0, 0, 0, 0, False
        self._seconds, self._started = 0.0, 0.0
        self._recorded = 0.0  # when the last step was
        self._rates = MeanRates()

    def before_fit(self, start: int) -> None:
        self._started = time.perf_counter()

    def after_step(self, record: StepRecord) -> None:
        if record.is_read:
            self._last, self._recorded = record, time.perf_counter()
        self._unknown = self._unknown or bool(record.unknown_calls)
        self._steps += 1
        self._counted += 0 if record.skipped else record.tokens
        self._read += record.tokens_read
        self._padding += record.padding
        self._seconds += record.seconds
        self._rates.add(record.seconds, record.performance)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._valid = record

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.places["checkpoint"] = path

    def after_fit(self) -> None:
        rows = self.rows()
        if not rows:  # stopped before the first step
            return
        from rich.console import Console
        from rich.text import Text

        width = max(len(name) for name, _ in rows)
        lines = (Text.assemble((f"{name:<{width}}", "dim"), "  ", value) for name, value in rows)
        with suppress(OSError, OutputLost):
            Console(file=sys.stdout, highlight=False).print(Text("\n").join([Text(), *lines]), soft_wrap=True)

    def rows(self) -> list[tuple[str, str]]:
        if self._last is None:
            return []
        rows = [("training loss", f"{self._last.loss:.4f} at step {self._last.step}")]
        rows += [(f"  {name}", f"{mean:.4f}") for name, mean in self._last.terms.items()]
        if self._valid is not None:
            rows.append(("validation loss", f"{self._valid.loss:.4f} at step {self._valid.step}"))
            if self._valid.average_loss is not None:
                rows.append(("  of the averaged weights", f"{self._valid.average_loss:.4f}"))
            rows += [(f"  of {name}", f"{loss:.4f}") for name, loss in self._valid.corpus_losses.items()]
            rows += [(f"  {name}", f"{mean:.4f}") for name, mean in self._valid.terms.items()]
        unit, used = self._last.unit, self._rates.last
        padding = f", and {self._padding:,} of padding" if self._padding else ""
        padded = f", {(self._read + self._padding) / self._seconds:,.0f} with padding" if self._padding else ""
        # Since the run started; since its first step if that is not known.
        now = time.perf_counter()
        elapsed = now - self._started if used is None else used.wall_clock + now - self._recorded
        rows += [
            (f"{unit} trained on", f"{self._counted:,} in {counted(self._steps, 'step')}, those counted for the loss"),
            (f"{unit} read", f"{self._read:,}{padding}"),
            ("time", f"{clock(elapsed)}, of which {clock(self._seconds)} in steps"),
            ("speed", f"{self._read / self._seconds:,.0f} {unit}/s read{padded}"),
        ]
        if used is not None:
            if self._rates.flops:
                of_peak = f", {self._rates.mfu:.1%} of the peak rate (MFU)" if self._rates.mfu else ""
                scale, prefix = (1.0, "T") if self._rates.teraflops >= 1 else (1000.0, "G")
                rows.append(("compute", f"{scale * self._rates.teraflops:,.1f} model {prefix}FLOP/s a rank{of_peak}"))
            most = f"{format_bytes(used.largest_memory)} on rank {used.largest_rank}, which takes most"
            rows.append(("memory", most if used.largest_rank else format_bytes(used.memory)))
        if self._last.fingerprint is not None:
            where = "if those functions are exact" if self._unknown else "inside the grain"
            told = f"{self._last.fingerprint} after step {self._last.step}, in every layout {where}"
            rows.append(("weights", told))

        if self.ledger is not None and (found := Goodput.read(self.ledger)):
            rows.append(("goodput", str(found)))
        return rows + [(name, str(place)) for name, place in self.places.items() if place.exists()]


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
