"""Optional callbacks for a run, in addition to the built-in ones; exported as `threefold.callbacks`."""

from typing import Any, Final

from threefold.doors import added, imported
from threefold.train.callbacks.base import Callback as Callback
from threefold.train.callbacks.base import CallbackFailed as CallbackFailed
from threefold.train.callbacks.base import RunContext as RunContext
from threefold.train.callbacks.records import EvaluationRecord as EvaluationRecord
from threefold.train.callbacks.records import StepRecord as StepRecord
from threefold.train.model_view import ActivationWatch as ActivationWatch
from threefold.train.model_view import ModelView as ModelView

_ADDED: Final = {path.partition(":")[2]: path for path in added("CHOSEN_CALLBACKS").values()}
_BASES: Final = ("Callback", "CallbackFailed", "EvaluationRecord", "ModelView", "RunContext", "StepRecord")
__all__ = ["ActivationWatch", *_BASES, *_ADDED]


def __getattr__(name: str) -> Any:
    if name in _ADDED:
        return imported(_ADDED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
