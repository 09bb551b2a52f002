"""Callbacks that log to experiment trackers; the packages of the trackers are imported on use."""

import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    RunContext,
    StepRecord,
    evaluation_values,
    reason_of,
    say,
    step_values,
)

FOLDER = "tensorboard"
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
    """Base class of callbacks that send the values of each step and evaluation to a service.

    A failure to send is reported once, and the training continues without the service.

    Attributes:
        service: name of the service.
        connection: object that `setup` connects and `send` uses; None when it is closed or has failed.
    """

    service: ClassVar[str]
    connection: Any = None

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send the values after `step`."""
        raise NotImplementedError

    def after_step(self, record: StepRecord) -> None:
        self._send(record.step, step_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._send(record.step, evaluation_values(record))

    def _send(self, step: int, values: dict[str, float]) -> None:
        if self.connection is not None:
            try:
                self.send(step, values)
            except Exception as error:  # a network or disk failure is no reason to end a training
                say(f"Warning: {self.service} cannot log ({reason_of(error)}); training continues without it.")
                self.connection = None


class TensorBoard(Callback):
    """Write event files; in TensorBoard, repeated steps of a resumed run replace the earlier ones.

    This uses TensorBoard's messages, but neither its `SummaryWriter`, whose thread would print a traceback on a full
    disk, nor its record writer, whose import takes a tenth of a second before the first step. The first failure is
    reported once, and the run continues without these files.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / FOLDER)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None
        self._flushed = 0.0

    def before_fit(self, start: int) -> None:
        with self._failures_reported():
            # Import only on the rank that writes.
            from tensorboard.compat.proto.event_pb2 import Event

            self.folder.mkdir(parents=True, exist_ok=True)
            begins = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            names = (self.folder / f"{begins}.{number}" for number in count())  # TensorBoard sorts the newest last
            self._file = next(name for name in names if not os.path.lexists(name)).open("xb")
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._begin_after(start)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        if self._file is not None:
            with self._failures_reported():
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
        self._write(record.step, values)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._write(record.step, evaluation_values(record))

    def close(self) -> None:
        if self._file is not None:
            with self._failures_reported():
                self._file.close()
            self._file = None

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._file is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._failures_reported():
            summary = Summary(
                value=[Summary.Value(tag=_tag(name), simple_value=value) for name, value in values.items()]
            )
            self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def _add(self, event: Any) -> None:
        if self._file is None:
            return
        self._file.write(framed(event.SerializeToString()))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self._file.flush()
            self._flushed = time.monotonic()

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file = None
            say(f"Warning: {self.folder} cannot be written ({reason_of(error)}); training continues without it.")


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


_LONGEST_PARAMETER = 500
"""Maximum number of characters of a parameter's value in every version of MLflow."""


class MLflowRun(Tracker):
    """Log steps, evaluations and the config to MLflow; `pip install threefold[mlflow]`.

    A failure to log is reported once, and training continues without MLflow. A resumed run becomes a new MLflow run
    unless `run_id` is given.

    Args:
        experiment: MLflow experiment; created if it does not exist.
        run_name: name of the MLflow run; None for the name of the run's folder.
        tracking_uri: a server, `sqlite:///FILE` or a folder; None for the environment's setting.
        run_id: MLflow run to append to.
    """

    service, packages = "MLflow", ("mlflow",)

    def __init__(
        self,
        experiment: str = "threefold",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.experiment, self.run_name, self.tracking_uri, self.run_id = experiment, run_name, tracking_uri, run_id
        self._status = "FAILED"

    def setup(self, run: RunContext) -> None:
        # Use the client, as `mlflow.start_run` sets the active run of the whole process.
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.connection = MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            found = self.connection.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else self.connection.create_experiment(self.experiment)
            self.run_id = self.connection.create_run(experiment, run_name=self.run_name or run.run_dir.name).info.run_id
            settings = run.config.sections().items()
            parameters = {f"{section}.{key}": str(value) for section, keys in settings for key, value in keys.items()}
            self.connection.log_batch(
                self.run_id, params=[Param(key, value[:_LONGEST_PARAMETER]) for key, value in parameters.items()]
            )

    def after_stop(self, step: int, reason: str) -> None:
        if self.connection is not None:
            self.connection.set_tag(self.run_id, "stopped", reason)

    def after_fit(self) -> None:
        self._status = "FINISHED"

    def close(self) -> None:
        if self.connection is not None:
            self.connection.set_terminated(self.run_id, self._status)
            self.connection = None

    def send(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        # Only letters, digits, and _ - . are valid everywhere; a slash makes a folder in a file store.
        names = {key: re.sub(r"[^\w\-.]", "_", key.replace("/", ".", 1)) for key in values}
        metrics = [Metric(names[key], value, now, step) for key, value in values.items()]
        self.connection.log_batch(self.run_id, metrics=metrics)


class WeightsAndBiases(Tracker):
    """Log steps, evaluations and the config to Weights & Biases; `pip install threefold[wandb]`.

    A failure to log is reported once, and training continues without it. A resumed run becomes a new W&B run unless
    `id` and `resume` are given.

    Args:
        project: W&B project.
        run_name: name of the W&B run; None for the name of the run's folder.
        mode: `online`, `offline` (files under RUN/wandb, for `wandb sync`) or `disabled`; None for the environment's
            setting.
        options: further arguments of `wandb.init`, such as `entity`, `tags`, `id` and `resume`.
    """

    service, packages = "Weights & Biases", ("wandb",)

    def __init__(
        self, project: str = "threefold", run_name: str | None = None, mode: str | None = None, **options: Any
    ) -> None:
        self.options = {"project": project, "name": run_name, "mode": mode, **options}

    def setup(self, run: RunContext) -> None:
        import wandb

        given = {key: value for key, value in self.options.items() if value is not None}
        self.connection = wandb.init(
            **{"name": run.run_dir.name, "dir": str(run.run_dir), "config": run.config.sections(), **given}
        )

    def after_stop(self, step: int, reason: str) -> None:
        if self.connection is not None:
            self.connection.summary["stopped"] = reason

    def after_fit(self) -> None:
        self._finish(0)

    def close(self) -> None:
        self._finish(1)

    def send(self, step: int, values: dict[str, float]) -> None:
        self.connection.log(values, step=step)

    def _finish(self, status: int) -> None:
        if self.connection is not None:
            self.connection.finish(exit_code=status)
            self.connection = None
