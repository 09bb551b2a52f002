"""Files of a run's records: metrics.jsonl, and metrics.csv, epochs.csv and phases.json if the run asks for them."""

import csv
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from threefold.output import replace_link, sync
from threefold.train.attempt import GOODPUT_FILE, Goodput
from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    Performance,
    RunContext,
    StepRecord,
    WriteFailures,
    evaluation_values,
    on_terminal,
    reason_of,
    say,
    step_values,
)

FILE = "metrics.jsonl"
LARGEST_BACKLOG = 1 << 20
"""Bytes of lines that are kept in memory until a full disk has space again."""


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
        """Open the file, and empty it unless `append`."""
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
        """Close the file if it is open."""
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

    def open(self, start: int) -> None:
        """Open the file to go on after `start` updates."""
        self.file.open(append=bool(start))

    def before_fit(self, start: int) -> None:
        self.open(start)

    def close(self) -> None:
        self.file.close()


class MetricsFile(RunFile):
    """Write the metrics of every step and evaluation, and the goodput at every checkpoint, as JSON lines.

    A resumed run removes the steps after its starting point, then appends. Damaged lines of the existing file are
    removed, with one warning.

    Args:
        path: path of the file.
        ledger: path of the goodput ledger; None to write no goodput.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / FILE, run.run_dir / GOODPUT_FILE)

    def __init__(self, path: Path, ledger: Path | None = None) -> None:
        super().__init__(path)
        self.ledger = ledger

    def open(self, start: int) -> None:
        if start and self.path.is_file():
            try:
                _rewrite(self.path, start)
            except OSError as error:
                say(
                    f"Warning: {self.path} cannot be rewritten ({error.strerror}); the steps after {start} that are "
                    "made again follow at its end."
                )
        super().open(start)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.file.close()
        self.open(start)

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
        if record.performance is not None:
            values |= _of_hardware(record.performance)
        if record.loss_scale is not None:
            values |= {"loss_scale": record.loss_scale, "skipped": record.skipped}
        if record.reason:
            values |= {"skipped": True, "reason": record.reason}
        if record.corpus_epochs:
            values["epochs"] = {name: round(epochs, 6) for name, epochs in record.corpus_epochs.items()}
        if record.consumed_samples is not None:
            values["consumed_samples"] = record.consumed_samples
        if record.terms:
            values["terms"] = _numbers(record.terms)
        self.file.write(json.dumps(values))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        values: dict[str, Any] = {
            "step": record.step,
            "valid_loss": _number(record.loss),
            "valid_tokens": record.tokens,
        }
        if record.corpus_losses:
            values["valid_losses"] = _numbers(record.corpus_losses)
        if record.terms:
            values["valid_terms"] = _numbers(record.terms)
        self.file.write(json.dumps(values))

    def after_checkpoint(self, step: int, path: Path) -> None:
        if self.ledger is not None and (found := Goodput.read(self.ledger)):
            values = {"step": step, "goodput": round(found.share, 6), "seconds": found.seconds()}
            self.file.write(json.dumps({**values, "restarts": found.restarts}))


def _of_hardware(used: Performance) -> dict[str, Any]:
    rates: dict[str, Any] = {}
    if used.flops_per_second is not None:
        rates["tflops"] = float(f"{used.flops_per_second / 1e12:.4g}")
    if used.mfu is not None:
        rates["mfu"] = float(f"{used.mfu:.4g}")
    return rates | {
        "memory": used.memory,
        "largest_memory": used.largest_memory,
        "largest_rank": used.largest_rank,
        "waited": round(used.waited, 6),
        "wall_clock": round(used.wall_clock, 3),
    }


def _number(value: float) -> float | None:
    """Return a number that JSON supports: None for NaN and infinity."""
    return value if isfinite(value) else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _rewrite(path: Path, last: int) -> None:
    """Keep the good lines up to step `last`; atomic, so a kill leaves the old file or the new one."""
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


_BEGINNING = b'{"step": '
_KINDS = ("loss", "valid_loss", "goodput")
"""Distinctive key of each kind of line, in the order of the lines of one step."""
MEASURED = (
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
"""Keys of a step that measure time and hardware; all others are the same whenever the step is made."""
_NAMED_LINES = 5
"""Maximum number of damaged lines that a warning lists."""


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
        parts = []
        if self.damaged:
            parts.append(f"{_numbered(self.damaged)} damaged")
        if self.repeated:
            parts.append(f"{_numbered(self.repeated)} repeated by a later line of the same step")
        return f"Warning: {path} has {' and '.join(parts)}; the other lines are kept." if parts else None


def _numbered(numbers: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, numbers[:_NAMED_LINES]))
    more = f" and {len(numbers) - _NAMED_LINES} more" if len(numbers) > _NAMED_LINES else ""
    return f"line {listed}" if len(numbers) == 1 else f"lines {listed}{more}"


def read_metrics_file(path: Path) -> Metrics:
    """Read all valid lines of a metrics file; none if the file does not exist."""
    if not path.is_file():
        return Metrics(())
    found: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
    damaged, repeated = [], []
    with path.open("rb") as file:
        for number, content in enumerate(file, 1):
            line = _object(content)
            if line is None and content.endswith(b"\n") and content.strip():
                damaged.append(number)
                line = _object(content[max(0, content.rfind(_BEGINNING)) :])  # a complete line after half of one
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


class Table(RunFile):
    """CSV file with a header; a resumed run keeps rows by the whole number in column `key`.

    Columns `term/NAME` and `valid_term/NAME` are added when a row has them, and are empty in the rows so far.
    """

    def __init__(self, path: str | Path, columns: Sequence[str], key: str) -> None:
        super().__init__(path)
        self.columns, self.key = tuple(columns), key

    def setup(self, run: RunContext) -> None:
        self.path = run.run_dir / self.path
        self.file = LineFile(self.path)

    def open(self, start: int) -> None:
        self._begin(self._rows(start) if start else [])

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.file.close()
        self.open(start)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; columns that it lacks are empty."""
        terms = (column for column in row if column.startswith(("term/", "valid_term/")))
        if new := tuple(column for column in terms if column not in self.columns):
            rows = self._rows()
            self.columns += new
            self.file.close()
            self._begin(rows)
        self.file.write(_line([row.get(column, "") for column in self.columns]))

    def _begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.file.open(append=False)
        self.file.write(_line(self.columns))
        for row in rows:
            self.write(row)

    def _rows(self, last: float = inf) -> list[dict[str, str]]:
        """Return the rows of the existing file up to `last`; none if it has other columns, except those of terms."""
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
                reader = csv.DictReader(file)
                found, own = tuple(reader.fieldnames or ()), len(self.columns)
                if found[:own] != self.columns or any("term/" not in column for column in found[own:]):
                    return []
                rows, self.columns = list(reader), found
        except (OSError, csv.Error):
            return []
        whole = [row for row in rows if None not in row.values() and (row[self.key] or "").isdecimal()]
        return [row for row in whole if int(row[self.key]) <= last]


