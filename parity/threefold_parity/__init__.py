"""Parity of any training code: a recorder for any script, and a comparison that names the first mistake.

Names are imported on first use, as most import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold_parity.adapters import Adapter
    from threefold_parity.placement import Piece, Placement, flat_range, fused, shard, whole
    from threefold_parity.recorder import Recorder
    from threefold_parity.text import UserError

__version__ = "0.1.0"
__all__ = ["Adapter", "Piece", "Placement", "Recorder", "UserError", "flat_range", "fused", "shard", "whole"]

_MODULES: Final = {"Adapter": "adapters", "Recorder": "recorder", "UserError": "text"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'placement')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
