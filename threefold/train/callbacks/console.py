"""Text output of a run: its log, RUN/train.log, whose lines are also printed where no live line is on the terminal."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from threefold.doors import added
from threefold.train.callbacks.base import Callback, RunContext, on_terminal, say
from threefold.train.callbacks.metrics import LineFile
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.callbacks.step_lines import RunningLines, step_line

LOG_FILE = "train.log"
CURVE_FILE, REPORT_FILE = "loss.png", "report.html"  # curve and report of the run (`threefold.report`)


class EventLines(Callback):
    """Base class of callbacks that write a line about each event of a run; the style is that of a terminal."""

    def __init__(self, *, most: int | None = None) -> None:
        self._since: deque[StepRecord] = deque(maxlen=most)  # steps whose speed and time a line averages
        self._told = ""

    def tell(self, step: int, what: str, style: str) -> None:
        """Write the line of an event at `step`."""
        raise NotImplementedError

    def after_step(self, record: StepRecord) -> None:
        if record.reason and record.reason != self._told:  # once for a range of steps
            self.tell(record.step, f"skipped: {record.reason}", "yellow")
        self._told = record.reason
        if record.is_read:
            self._since.append(record)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._since.clear()
        self.tell(step, f"rolled back to step {start}: {reason}", "yellow")

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.tell(step, f"checkpoint: {path}", "green")

    def after_stop(self, step: int, reason: str) -> None:
        self.tell(step, f"stopped: {reason}", "red")


class StepLog(EventLines):
    """Write a line every `every` steps, and one for each evaluation, checkpoint and early stop; a resumed run appends.

    Times, speeds and tokens per second (tokens read, without padding, in total and per rank) are averages since the
    previous line; loss and learning rate are those of the line's step, with the loss averaged over the global batch.
    Lines are also printed, unless a live line is on the terminal: shorter ones if `lines` formats them, else the same.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        log = run.config.log
        lines = RunningLines(run.config.train.max_steps) if log.format == "short" else None
        return cls(run.run_dir / LOG_FILE, log.every, run.mesh.layout.world_size, lines)

    def __init__(self, path: Path, every: int, world_size: int, lines: RunningLines | None = None) -> None:
        super().__init__()
        self.file, self.every, self.world_size, self.lines = LineFile(path), every, world_size, lines

    def before_fit(self, start: int) -> None:
        self.file.open(append=bool(start))

    def after_step(self, record: StepRecord) -> None:
        super().after_step(record)
        if not record.is_read:
            return
        if record.skipped and not record.reason:
            self.tell(record.step, f"skipped: the gradient overflowed at loss scale {record.loss_scale:g}", "yellow")
        if record.step % self.every == 0 or record.step == 1:
            self._print(step_line(self._since, self.world_size), lambda lines: lines.step(self._since))
            self._since.clear()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._print(
            f"global step {record.step}, validation loss: {record.loss:.9f}, tokens: {record.tokens}, "
            f"eval_cost: {record.seconds:.5f} sec"
            + "".join(f", loss of {name}: {loss:.9f}" for name, loss in record.corpus_losses.items())
            + "".join(f", {name}: {mean:.9f}" for name, mean in record.terms.items()),
            lambda lines: lines.evaluation(record),
        )

    def close(self) -> None:
        self.file.close()

    def tell(self, step: int, what: str, style: str) -> None:
        self._print(f"global step {step}, {what}", lambda lines: lines.of(step, what))

    def _print(self, line: str, shorter: Callable[[RunningLines], str]) -> None:
        self.file.write(line)
        if not (on_terminal() and "live_line" in added("FIRST_CALLBACKS")):
            say(line if self.lines is None else shorter(self.lines))
