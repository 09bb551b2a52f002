"""RUN/metrics.jsonl: metrics of every step and evaluation, and goodput at every checkpoint, as JSON lines."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from threefold.output import replace_link, sync
from threefold.train.attempt import GOODPUT_FILE, Goodput
from threefold.train.callbacks.base import Callback, EvaluationRecord, LineFile, RunContext, StepRecord, say
from threefold.train.performance import Performance

FILE = "metrics.jsonl"
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


class MetricsFile(Callback):
    """Write the metrics file; a resumed run removes the steps after its starting point, then appends.

    Damaged lines of the existing file are removed, with one warning.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / FILE, say, run.run_dir / GOODPUT_FILE)

    def __init__(self, path: Path, say: Callable[[str], None], ledger: Path | None = None) -> None:
        self.path, self.say, self.ledger = path, say, ledger
        self._file = LineFile(path, say)

    def before_fit(self, start: int) -> None:
        self._open(start)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._file.close()
        self._open(start)

    def _open(self, start: int) -> None:
        if start and self.path.is_file():
            try:
                self._rewrite(start)
            except OSError as error:
                self.say(
                    f"Warning: {self.path} cannot be rewritten ({error.strerror}); the steps after {start} that are "
                    "made again follow at its end."
                )
        self._file.open(append=bool(start))

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
            values["terms"] = {name: _number(mean) for name, mean in record.terms.items()}
        self._file.write(json.dumps(values))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        values: dict[str, Any] = {
            "step": record.step,
            "valid_loss": _number(record.loss),
            "valid_tokens": record.tokens,
        }
        if record.corpus_losses:
            values["valid_losses"] = {name: _number(loss) for name, loss in record.corpus_losses.items()}
        if record.terms:
            values["valid_terms"] = {name: _number(mean) for name, mean in record.terms.items()}
        self._file.write(json.dumps(values))

    def after_checkpoint(self, step: int, path: Path) -> None:
        found = Goodput.read(self.ledger) if self.ledger is not None else None
        if found is not None:
            values = {"step": step, "goodput": round(found.share, 6), "seconds": found.seconds()}
            self._file.write(json.dumps({**values, "restarts": found.restarts}))

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, last: int) -> None:
        """Keep the good lines up to step `last`; atomic, so a kill leaves the old file or the new one."""
        found = read_metrics_file(self.path)
        if warning := found.warning(self.path):
            self.say(warning)
        fresh = self.path.with_name(self.path.name + ".tmp")
        try:
            with replace_link(fresh).open("w", encoding="utf-8") as file:
                lines = sorted((*found.lines, *found.goodput), key=lambda line: int(line["step"]))
                file.writelines(json.dumps(line) + "\n" for line in lines if line["step"] <= last)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
            sync(self.path.parent)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


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
