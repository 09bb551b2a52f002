"""Metrics of every step in RUN/metrics.jsonl: their writing, and their reading where lines may be damaged."""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from threefold.files import first_of
from threefold.output import replace_link, sync
from threefold.train.callbacks.base import Callback, RunContext, say
from threefold.train.callbacks.goodput import GOODPUT_FILE, Goodput, WriteFailures
from threefold.train.callbacks.records import EvaluationRecord, StepRecord

FILE = "metrics.jsonl"
LARGEST_BACKLOG = 1 << 20  # bytes of lines that are kept in memory until a full disk has space again


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
        # Non-blocking, as a FIFO of this name would block the run.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | (0 if append else os.O_TRUNC)
        self._descriptor = os.open(replace_link(self.path), flags, 0o644)
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
        if start and self.path.is_file():
            try:
                drop_lines_after(self.path, start)
            except OSError as error:
                say(
                    f"Warning: {self.path} cannot be rewritten ({error.strerror}); the steps after {start} that are "
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
        if self.ledger is not None and (found := Goodput.read(self.ledger)):
            values = {"step": step, "goodput": round(found.share, 6), "seconds": found.seconds()}
            self.file.write(json.dumps({**values, "restarts": found.restarts}))


def _number(value: float) -> float | None:
    """Return a number that JSON supports: None for NaN and infinity."""
    return value if isfinite(value) else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


_BEGINNING = b'{"step": '
_KINDS = ("loss", "valid_loss", "goodput")
"""Distinctive key of each kind of line, in the order of the lines of one step."""
MEASURED = (  # keys of a step that measure time and hardware; all others are the same whenever the step is made
    "tokens_per_second",
    "seconds",
    "phases",
    "tflops",
    "mfu",
    "memory",
    "largest_memory",
    "largest_rank",
    "waited",
    "wall_clock",
)
_NAMED_LINES = 5  # maximum number of damaged lines that a warning lists


@dataclass(frozen=True)
class Metrics:
    """Content of a metrics file.

    Attributes:
        lines: objects by step, a step before its evaluation; the last of several for the same step.
        goodput: goodput objects by step.
        damaged: numbers, from 1, of invalid lines; a last line that was cut short does not count.
        repeated: numbers of lines that a later line of the same step replaces.
    """

    lines: tuple[dict[str, Any], ...]
    damaged: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    goodput: tuple[dict[str, Any], ...] = ()

    def warning(self, path: Path) -> str | None:
        """Return a sentence about the removed lines; None if there are none."""
        kinds = {"damaged": self.damaged, "repeated by a later line of the same step": self.repeated}
        parts = [
            f"line{'s' if len(numbers) > 1 else ''} {first_of(numbers, _NAMED_LINES)} {what}"
            for what, numbers in kinds.items()
            if numbers
        ]
        return f"Warning: {path} has {' and '.join(parts)}; the other lines are kept." if parts else None


def read_metrics_file(path: Path) -> Metrics:
    """Read all valid lines of a metrics file; none if the file does not exist."""
    if not path.is_file():
        return Metrics(())
    found: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
    damaged, repeated = [], []
    with path.open("rb") as file:
        for number, content in enumerate(file, 1):
            line, is_whole = parse_line(content)
            if not is_whole and content.endswith(b"\n"):
                damaged.append(number)
            if line is None:
                continue
            key = (line["step"], next(kind for kind, name in enumerate(_KINDS) if name in line))
            if key in found:
                repeated.append(found[key][0])
            found[key] = number, line
    lines = [(key[1], found[key][1]) for key in sorted(found)]
    ledger = _KINDS.index("goodput")
    return Metrics(
        tuple(line for kind, line in lines if kind != ledger),
        tuple(damaged),
        tuple(repeated),
        tuple(line for kind, line in lines if kind == ledger),
    )


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a metrics file that may be missing or damaged, as objects in step order."""
    yield from read_metrics_file(path).lines


def parse_line(content: bytes) -> tuple[dict[str, Any] | None, bool]:
    """Parse a line of a metrics file, with its end; return its object or None, and whether the line is valid or empty.

    A damaged line may end with a complete one, which is returned.
    """
    found = _object(content)
    if found is not None or not content.strip():
        return found, True
    if content.endswith(b"\n"):
        found = _object(content[max(0, content.rfind(_BEGINNING)) :])  # a complete line after half of one
    return found, False


def _object(content: bytes) -> dict[str, Any] | None:
    """Parse a line; None unless it is a valid step, evaluation or goodput."""
    try:
        # older versions wrote NaN for a loss that was not finite
        line = json.loads(content.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return None
    if "loss" in line:
        return line if _is_number(line["loss"]) and type(line.get("tokens")) is int else None
    if "goodput" in line:
        return line if _is_number(line["goodput"]) and isinstance(line.get("seconds"), dict) else None
    return line if "valid_loss" in line and _is_number(line["valid_loss"]) else None


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def drop_lines_after(path: Path, last: int) -> None:
    """Rewrite the file with its good lines up to step `last`; atomic, so a kill leaves the old file or the new one."""
    found = read_metrics_file(path)
    if warning := found.warning(path):
        say(warning)
    fresh = path.with_name(path.name + ".tmp")
    try:
        with replace_link(fresh).open("w", encoding="utf-8") as file:
            lines = sorted((*found.lines, *found.goodput), key=lambda line: int(line["step"]))
            file.writelines(json.dumps(line) + "\n" for line in lines if line["step"] <= last)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync(path.parent)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
