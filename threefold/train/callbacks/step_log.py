"""RUN/train.log, the step log as text in the format of PaddleFleetX, and RUN/phases.json, the seconds of each phase."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from threefold.byte_sizes import format_bytes
from threefold.output import replace_link
from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    LineFile,
    RunContext,
    StepRecord,
    on_terminal,
    reason_of,
    say,
)
from threefold.train.performance import MeanRates

FILE = "train.log"


class StepLog(Callback):
    """Write a line every `every` steps, and one for each evaluation, checkpoint and early stop; a resumed run appends.

    Times, speeds and tokens per second (tokens read, without padding, in total and per rank) are averages since the
    previous line; loss and learning rate are those of the line's step, with the loss averaged over the global batch.
    `emit` receives each line as well.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        emit = (lambda _: None) if on_terminal() else say
        return cls(run.run_dir / FILE, run.config.log.every, run.mesh.layout.world_size, emit, say)

    def __init__(
        self, path: Path, every: int, world_size: int, emit: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        self.every, self.world_size, self.emit = every, world_size, emit
        self._file = LineFile(path, say)
        self._since: list[StepRecord] = []
        self._told = ""

    def before_fit(self, start: int) -> None:
        self._file.open(append=bool(start))

    def after_step(self, record: StepRecord) -> None:
        if record.reason and record.reason != self._told:  # once for a range of steps
            self._write(f"global step {record.step}, skipped: {record.reason}")
        self._told = record.reason
        if not record.is_read:
            return
        self._since.append(record)
        if record.skipped and not record.reason:
            self._write(
                f"global step {record.step}, skipped: the gradient overflowed at loss scale {record.loss_scale:g}"
            )
        if record.step % self.every == 0 or record.step == 1:
            self._write(step_line(self._since, self.world_size))
            self._since = []

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._write(f"global step {step}, rolled back to step {start}: {reason}")
        self._since = []

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._write(
            f"global step {record.step}, validation loss: {record.loss:.9f}, tokens: {record.tokens}, "
            f"eval_cost: {record.seconds:.5f} sec"
            + "".join(f", loss of {name}: {loss:.9f}" for name, loss in record.corpus_losses.items())
            + "".join(f", {name}: {mean:.9f}" for name, mean in record.terms.items())
        )

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._write(f"global step {step}, checkpoint: {path}")

    def after_stop(self, step: int, reason: str) -> None:
        self._write(f"global step {step}, stopped: {reason}")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line)
        self.emit(line)


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
    rates = MeanRates()
    for record in since:
        rates.add(record.seconds, record.performance)
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


class PhaseTimers(Callback):
    """Sum the seconds of each phase on rank 0, and write and print them at the end.

    The phases of a step are `data` (waiting for the batch), `callbacks` (their `before_step`), `forward_backward` (with
    gradient synchronization) and `update` (with the exchange of loss and gradient norm); further phases are
    `evaluation` and `checkpoint`, for an asynchronous save only the time that steps wait. On a GPU the forward and
    backward passes show in `update`, which waits for them.

    Args:
        path: path of the file; a relative one is in the run's folder.

    Attributes:
        seconds: seconds by phase.
    """

    def __init__(self, path: str | Path = "phases.json") -> None:
        self.path = Path(path)
        phases = ("data", "callbacks", "forward_backward", "update", "evaluation", "checkpoint")
        self.seconds = dict.fromkeys(phases, 0.0)
        self._saving: float | None = None

    def setup(self, run: RunContext) -> None:
        self.path = run.run_dir / self.path

    def after_step(self, record: StepRecord) -> None:
        for phase, seconds in record.phases.items():
            self.seconds[phase] += seconds

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.seconds["evaluation"] += record.seconds

    def before_checkpoint(self, step: int) -> None:
        self._saving = time.perf_counter()

    def after_staging(self, step: int) -> None:
        self._saved()

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._saved()

    def _saved(self) -> None:
        if self._saving is not None:
            self.seconds["checkpoint"] += time.perf_counter() - self._saving
            self._saving = None

    def after_fit(self) -> None:
        total = sum(self.seconds.values()) or 1.0
        parts = (f"{phase} {seconds:.2f} s ({seconds / total:.0%})" for phase, seconds in self.seconds.items())
        say(f"Phases: {', '.join(parts)}.")

    def close(self) -> None:
        try:
            replace_link(self.path).write_text(json.dumps(self.seconds, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"Warning: {self.path} cannot be written ({reason_of(error)}).")
