"""Clipping as the moment when gradients are complete: frameworks clip between the backward pass and the update."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

_FUNCTIONS: Final = ("clip_grad_norm_", "clip_grads_with_norm_")


class ClippingHook:
    """Calls a function before PyTorch clips gradients of a model, and keeps the norm that clipping returns.

    Args:
        parameters: parameters of the model; clipping others, such as those of a second model, goes unnoticed.
        before: function to call.

    Attributes:
        norm: the norm that was returned last; None before.
    """

    def __init__(self, parameters: Iterable[Tensor], before: Callable[[], None]) -> None:
        self.norm: float | None = None
        self._known = {id(parameter) for parameter in parameters}
        self._before = before
        self._functions = {name: getattr(torch.nn.utils, name) for name in _FUNCTIONS}
        for name, function in self._functions.items():
            setattr(torch.nn.utils, name, self._around(function))

    def remove(self) -> None:
        """Restore PyTorch's functions."""
        for name, function in self._functions.items():
            setattr(torch.nn.utils, name, function)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clip(parameters: Tensor | Iterable[Tensor], max_norm: float, *args: Any, **options: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            ours = any(id(each) in self._known for each in given)
            if ours:
                self._before()
            returned = function(given, max_norm, *args, **options)
            norm = returned if returned is not None else (args[0] if args else options.get("total_norm"))
            if ours and isinstance(norm, Tensor):
                self.norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            return returned

        return clip
