"""Log of a run, RUN/train.log, whose lines are also printed where no live line is on the terminal."""

import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from threefold.doors import added, hook
from threefold.files import format_bytes
from threefold.foreign import open_nofollow
from threefold.train.callbacks.base import Callback, RunContext, on_terminal, say
from threefold.train.callbacks.records import EvaluationRecord, MeanRates, StepRecord

LOG_FILE: Final = "train.log"
LARGEST_BACKLOG: Final = 1 << 20  # bytes of lines that are kept in memory until a full disk has space again


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
    Lines are also printed, unless a live line is on the terminal: shorter ones if `lines` (`RunningLines` of
    `threefold.report`) formats them, else the same.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        log, shorter = run.config.log, hook("running_lines")
        lines = shorter(run.config.train.max_steps) if shorter is not None and log.format == "short" else None
        return cls(run.run_dir / LOG_FILE, log.every, run.mesh.layout.world_size, lines)

    def __init__(self, path: Path, every: int, world_size: int, lines: Any = None) -> None:
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

    def _print(self, line: str, shorter: Callable[[Any], str]) -> None:
        self.file.write(line)
        if not (on_terminal() and "live_line" in added("FIRST_CALLBACKS")):
            say(line if self.lines is None else shorter(self.lines))


def step_line(since: Sequence[StepRecord], ranks: int) -> str:
    """Format the line of the last of the steps `since` the previous line, with averages over them."""
    last, count = since[-1], len(since)
    seconds = sum(record.seconds for record in since)
    rate = sum(record.tokens_read for record in since) / seconds
    parts = [
        f"global step {last.step}, epoch: {last.epoch}, batch: {last.batch}, loss: {last.loss:.9f}",
        f"avg_reader_cost: {sum(record.reader_cost for record in since) / count:.5f} sec",
        f"avg_batch_cost: {seconds / count:.5f} sec, speed: {count / seconds:.2f} step/s",
        f"ips_total: {rate:.0f} {last.unit}/s, ips: {rate / ranks:.0f} {last.unit}/s, learning rate: {last.lr:.5e}",
    ]
    if last.loss_scale is not None:
        parts.append(f"loss scale: {last.loss_scale:g}")
    parts += [f"epoch of {name}: {epochs:.3g}" for name, epochs in last.corpus_epochs.items()]
    parts += [f"{name}: {mean:.9f}" for name, mean in last.terms.items()]
    rates = MeanRates.over(since)
    if (used := rates.last) is not None:
        parts += [f"tflops: {rates.teraflops:.4g}"] if rates.flops else []
        parts += [f"mfu: {rates.mfu:.1%}"] if rates.mfu else []
        parts.append(f"memory: {format_bytes(used.memory)}")
        parts.append(f"max_memory: {format_bytes(used.largest_memory)} (rank {used.largest_rank})")
        costs = {name: sum(record.phases.get(name, 0.0) for record in since) for name in ("forward_backward", "update")}
        costs["wait"] = sum(record.performance.waited for record in since if record.performance is not None)
        parts += [f"avg_{name}_cost: {total / count:.5f} sec" for name, total in costs.items()]
        parts.append(f"wall_clock: {used.wall_clock:.1f} sec")
    return ", ".join(parts)


class WriteFailures:
    """Context that reports the first `OSError` of the writes to a file, and lets the run go on without it."""

    def __init__(self, path: Path) -> None:
        self.path, self._reported = path, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        if not self._reported:
            self._reported = True
            say(f"Warning: {self.path} cannot be written ({error.strerror}); training continues without it.")
        return True


class LineFile:
    """Text file to which whole lines are appended; the first failure is reported once, and each line retries.

    A line that a full disk cut short is truncated before the next one is written, so the file never contains half a
    line in its middle.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._failures = path, WriteFailures(path)
        self._descriptor: int | None = None
        self._size: int | None = None
        self._backlog: list[bytes] = []

    def open(self, *, append: bool) -> None:
        with self._failures:
            self._open(append)

    def write(self, line: str) -> None:
        """Append `line`, after the lines that could not be written before it."""
        self._backlog.append(f"{line}\n".encode())
        while len(self._backlog) > 1 and sum(map(len, self._backlog)) > LARGEST_BACKLOG:
            del self._backlog[0]
        with self._failures:
            if self._descriptor is None:
                self._open(append=True)
            while self._backlog:
                self._append(self._backlog[0])
                del self._backlog[0]

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self, append: bool) -> None:
        self._descriptor = open_nofollow(self.path, os.O_APPEND | (0 if append else os.O_TRUNC))
        found = os.fstat(self._descriptor)
        self._size = found.st_size if stat.S_ISREG(found.st_mode) else None

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            if self._size is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise
        if self._size is not None:
            self._size += len(data)
