"""Parity of any training code: a recorder for any script, and a comparison that names the first mistake.

Names are imported on first use, as most import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold.parity.adapters import Adapter
    from threefold.parity.placement import Piece, Placement, flat_range, fused, shard, whole
    from threefold.parity.recorder import Recorder

__all__ = ["Adapter", "Piece", "Placement", "Recorder", "flat_range", "fused", "shard", "whole"]

_MODULES: Final = {"Adapter": "adapters", "Recorder": "recorder"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'placement')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
