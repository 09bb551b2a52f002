"""TensorBoard's event files, and the base of callbacks that send the values of each step to another service."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final

from threefold.foreign import nofollow_folder
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say
from threefold.train.callbacks.records import EvaluationRecord, StepRecord

TENSORBOARD_FOLDER = "tensorboard"
SECONDS_BETWEEN_FLUSHES = 10


def import_writer() -> None:
    """Import the event-file writer, if it is installed, once in a launcher that may restart its ranks."""
    if find_spec("tensorboard") is not None:
        import tensorboard.summary.writer.record_writer  # noqa: F401


_TAGS: Final = {  # tag in TensorBoard of a value, or of all values whose names begin so
    "loss": "loss/train",
    "grad_norm": "gradient_norm",
    "lr": "learning_rate",
    "valid_loss": "loss/validation",
    "valid_loss_average": "loss/validation of averaged weights",
    "term/": "terms/",
    "valid_loss/": "loss/validation of ",
    "valid_term/": "terms/validation of ",
}


def step_values(record: StepRecord) -> dict[str, float]:
    """Return the loggable values of a step by name; only `lr` and `epoch` if its samples were not read."""
    if not record.is_read:
        return {"lr": record.lr, "epoch": record.epoch}
    names = ("loss", "grad_norm", "lr", "tokens_per_second", "epoch")
    values: dict[str, float] = {name: getattr(record, name) for name in names}
    if record.loss_scale is not None:
        values["loss_scale"] = record.loss_scale
    values |= {f"seconds/{phase}": seconds for phase, seconds in record.phases.items()}
    if (used := record.performance) is not None:
        if used.flops_per_second is not None:
            values["tflops"] = used.flops_per_second / 1e12
        if used.mfu is not None:
            values["mfu"] = used.mfu
        values |= {"memory": used.memory, "largest_memory": used.largest_memory}
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}


def evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    """Return `valid_loss`, also of each corpus (`valid_loss/NAME`) and of averaged weights, and `valid_term/NAME`."""
    values = {"valid_loss": record.loss}
    if record.average_loss is not None:
        values["valid_loss_average"] = record.average_loss
    values |= {f"valid_loss/{name}": loss for name, loss in record.corpus_losses.items()}
    return values | {f"valid_term/{name}": mean for name, mean in record.terms.items()}


class Tracker(Callback):
    """Base class of callbacks that send the values of each step and evaluation somewhere.

    A failure is reported once, with `service` (such as `MLflow cannot log`) at its beginning, and the training
    continues without. The `connection` is None before it is made, and when it is closed or has failed.
    """

    service: str
    connection: Any = None

    def try_out(self) -> None:
        """Raise a `UserError` before any rank starts if the arguments can reach nothing, without sending anything."""

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send the values after `step`."""
        raise NotImplementedError

    def after_step(self, record: StepRecord) -> None:
        self.log(record.step, step_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.log(record.step, evaluation_values(record))

    def after_log(self, record: StepRecord | EvaluationRecord) -> None:
        self.log(record.step, record.logged)

    def log(self, step: int, values: dict[str, float]) -> None:
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
    """Write event files if TensorBoard is installed; in it, repeated steps of a resumed run replace the earlier ones.

    They are written by TensorBoard's record writer: the thread of its `SummaryWriter` would print a traceback on a full
    disk. The first failure is reported once, and the run continues without these files.
    """

    packages = ("tensorboard",)

    @classmethod
    def for_run(cls, run: RunContext) -> Callback | None:
        if find_spec("tensorboard") is None:
            say("No files for TensorBoard, which is not installed: pip install 'threefold[tensorboard]'.")
            return None
        return cls(run.run_dir / TENSORBOARD_FOLDER)

    def __init__(self, folder: Path) -> None:
        self.folder, self.service = folder, f"{folder} cannot be written"
        self._begins_after: int | None = None  # last step before the values of a file that is to be made
        self._flushed = 0.0

    def before_fit(self, start: int) -> None:
        with self.failures_reported():
            nofollow_folder(self.folder)
            self._begins_after = start

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self._begin_after(start)

    def _open(self, start: int) -> None:
        # A tenth of a second, which is not spent before the first step.
        from tensorboard.summary.writer.record_writer import RecordWriter

        begins = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        names = (self.folder / f"{begins}.{number}" for number in count())  # TensorBoard sorts the newest last
        self.connection = RecordWriter(next(name for name in names if not os.path.lexists(name)).open("xb"))
        self._add(file_version="brain.Event:2")
        self._begin_after(start)

    def _begin_after(self, start: int) -> None:
        """Make TensorBoard drop the values of the steps after `start`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step=start + 1, session_log=SessionLog(status=SessionLog.START))

    def after_step(self, record: StepRecord) -> None:
        if not record.is_read:
            return
        values = {name: value for name, value in step_values(record).items() if name != "epoch"}
        values["seconds/step"] = record.seconds
        if record.performance is not None:
            values["seconds/wall_clock"] = record.performance.wall_clock
            values["seconds/waited"] = record.performance.waited
        self.log(record.step, values)

    def log(self, step: int, values: dict[str, float]) -> None:
        if (start := self._begins_after) is not None:
            self._begins_after = None
            with self.failures_reported():
                self._open(start)
        super().log(step, values)

    def close(self) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.close()
            self.connection = None

    def send(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary()
        for name, value in values.items():
            begins = name[: name.find("/") + 1]
            tag = _TAGS.get(name) or _TAGS.get(begins, begins) + name[len(begins) :]
            summary.value.append(Summary.Value(tag=tag, simple_value=value))
        self._add(step=step, summary=summary)

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # only on the rank that writes

        self.connection.write(Event(wall_time=time.time(), **fields).SerializeToString())
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self.connection.flush()
            self._flushed = time.monotonic()
