"""MLflow: the metrics of a run, logged through the package `mlflow` or `mlflow-skinny`."""

import re
import time
from typing import Any

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.console import say
from threefold.train.callbacks.line_file import reason_of
from threefold.train.callbacks.values import evaluation_values, step_values

_LONGEST_PARAMETER = 500
"""Characters of a parameter's value that every version of MLflow takes."""


class MLflowRun(Callback):
    """Logs steps, evaluations and the config to MLflow; `pip install threefold[mlflow]`.

    A failure to log is reported once, and training continues without. A resumed run is a new one there, unless
    `run_id` is given.

    Args:
        experiment: of MLflow; made if there is none.
        run_name: of the run there; None for the name of the run's folder.
        tracking_uri: a server, `sqlite:///FILE` or a folder; None as the environment says.
        run_id: of an MLflow run to append to.
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
        # The client, as `mlflow.start_run` sets the active run of the whole process.
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
        # Names may have letters, digits and _ - . alone; a slash makes a folder in a store of files.
        names = {key: re.sub(r"[^\w\-.]", "_", key.replace("/", ".", 1)) for key in values}
        metrics = [Metric(names[key], value, now, step) for key, value in values.items()]
        try:
            self._client.log_batch(self.run_id, metrics=metrics)
        except Exception as error:  # of the network or the disk: no reason to end a training
            say(f"Warning: MLflow cannot log ({reason_of(error)}); training continues without it.")
            self._client = None
