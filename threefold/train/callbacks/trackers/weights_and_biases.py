"""Weights & Biases: the metrics of a run, logged through the package `wandb`."""

from typing import Any

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.console import say
from threefold.train.callbacks.line_file import reason_of
from threefold.train.callbacks.values import evaluation_values, step_values


class WeightsAndBiases(Callback):
    """Logs steps, evaluations and the config to Weights & Biases; `pip install threefold[wandb]`.

    A failure to log is reported once, and training continues without. A resumed run is a new one there, unless `id`
    and `resume` are given.

    Args:
        project: of Weights & Biases.
        run_name: of the run there; None for the name of the run's folder.
        mode: `online`, `offline` (files under RUN/wandb, for `wandb sync`) or `disabled`; None as the environment says.
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
        except Exception as error:  # of the network or the disk: no reason to end a training
            say(f"Warning: Weights & Biases cannot log ({reason_of(error)}); training continues without it.")
            self._run = None

    def _finish(self, status: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=status)
            self._run = None
