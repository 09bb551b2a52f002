"""Metrics of every step, written to RUN/metrics.jsonl, and the base of other callbacks that write lines to a file."""

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from threefold.doors import hook
from threefold.foreign import open_own
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say
from threefold.train.callbacks.metrics_reading import drop_lines_after
from threefold.train.callbacks.records import EvaluationRecord, StepRecord

FILE, GOODPUT_FILE = "metrics.jsonl", "goodput.json"
LARGEST_BACKLOG = 1 << 20  # bytes of lines that are kept in memory until a full disk has space again


def read_goodput(ledger: Path) -> Any:
    """Return the goodput in a run's ledger (`threefold.report.goodput`); None if nothing is known of it."""
    goodput = hook("goodput")
    return goodput and goodput.read(ledger)


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
        self._descriptor = open_own(self.path, os.O_APPEND | (0 if append else os.O_TRUNC))
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


class RunFile(Callback):
    """Base class of callbacks that write lines to a file, from the starting point of the run on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = LineFile(self.path)

    def before_fit(self, start: int) -> None:
        self.file.open(append=bool(start))

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.file.close()
        self.before_fit(start)

    def close(self) -> None:
        self.file.close()


class MetricsFile(RunFile):
    """Write the metrics of every step and evaluation, and the goodput at every checkpoint, as JSON lines.

    A resumed run removes the steps after its starting point, then appends. Damaged lines of the existing file are
    removed, with one warning. Without a `ledger` no goodput is written.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / FILE, run.run_dir / GOODPUT_FILE)

    def __init__(self, path: Path, ledger: Path | None = None) -> None:
        super().__init__(path)
        self.ledger = ledger

    def before_fit(self, start: int) -> None:
        if start:
            try:
                drop_lines_after(self.path, start)
            except OSError as error:
                say(
                    f"Warning: {self.path} cannot be rewritten ({reason_of(error)}); the steps after {start} that are "
                    "made again follow at its end."
                )
        super().before_fit(start)

    def after_step(self, record: StepRecord) -> None:
        values: dict[str, Any] = {
            "step": record.step,
            "loss": _number(record.loss),
            "grad_norm": _number(record.grad_norm),
            "lr": record.lr,
            "tokens": record.tokens,
            "tokens_per_second": round(record.tokens_per_second, 1),
            "seconds": round(record.seconds, 6),
        }
        if record.phases:
            values["phases"] = {phase: round(seconds, 6) for phase, seconds in record.phases.items()}
        if (used := record.performance) is not None:
            if used.flops_per_second is not None:
                values["tflops"] = float(f"{used.flops_per_second / 1e12:.4g}")
            if used.mfu is not None:
                values["mfu"] = float(f"{used.mfu:.4g}")
            values |= {name: getattr(used, name) for name in ("memory", "largest_memory", "largest_rank")}
            values |= {"waited": round(used.waited, 6), "wall_clock": round(used.wall_clock, 3)}
        if record.loss_scale is not None:
            values |= {"loss_scale": record.loss_scale, "skipped": record.skipped}
        if record.reason:
            values |= {"skipped": True, "reason": record.reason}
        rest = {
            "epochs": {name: round(epochs, 6) for name, epochs in record.corpus_epochs.items()},
            "consumed_samples": record.consumed_samples,
            "terms": _numbers(record.terms),
            "fingerprint": record.fingerprint,
            "unknown_calls": list(record.unknown_calls),
        }
        values |= {name: value for name, value in rest.items() if value not in (None, {}, [])}
        self.file.write(json.dumps(values))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        values: dict[str, Any] = {"step": record.step, "valid_loss": _number(record.loss)}
        values["valid_tokens"] = record.tokens
        if record.corpus_losses:
            values["valid_losses"] = _numbers(record.corpus_losses)
        if record.terms:
            values["valid_terms"] = _numbers(record.terms)
        self.file.write(json.dumps(values))

    def after_checkpoint(self, step: int, path: Path) -> None:
        if self.ledger is not None and (found := read_goodput(self.ledger)):
            values = {"step": step, "goodput": round(found.share, 6), "seconds": found.seconds()}
            self.file.write(json.dumps({**values, "restarts": found.restarts}))


def _number(value: float) -> float | None:
    """Return a number that JSON supports: None for NaN and infinity."""
    return value if isfinite(value) else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}
