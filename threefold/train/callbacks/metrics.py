"""Files of every run's records: RUN/metrics.jsonl, the ledger of its time (RUN/goodput.json) and TensorBoard's."""

import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, Final

from threefold.output import replace_link, sync
from threefold.train.attempt import GOODPUT_FILE, LEDGER_SIZE, Attempt, Goodput
from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    RunContext,
    StepRecord,
    WriteFailures,
    evaluation_values,
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

    def before_fit(self, start: int) -> None:
        if start and self.path.is_file():
            try:
                _rewrite(self.path, start)
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


class GoodputLedger(Callback):
    """Write the goodput ledger of a run. A failure to write is reported once."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / GOODPUT_FILE, run.attempt)

    def __init__(self, path: Path, attempt: Attempt) -> None:
        self.path, self.attempt, self._failures = path, attempt, WriteFailures(path)
        self.goodput = Goodput()
        self._last, self._started = time.perf_counter(), False
        self._descriptor: int | None = None
        self._saving = False

    def before_fit(self, start: int) -> None:
        known = Goodput.read(self.path) if start or self.attempt.number else None
        self.goodput = goodput = known or Goodput()
        goodput.attempts += 1
        goodput.restarts += self.attempt.number > 0
        goodput.step, goodput.furthest = start, max(start, goodput.furthest)
        if not self.attempt.number:
            goodput.at = self.attempt.began
        with self._failures:
            # Non-blocking, as a FIFO of this name would block the run.
            self._descriptor = os.open(replace_link(self.path), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            os.ftruncate(self._descriptor, LEDGER_SIZE)
        self._write()

    def before_step(self, step: int, batch: Any) -> None:
        if not self._started:
            self._start()

    def after_step(self, record: StepRecord) -> None:
        passed, goodput = self._pass(), self.goodput
        spent = min(passed, record.seconds - record.phases.get("callbacks", 0.0))
        if record.step > goodput.furthest:
            goodput.steps += spent
        else:
            goodput.repeated += spent
        goodput.step, goodput.furthest = record.step, max(record.step, goodput.furthest)
        self._write()

    def before_evaluation(self, step: int) -> None:
        self._pass()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.goodput.evaluating += self._pass()
        self._write()

    def before_checkpoint(self, step: int) -> None:
        if not self._started:  # stopped before the first step
            self._start()
        self._pass()
        self._saving = True

    def after_staging(self, step: int) -> None:
        """Count the time that the steps waited for a checkpoint; the rest of it may be written in the background."""
        if self._saving:
            self.goodput.saving += self._pass()
        self._saving = False

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.after_staging(step)
        self._write()

    def after_fit(self) -> None:
        if self._started:
            self._pass()
            self._write()

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _start(self) -> None:
        goodput, self._started = self.goodput, True
        restarted = self.attempt.number and goodput.at
        passed = max(0.0, time.time() - (goodput.at if restarted else self.attempt.began))
        goodput.total += passed
        if restarted:
            goodput.lost += passed
        else:
            goodput.starting += passed
        self._last = time.perf_counter()

    def _pass(self) -> float:
        """Add the time since the last event to the total, and return it."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.goodput.total += passed
        return passed

    def _write(self) -> None:
        """Overwrite the file; until the first step the last event stays, so a failing attempt loses the time since."""
        if self._started:
            self.goodput.at = time.time()
        if self._descriptor is not None:
            with self._failures:
                os.pwrite(self._descriptor, self.goodput.text(), 0)


TENSORBOARD_FOLDER = "tensorboard"
SECONDS_BETWEEN_FLUSHES = 10


def import_writer() -> None:
    """Import the event-file writer once in a launcher that may restart its ranks."""
    import tensorboard.compat.proto.event_pb2  # noqa: F401


_TAGS: Final = {
    "loss": "loss/train",
    "grad_norm": "gradient_norm",
    "lr": "learning_rate",
    "valid_loss": "loss/validation",
    "term/": "terms/",
    "valid_loss/": "loss/validation of ",
    "valid_term/": "terms/validation of ",
}
"""Tag in TensorBoard of a value, or of all values whose names begin so."""


class Tracker(Callback):
    """Base class of callbacks that send the values of each step and evaluation somewhere.

    A failure to send is reported once, and the training continues without.

    Attributes:
        service: what is warned of, such as `MLflow cannot log`.
        connection: object that is sent to; None before it is made, and when it is closed or has failed.
    """

    service: str
    connection: Any = None

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send the values after `step`."""
        raise NotImplementedError

    def after_step(self, record: StepRecord) -> None:
        self.log(record.step, step_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.log(record.step, evaluation_values(record))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the values unless the connection has failed."""
        if self.connection is not None:
            with self.failures_reported():
                self.send(step, values)

    @contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Report a failure inside the block, and drop the connection."""
        try:
            yield
        except Exception as error:  # a network or disk failure is no reason to end a training
            lost, self.connection = self.connection, None
            with suppress(Exception):
                lost.close()
            say(f"Warning: {self.service} ({reason_of(error)}); training continues without it.")


class TensorBoard(Tracker):
    """Write event files; in TensorBoard, repeated steps of a resumed run replace the earlier ones.

    This uses TensorBoard's messages, but neither its `SummaryWriter`, whose thread would print a traceback on a full
    disk, nor its record writer, whose import takes a tenth of a second before the first step. The first failure is
    reported once, and the run continues without these files.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / TENSORBOARD_FOLDER)

    def __init__(self, folder: Path) -> None:
        self.folder, self.service = folder, f"{folder} cannot be written"
        self._flushed = 0.0

    def before_fit(self, start: int) -> None:
        with self.failures_reported():
            # Import only on the rank that writes.
            from tensorboard.compat.proto.event_pb2 import Event

            self.folder.mkdir(parents=True, exist_ok=True)
            begins = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            names = (self.folder / f"{begins}.{number}" for number in count())  # TensorBoard sorts the newest last
            self.connection = next(name for name in names if not os.path.lexists(name)).open("xb")
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._begin_after(start)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self._begin_after(start)

    def _begin_after(self, start: int) -> None:
        """Make TensorBoard drop the values of the steps after `start`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        session = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=start + 1, session_log=session))

    def after_step(self, record: StepRecord) -> None:
        if not record.is_read:
            return
        values = {name: value for name, value in step_values(record).items() if name != "epoch"}
        values["seconds/step"] = record.seconds
        if record.performance is not None:
            values["seconds/wall_clock"] = record.performance.wall_clock
            values["seconds/waited"] = record.performance.waited
        self.log(record.step, values)

    def close(self) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.close()
            self.connection = None

    def send(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=_tag(name), simple_value=value) for name, value in values.items()])
        self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def _add(self, event: Any) -> None:
        self.connection.write(framed(event.SerializeToString()))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self.connection.flush()
            self._flushed = time.monotonic()


def _tag(name: str) -> str:
    """Return the tag in TensorBoard of a value of `step_values` or `evaluation_values`."""
    begins = name[: name.find("/") + 1]
    return _TAGS.get(name) or _TAGS.get(begins, begins) + name[len(begins) :]


def framed(record: bytes) -> bytes:
    """Frame a record for TensorFlow's TFRecord format: its length, the record, and a checksum of each."""
    length = struct.pack("<Q", len(record))
    return length + _masked_checksum(length) + record + _masked_checksum(record)


def _masked_checksum(data: bytes) -> bytes:
    """Return the CRC-32C (Castagnoli), rotated and shifted as TFRecord defines it."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _CRC_TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE: Final = tuple(map(_crc_entry, range(256)))
