"""Calls in the manner of others: Horovod's in `horovod`, Paddle's in `paddle`, Accelerate's in `prepared`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threefold.compat import horovod as horovod
    from threefold.compat import paddle as paddle


def __getattr__(name: str) -> Any:
    if name in ("horovod", "paddle"):  # on first use, as the room's door is imported before torch
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
