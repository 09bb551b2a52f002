"""The callbacks of a run: those that report every run, and those that `train.callbacks` names.

A callback is one file with a subclass of `Callback` and one line here, or, from another package, one entry point of the
group `threefold.callbacks`.
"""

from collections.abc import Sequence
from typing import Final

from threefold.errors import UserError
from threefold.plugins import Registry, one_of
from threefold.train.callbacks.base import Callback, RunContext

_BUILT_IN: Final = {
    "live_line": "threefold.train.callbacks.live_line:LiveLine",
    "metrics": "threefold.train.callbacks.metrics:MetricsFile",
    "tensorboard": "threefold.train.callbacks.tensorboard:TensorBoard",
    "step_log": "threefold.train.callbacks.step_log:StepLog",
    "loss_curve": "threefold.train.callbacks.loss_curve:LossCurve",
    "summary": "threefold.train.callbacks.summary:Summary",
}
"""Those that every run has, in the order in which they are called."""
CALLBACKS: Final = Registry("train.callbacks", "threefold.callbacks", _BUILT_IN)


def check_names(names: Sequence[str]) -> None:
    """Check that `train.callbacks` names callbacks that are installed, without importing any.

    Raises:
        UserError: one is not.
    """
    for name in names:
        if name not in CALLBACKS:
            raise UserError(f"{CALLBACKS.setting} has {name!r} but each must be {one_of(name, CALLBACKS.names())}.")


def make_callbacks(run: RunContext) -> list[Callback]:
    """The callbacks of this rank: the built-in ones, then those of `train.callbacks` in their order.

    Raises:
        UserError: on every rank, when one cannot be imported or is no `Callback`.
    """
    kinds = [_load(name) for name in dict.fromkeys([*_BUILT_IN, *(run.config.train.callbacks or ())])]
    made = [kind.for_run(run) for kind in kinds if kind.ranks == "all" or run.mesh.rank == 0]
    return [callback for callback in made if callback is not None]


def _load(name: str) -> type[Callback]:
    found = CALLBACKS.load(name)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(
            f"{CALLBACKS.setting} has {name}, which is declared as {found!r} but must be a subclass of "
            f"{Callback.__module__}.{Callback.__qualname__}."
        )
    return found
