"""Torch's functions replaced by those of exact runs, for code that calls torch's."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from threefold.ops import exact, exact_functions, exact_products
from threefold.ops.exact import RowSum


class ExactArithmetic(TorchFunctionMode):
    """Replaces torch's functions by those of exact runs, while it is entered: for forward passes and recomputations.

    Args:
        rows: sum of the rows of a sequence, as sharded between tensor-parallel layers.
        over_context: sums a scalar over the ranks that share a sequence's tokens, in a tree, and leaves its gradient
            as it is; None if this rank has all tokens.
    """

    def __init__(self, rows: RowSum, over_context: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self._rows, self._over_context = rows, over_context

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SUMS:
            return _of_sum(self._rows, self._over_context, *args, **(kwargs or {}))
        replacement = _REPLACED.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self._rows, *args, **(kwargs or {}))


def _of_layer_norm(
    rows: RowSum,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) > 1:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return exact.layer_norm(input, weight, bias, eps, rows)


def _of_rms_norm(
    rows: RowSum, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if len(normalized_shape) > 1:
        return F.rms_norm(input, normalized_shape, weight, eps)
    return exact.rms_norm(input, weight, eps, rows)


def _of_softmax(_: RowSum, input: Tensor, dim: int | None = None, *args: Any, **options: Any) -> Tensor:
    if dim is None or dim % input.dim() != input.dim() - 1 or args:
        return F.softmax(input, dim, *args, **options)
    return exact_functions.softmax(input, **options)


def _of_logsumexp(_: RowSum, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if dim not in (-1, input.dim() - 1) or keepdim:
        return torch.logsumexp(input, dim, keepdim)
    return exact_functions.logsumexp(input)


def _of_sum(
    rows: RowSum, over_context: Callable[[Tensor], Tensor] | None, input: Tensor, *args: Any, **options: Any
) -> Tensor:
    if args or options or not input.is_floating_point():
        return torch.sum(input, *args, **options)
    if not input.dim():
        return input.clone()
    parts = exact.context_parts(input, rows.context, -1)
    total = exact_products.tree_sum(exact_products.sum_dim(part.flatten(), 0).clone() for part in parts)
    return total if over_context is None else over_context(total)


_SUMS: Final = (torch.sum, Tensor.sum)
_REPLACED: Final[dict[Callable[..., Any], Callable[..., Tensor]]] = {
    F.gelu: lambda _, *args, **options: exact_functions.gelu(*args, **options),
    F.silu: lambda _, *args, **options: exact_functions.silu(*args, **options),
    F.sigmoid: lambda _, x: exact_functions.sigmoid(x),
    torch.sigmoid: lambda _, x: exact_functions.sigmoid(x),
    Tensor.sigmoid: lambda _, x: exact_functions.sigmoid(x),
    F.layer_norm: _of_layer_norm,
    F.rms_norm: _of_rms_norm,
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
    torch.logsumexp: _of_logsumexp,
    Tensor.logsumexp: _of_logsumexp,
}
"""Function of torch → its replacement, called with the sum of rows and the function's arguments."""
