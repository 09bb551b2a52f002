"""A run's metrics.jsonl: the callback that writes it, its reader, and the cut that a resumed run begins with."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from threefold.files import first_of, load_json
from threefold.foreign import FolderFiles, lines_of, open_nofollow
from threefold.output import sync
from threefold.report.door import GOODPUT_FILE, METRICS_FILE
from threefold.report.goodput import Goodput
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.callbacks.step_log import LineFile

_BEGINNING = b'{"step": '
_KINDS = ("loss", "logged", "valid_loss", "valid_logged", "goodput")
"""Distinctive key of each kind of line, in the order of the lines of one step."""
LOGGED = ("logged", "valid_logged")
"""Kinds of lines with the values that callbacks logged, after a step and after an evaluation."""
_NAMED_LINES = 5  # maximum number of damaged lines that a warning lists


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
        return cls(run.run_dir / METRICS_FILE, run.run_dir / GOODPUT_FILE)

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
        if record.average_loss is not None:
            values["valid_loss_average"] = _number(record.average_loss)
        self.file.write(json.dumps(values))

    def after_log(self, record: StepRecord | EvaluationRecord) -> None:
        kind = LOGGED[isinstance(record, EvaluationRecord)]
        self.file.write(json.dumps({"step": record.step, kind: _numbers(record.logged)}))

    def after_checkpoint(self, step: int, path: Path) -> None:
        if self.ledger is not None and (found := Goodput.read(self.ledger)):
            values = {"step": step, "goodput": round(found.fraction, 6), "seconds": found.seconds()}
            self.file.write(json.dumps({**values, "restarts": found.restarts}))


def _number(value: float) -> float | None:
    """Return a number that JSON supports: None for NaN and infinity."""
    return value if isfinite(value) else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


@dataclass(frozen=True)
class Metrics:
    """Content of a metrics file.

    Attributes:
        lines: objects by step, a step before its evaluation; the last of several for the same step.
        goodput: goodput objects by step.
        logged: objects with what callbacks logged, by step.
        damaged: numbers, from 1, of invalid lines; a last line that was cut short does not count.
        repeated: numbers of lines that a later line of the same step replaces.
    """

    lines: tuple[dict[str, Any], ...]
    damaged: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    goodput: tuple[dict[str, Any], ...] = ()
    logged: tuple[dict[str, Any], ...] = ()

    def warning(self, path: Path) -> str | None:
        """Return a sentence about the removed lines; None if there are none."""
        kinds = {"damaged": self.damaged, "repeated by a later line of the same step": self.repeated}
        parts = [
            f"line{'s' if len(numbers) > 1 else ''} {first_of(numbers, _NAMED_LINES)} {what}"
            for what, numbers in kinds.items()
            if numbers
        ]
        return f"Warning: {path} has {' and '.join(parts)}; the other lines are kept." if parts else None

    def gap(self, path: Path, last: int) -> str | None:
        """Return a sentence about the steps up to `last` that have no line; None if there are none."""
        known, ranges = {line["step"] for line in self.lines if "loss" in line}, list[list[int]]()
        for step in range(1, last + 1):
            if step not in known and ranges and ranges[-1][1] == step - 1:
                ranges[-1][1] = step
            elif step not in known:
                ranges.append([step, step])
        if not ranges:
            return None
        names = first_of([f"{first} to {end}" if first < end else str(first) for first, end in ranges], _NAMED_LINES)
        steps = "step" if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else "steps"
        return (
            f"Warning: {path} has no line of {steps} {names}, though the run resumes after step {last:,}: the file was "
            "cut, or these were made in another folder; training goes on, and curve and report are without them."
        )


def read_metrics_file(path: Path) -> Metrics:
    """Read all valid lines of a metrics file; none if it does not exist, OSError if it may not be read."""
    files = FolderFiles(path.parent)
    if not files.holds(path.name):
        return Metrics(())
    found: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
    damaged, repeated = [], []
    with files.record(path.name) as file:
        for number, content in enumerate(lines_of(file), 1):
            line, is_whole = parse_line(content)
            if not is_whole and content.endswith(b"\n"):
                damaged.append(number)
            if line is None:
                continue
            key = (line["step"], next(kind for kind, name in enumerate(_KINDS) if name in line))
            if key in found:
                repeated.append(found[key][0])
            found[key] = number, line
    lines = [(_KINDS[key[1]], found[key][1]) for key in sorted(found)]
    return Metrics(
        tuple(line for kind, line in lines if kind in ("loss", "valid_loss")),
        tuple(damaged),
        tuple(repeated),
        tuple(line for kind, line in lines if kind == "goodput"),
        tuple(line for kind, line in lines if kind in LOGGED),
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


def drop_lines_after(path: Path, last: int) -> None:
    """Rewrite the file with its good lines up to step `last`, and tell which of these steps have none.

    It is atomic, so a kill leaves the old file or the new one.
    """
    found = read_metrics_file(path)
    for warning in (found.warning(path), found.gap(path, last)):
        if warning is not None:
            say(warning)
    fresh = path.with_name(path.name + ".tmp")
    try:
        lines = sorted((*found.lines, *found.logged, *found.goodput), key=lambda line: int(line["step"]))
        with open(open_nofollow(fresh), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines if line["step"] <= last)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync(path.parent)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _object(content: bytes) -> dict[str, Any] | None:
    """Parse a line; None unless it is a valid step, evaluation or goodput."""
    try:
        line = load_json(content.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return None
    if "loss" in line:
        return line if _is_number(line["loss"]) and type(line.get("tokens")) is int else None
    if "goodput" in line:
        return line if _is_number(line["goodput"]) and isinstance(line.get("seconds"), dict) else None
    if any(kind in line for kind in LOGGED):
        return line if all(isinstance(line.get(kind, {}), dict) for kind in LOGGED) else None
    return line if "valid_loss" in line and _is_number(line["valid_loss"]) else None


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
