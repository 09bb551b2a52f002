"""Callbacks that log to experiment trackers; the packages of the trackers are imported on use."""

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final

from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    RunContext,
    StepRecord,
    evaluation_values,
    hardware_values,
    reason_of,
    say,
    step_values,
)

FOLDER = "tensorboard"
SECONDS_BETWEEN_FLUSHES = 10


def import_writer() -> None:
    """Import the event-file writer once in a launcher that may restart its ranks."""
    import tensorboard.compat.proto.event_pb2  # noqa: F401


class TensorBoard(Callback):
    """Write event files; in TensorBoard, repeated steps of a resumed run replace the earlier ones.

    This uses TensorBoard's messages, but neither its `SummaryWriter`, whose thread would print a traceback on a full
    disk, nor its record writer, whose import takes a tenth of a second before the first step. The first failure is
    reported once, and the run continues without these files.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / FOLDER, say)

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self._file: BinaryIO | None = None
        self._flushed = 0.0

    def before_fit(self, start: int) -> None:
        with self._failures_reported():
            # Import only on the rank that writes.
            from tensorboard.compat.proto.event_pb2 import Event

            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = _new_file(self.folder)
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
        values = {
            "loss/train": record.loss,
            "gradient_norm": record.grad_norm,
            "learning_rate": record.lr,
            "tokens_per_second": record.tokens_per_second,
        }
        if record.loss_scale is not None:
            values["loss_scale"] = record.loss_scale
        values |= {f"terms/{name}": mean for name, mean in record.terms.items()}
        values["seconds/step"] = record.seconds
        if record.performance is not None:
            values["seconds/wall_clock"] = record.performance.wall_clock
            values["seconds/waited"] = record.performance.waited
        self._write(record.step, values | hardware_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        by_corpus = {f"loss/validation of {name}": loss for name, loss in record.corpus_losses.items()}
        terms = {f"terms/validation of {name}": mean for name, mean in record.terms.items()}
        self._write(record.step, {"loss/validation": record.loss, **by_corpus, **terms})

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
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
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
            self.say(f"Warning: {self.folder} cannot be written ({reason_of(error)}); training continues without it.")


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


def _new_file(folder: Path) -> BinaryIO:
    """Create an event file whose name TensorBoard sorts after the existing ones."""
    begin = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    for number in count():
        with suppress(FileExistsError):
            return (folder / f"{begin}.{number}").open("xb")
    raise AssertionError


_LONGEST_PARAMETER = 500
"""Maximum number of characters of a parameter's value in every version of MLflow."""


class MLflowRun(Callback):
    """Log steps, evaluations and the config to MLflow; `pip install threefold[mlflow]`.

    A failure to log is reported once, and training continues without MLflow. A resumed run becomes a new MLflow run
    unless `run_id` is given.

    Args:
        experiment: MLflow experiment; created if it does not exist.
        run_name: name of the MLflow run; None for the name of the run's folder.
        tracking_uri: a server, `sqlite:///FILE` or a folder; None for the environment's setting.
        run_id: MLflow run to append to.
    """

    packages = ("mlflow",)

    def __init__(
        self,
        experiment: str = "threefold",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.experiment, self.run_name, self.tracking_uri, self.run_id = experiment, run_name, tracking_uri, run_id
        self._client: Any = None
        self._status = "FAILED"

    def setup(self, run: RunContext) -> None:
        # Use the client, as `mlflow.start_run` sets the active run of the whole process.
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
            self.run_id = self._client.create_run(experiment, run_name=self.run_name or run.run_dir.name).info.run_id
            settings = run.config.sections().items()
            parameters = {f"{section}.{key}": str(value) for section, keys in settings for key, value in keys.items()}
            self._client.log_batch(
                self.run_id, params=[Param(key, value[:_LONGEST_PARAMETER]) for key, value in parameters.items()]
            )

    def after_step(self, record: StepRecord) -> None:
        self._log(record.step, step_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._log(record.step, evaluation_values(record))

    def after_stop(self, step: int, reason: str) -> None:
        if self._client is not None:
            self._client.set_tag(self.run_id, "stopped", reason)

    def after_fit(self) -> None:
        self._status = "FINISHED"

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self.run_id, self._status)
            self._client = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self._client is None:
            return
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        # Only letters, digits, and _ - . are valid everywhere; a slash makes a folder in a file store.
        names = {key: re.sub(r"[^\w\-.]", "_", key.replace("/", ".", 1)) for key in values}
        metrics = [Metric(names[key], value, now, step) for key, value in values.items()]
        try:
            self._client.log_batch(self.run_id, metrics=metrics)
        except Exception as error:  # a network or disk failure is no reason to end a training
            say(f"Warning: MLflow cannot log ({reason_of(error)}); training continues without it.")
            self._client = None


class WeightsAndBiases(Callback):
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

    packages = ("wandb",)

    def __init__(
        self, project: str = "threefold", run_name: str | None = None, mode: str | None = None, **options: Any
    ) -> None:
        self.options = {"project": project, "name": run_name, "mode": mode, **options}
        self._run: Any = None

    def setup(self, run: RunContext) -> None:
        import wandb

        given = {key: value for key, value in self.options.items() if value is not None}
        self._run = wandb.init(
            **{"name": run.run_dir.name, "dir": str(run.run_dir), "config": run.config.sections(), **given}
        )

    def after_step(self, record: StepRecord) -> None:
        self._log(record.step, step_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._log(record.step, evaluation_values(record))

    def after_stop(self, step: int, reason: str) -> None:
        if self._run is not None:
            self._run.summary["stopped"] = reason

    def after_fit(self) -> None:
        self._finish(0)

    def close(self) -> None:
        self._finish(1)

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(values, step=step)
        except Exception as error:  # a network or disk failure is no reason to end a training
            say(f"Warning: Weights & Biases cannot log ({reason_of(error)}); training continues without it.")
            self._run = None

    def _finish(self, status: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=status)
            self._run = None
