"""Fault policies that `train.on_nan` and `train.on_spike` can name.

A policy is one function (in `resilience/anomalies.py`) and one row of `_BUILT_IN`. Other packages add theirs through
entry points of the group `threefold.fault_policies`; an import path needs neither.
"""

from typing import Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import Registry

_BUILT_IN: Final = {name: f"threefold.resilience.anomalies:{name}" for name in ("stop", "skip", "rollback")}
ON_NAN: Final = Registry("train.on_nan", "threefold.fault_policies", _BUILT_IN, takes_paths=True)
ON_SPIKE: Final = Registry("train.on_spike", "threefold.fault_policies", _BUILT_IN, takes_paths=True)


def check_fault_policies(on_nan: str, on_spike: str) -> None:
    """Check before any process starts that policies of other packages are functions.

    Raises:
        UserError: one cannot be imported, or cannot be called.
    """
    for registry, name in ((ON_NAN, on_nan), (ON_SPIKE, on_spike)):
        if name not in _BUILT_IN and not callable(found := registry.load(name)):
            raise UserError(
                f"{registry.setting} is {shown(name)}, which is declared as {found!r} but must be a function that gets "
                "a Fault and returns stop, skip or rollback."
            )
