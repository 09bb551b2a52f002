"""Text output of a run: its log as RUN/train.log, and the summary at the end."""

import sys
import time
from contextlib import suppress
from pathlib import Path

from threefold.errors import OutputLost
from threefold.files import counted, format_bytes
from threefold.train.callbacks import loss_curve, metrics, tensorboard
from threefold.train.callbacks.base import Callback, RunContext, clock, on_terminal, say
from threefold.train.callbacks.goodput import GOODPUT_FILE, Goodput
from threefold.train.callbacks.live_line import RunningLines
from threefold.train.callbacks.metrics import RunFile
from threefold.train.callbacks.records import EvaluationRecord, MeanRates, StepRecord

LOG_FILE = "train.log"
REPORT_FILE = "report.html"
"""Report of the run (`threefold.report.document`)."""


class StepLog(RunFile):
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
        super().__init__(path)
        self.every, self.world_size, self.lines = every, world_size, lines
        self._since: list[StepRecord] = []
        self._told = ""

    def after_step(self, record: StepRecord) -> None:
        if record.reason and record.reason != self._told:  # once for a range of steps
            self._write(record.step, f"skipped: {record.reason}")
        self._told = record.reason
        if not record.is_read:
            return
        self._since.append(record)
        if record.skipped and not record.reason:
            self._write(record.step, f"skipped: the gradient overflowed at loss scale {record.loss_scale:g}")
        if record.step % self.every == 0 or record.step == 1:
            self._print(
                step_line(self._since, self.world_size), None if self.lines is None else self.lines.step(self._since)
            )
            self._since = []

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._write(step, f"rolled back to step {start}: {reason}")
        self._since = []

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._print(
            f"global step {record.step}, validation loss: {record.loss:.9f}, tokens: {record.tokens}, "
            f"eval_cost: {record.seconds:.5f} sec"
            + "".join(f", loss of {name}: {loss:.9f}" for name, loss in record.corpus_losses.items())
            + "".join(f", {name}: {mean:.9f}" for name, mean in record.terms.items()),
            None if self.lines is None else self.lines.evaluation(record),
        )

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._write(step, f"checkpoint: {path}")

    def after_stop(self, step: int, reason: str) -> None:
        self._write(step, f"stopped: {reason}")

    def _write(self, step: int, what: str) -> None:
        self._print(f"global step {step}, {what}", None if self.lines is None else self.lines.of(step, what))

    def _print(self, line: str, shorter: str | None) -> None:
        self.file.write(line)
        if not on_terminal():
            say(line if shorter is None else shorter)


def step_line(since: list[StepRecord], ranks: int) -> str:
    """Format the line of the last of the steps `since` the previous line, of which there is at least one."""
    last, count = since[-1], len(since)
    seconds = sum(record.seconds for record in since)
    rate = sum(record.tokens_read for record in since) / seconds
    return (
        f"global step {last.step}, epoch: {last.epoch}, batch: {last.batch}, loss: {last.loss:.9f}, "
        f"avg_reader_cost: {sum(record.reader_cost for record in since) / count:.5f} sec, "
        f"avg_batch_cost: {seconds / count:.5f} sec, speed: {count / seconds:.2f} step/s, "
        f"ips_total: {rate:.0f} {last.unit}/s, ips: {rate / ranks:.0f} {last.unit}/s, learning rate: {last.lr:.5e}"
        + ("" if last.loss_scale is None else f", loss scale: {last.loss_scale:g}")
        + "".join(f", epoch of {name}: {epochs:.3g}" for name, epochs in last.corpus_epochs.items())
        + "".join(f", {name}: {mean:.9f}" for name, mean in last.terms.items())
        + _of_hardware(since)
    )


