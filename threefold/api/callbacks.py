"""The callbacks that a run can be given, beside those of every run: `threefold.callbacks`."""

from threefold.train.callbacks.base import Callback, CallbackFailed, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.csv_log import CSVLog
from threefold.train.callbacks.early_stopping import EarlyStopping
from threefold.train.callbacks.epoch_metrics import EpochMetrics
from threefold.train.callbacks.phase_timers import PhaseTimers
from threefold.train.callbacks.trackers.mlflow_run import MLflowRun
from threefold.train.callbacks.trackers.weights_and_biases import WeightsAndBiases

__all__ = [
    "CSVLog",
    "Callback",
    "CallbackFailed",
    "EarlyStopping",
    "EpochMetrics",
    "EvaluationRecord",
    "MLflowRun",
    "PhaseTimers",
    "RunContext",
    "StepRecord",
    "WeightsAndBiases",
]
