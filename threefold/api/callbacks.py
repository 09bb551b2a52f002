"""Optional callbacks for a run, in addition to the built-in ones; exported as `threefold.callbacks`."""

from threefold.train.callbacks.base import Callback, CallbackFailed, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.early_stopping import EarlyStopping
from threefold.train.callbacks.metrics import CSVLog, EpochMetrics, PhaseTimers
from threefold.train.callbacks.trackers import MLflowRun, WeightsAndBiases

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
