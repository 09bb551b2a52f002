"""Transformers in fp64."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Fp64(TorchFunctionMode):
    """Make transformers compute in fp64 what it computes in fp32 for any model dtype: softmax, norms, angles.

    Args:
        attention: name → factors of the attention weights of the next layer, where they have dropout.
    """

    def __init__(self, attention: Iterable[Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self._attention = None if attention is None else iter(attention)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is F.dropout and self._attention is not None and args[0].dim() == 4:
            return next(self._attention)(args[0])
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)
