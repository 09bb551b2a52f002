"""Optional callbacks for a run, in addition to the built-in ones; exported as `threefold.callbacks`."""

from threefold.train.callbacks.base import Callback, CallbackFailed, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.optional import (
    CSVLog,
    EarlyStopping,
    EpochMetrics,
    MLflowRun,
    PhaseTimers,
    WeightsAndBiases,
)

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