def _line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().removesuffix("\n")


_OF_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "epoch", "loss_scale", "tokens", "seconds", "skipped")


class CSVLog(Table):
    """Write one row per step, and one per evaluation, whose other columns are empty.

    A loss of several terms adds columns `term/NAME` and `valid_term/NAME`. A resumed run drops the rows after its start
    and appends. A failure to write is reported once.

    Args:
        path: path of the file; a relative one is in the run's folder.
    """

    def __init__(self, path: str | Path = "metrics.csv") -> None:
        super().__init__(path, ("step", *_OF_STEP, "valid_loss", "valid_tokens"), "step")

    def after_step(self, record: StepRecord) -> None:
        values = {**step_values(record), "step": record.step, "tokens": record.tokens, "seconds": record.seconds}
        self.write({**values, "skipped": int(record.skipped)})

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.write({**evaluation_values(record), "step": record.step, "valid_tokens": record.tokens})


@dataclass
class EpochRecord:
    """Results of an epoch's steps, as far as this process made them.

    Attributes:
        epoch: 0 for the first.
        first_step, last_step: range of these steps.
        loss: mean over the tokens of these steps that were trained on.
        valid_loss: loss of the last evaluation after one of these steps; None without one.
        tokens: number of tokens trained on; number of samples for a data set whose samples are not tokens.
        seconds: duration of the steps.
        terms: for a loss of several terms, the mean of each by name, over the steps in which it counts something,
            weighted by their tokens.
    """

    epoch: int
    first_step: int
    last_step: int
    loss: float = 0.0
    valid_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self.last_step = record.step
        self.seconds += record.seconds
        if not record.skipped and record.tokens:
            self.tokens += record.tokens
            self.loss += (record.loss - self.loss) * record.tokens / self.tokens
            for name, mean in record.terms.items():
                if isfinite(mean):
                    weight = self._weights[name] = self._weights.get(name, 0) + record.tokens
                    before = self.terms.setdefault(name, 0.0)
                    self.terms[name] += (mean - before) * record.tokens / weight


class EpochMetrics(Table):
    """Write one row per epoch, after the evaluation at its end; the last epoch may be incomplete.

    A step belongs to the epoch in which it begins. A resumed run drops the rows after its start and appends; if it
    starts within an epoch, that epoch's row covers the steps from there on. A loss of several terms adds a column
    `term/NAME` for each.

    Args:
        path: path of the file; a relative one is in the run's folder.

    Attributes:
        epochs: records so far.
    """

    def __init__(self, path: str | Path = "epochs.csv") -> None:
        super().__init__(path, tuple(_values(EpochRecord(0, 0, 0))), "last_step")
        self.epochs: list[EpochRecord] = []
        self._current: EpochRecord | None = None

    def before_epoch(self, epoch: int) -> None:
        self._finish()

    def after_step(self, record: StepRecord) -> None:
        if self._current is None:
            self._current = EpochRecord(record.epoch, record.step, record.step)
        self._current.add(record)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.epochs = [epoch for epoch in self.epochs if epoch.last_step <= start]
        self._current = None
        super().after_rollback(step, start, reason)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        if self._current is not None:
            self._current.valid_loss = record.loss

    def after_fit(self) -> None:
        self._finish()

    def close(self) -> None:
        self._finish()
        super().close()

    def _finish(self) -> None:
        found, self._current = self._current, None
        if found is None:
            return
        self.epochs.append(found)
        self.write({key: "" if value is None else value for key, value in _values(found).items()})
        if not on_terminal():
            valid = "" if found.valid_loss is None else f", validation loss: {found.valid_loss:.9f}"
            say(
                f"epoch {found.epoch}, steps: {found.first_step} to {found.last_step}, loss: {found.loss:.9f}{valid}, "
                f"tokens: {found.tokens}, time: {found.seconds:.2f} sec"
                + "".join(f", {name}: {mean:.9f}" for name, mean in found.terms.items())
            )


def _values(record: EpochRecord) -> dict[str, Any]:
    values = {name: value for name, value in asdict(record).items() if name not in ("terms", "_weights")}
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}


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