def _of_hardware(since: list[StepRecord]) -> str:
    """Format rates and times as averages over the steps, and the peak memory so far."""
    rates = MeanRates.over(since)
    if (last := rates.last) is None:
        return ""
    parts = [f"tflops: {rates.teraflops:.4g}"] if rates.flops else []
    parts += [f"mfu: {rates.mfu:.1%}"] if rates.mfu else []
    parts.append(f"memory: {format_bytes(last.memory)}")
    parts.append(f"max_memory: {format_bytes(last.largest_memory)} (rank {last.largest_rank})")
    costs = {phase: sum(record.phases.get(phase, 0.0) for record in since) for phase in ("forward_backward", "update")}
    costs["wait"] = sum(record.performance.waited for record in since if record.performance is not None)
    parts += [f"avg_{name}_cost: {seconds / len(since):.5f} sec" for name, seconds in costs.items()]
    return "".join(f", {part}" for part in [*parts, f"wall_clock: {last.wall_clock:.1f} sec"])


class Summary(Callback):
    """Print a table of the results after the last step, with those of `places` (label → file or folder) that exist."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        files = {"report": REPORT_FILE, "loss curve": loss_curve.FILE, "metrics": metrics.FILE}
        files["TensorBoard"] = tensorboard.TENSORBOARD_FOLDER
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
        """Return the name and value of each row."""
        if self._last is None:
            return []
        rows = [("training loss", f"{self._last.loss:.4f} at step {self._last.step}")]
        rows += [(f"  {name}", f"{mean:.4f}") for name, mean in self._last.terms.items()]
        if self._valid is not None:
            rows.append(("validation loss", f"{self._valid.loss:.4f} at step {self._valid.step}"))
            rows += [(f"  of {name}", f"{loss:.4f}") for name, loss in self._valid.corpus_losses.items()]
            rows += [(f"  {name}", f"{mean:.4f}") for name, mean in self._valid.terms.items()]
        unit, padded = self._last.unit, ""
        if self._padding:
            padded = f", {(self._read + self._padding) / self._seconds:,.0f} with padding"
        rows += [
            (f"{unit} trained on", f"{self._counted:,} in {counted(self._steps, 'step')}, those counted for the loss"),
            (f"{unit} read", f"{self._read:,}" + (f", and {self._padding:,} of padding" if self._padding else "")),
            ("time", f"{clock(self._elapsed())}, of which {clock(self._seconds)} in steps"),
            ("speed", f"{self._read / self._seconds:,.0f} {unit}/s read{padded}"),
            *self._of_hardware(),
        ]
        if self._last.fingerprint is not None:
            where = (
                "in every layout if those functions are exact" if self._unknown else "in every layout inside the grain"
            )
            told = f"{self._last.fingerprint} after step {self._last.step}, {where}"
            rows.append(("weights", told))
        if self.ledger is not None and (found := Goodput.read(self.ledger)):
            parts = {
                "steps": found.steps,
                "repeated steps": found.repeated,
                "evaluations": found.evaluating,
                "saving": found.saving,
                "starting": found.starting,
                "lost to restarts": found.lost,
            }
            listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
            restarts = f", {counted(found.restarts, 'restart')}" if found.restarts else ""
            rows.append(("goodput", f"{found.share:.1%} of {found.total:,.1f} s{restarts} ({listed})"))
        return rows + [(name, str(place)) for name, place in self.places.items() if place.exists()]

    def _elapsed(self) -> float:
        """Return the seconds since the run started; since its first step if that is not known."""
        if (last := self._rates.last) is None:
            return time.perf_counter() - self._started
        return last.wall_clock + time.perf_counter() - self._recorded

    def _of_hardware(self) -> list[tuple[str, str]]:
        rates, last = self._rates, self._rates.last
        if last is None:
            return []
        used = f", {rates.mfu:.1%} of the peak rate (MFU)" if rates.mfu else ""
        unit, scale = ("TFLOP/s", 1.0) if rates.teraflops >= 1 else ("GFLOP/s", 1000.0)
        rows = [("compute", f"{scale * rates.teraflops:,.1f} model {unit} a rank{used}")] if rates.flops else []
        most = f"{format_bytes(last.largest_memory)} on rank {last.largest_rank}, which takes most"
        return [*rows, ("memory", most if last.largest_rank else format_bytes(last.memory))]
