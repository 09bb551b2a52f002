"""Optional callbacks for a run, in addition to the built-in ones; exported as `threefold.callbacks`."""

from threefold.train.callbacks.base import Callback as Callback
from threefold.train.callbacks.base import CallbackFailed as CallbackFailed
from threefold.train.callbacks.base import RunContext as RunContext
from threefold.train.callbacks.optional import CSVLog as CSVLog
from threefold.train.callbacks.optional import EarlyStopping as EarlyStopping
from threefold.train.callbacks.optional import EpochMetrics as EpochMetrics
from threefold.train.callbacks.optional import MLflowRun as MLflowRun
from threefold.train.callbacks.optional import PhaseTimers as PhaseTimers
from threefold.train.callbacks.optional import WeightsAndBiases as WeightsAndBiases
from threefold.train.callbacks.records import EvaluationRecord as EvaluationRecord
from threefold.train.callbacks.records import StepRecord as StepRecord

__all__ = [name for name in dir() if not name.startswith("_")]
