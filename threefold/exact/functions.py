"""Functions of elements and softmax whose bits depend on no shape (`exact.layers`), in place of torch's."""

from collections.abc import Callable
from functools import partial
from math import lcm
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from threefold.exact import layers, products
from threefold.exact.layers import RowSum, last_dim_summed, widened
from threefold.torch_private.runtime import UninterceptedFunction, gelu_gradient, sigmoid_gradient, silu_gradient

_VECTORS: Final = 64
"""Maximum number of elements that torch computes together on a CPU: two vectors of the narrowest dtype. It computes the
rest of a thread's part one by one, with different bits."""
_PART: Final = 1 << 15
"""Minimum number of elements of a thread's part in most functions; GELU divides a large tensor among all threads."""


class ExactFunctions(TorchFunctionMode):
    """Replaces torch's functions by those of exact runs, while it is entered: for forward passes and recomputations.

    `rows` sums those of a sequence, as sharded between tensor-parallel layers. `over_context` sums a scalar over the
    ranks that share a sequence's tokens, in a tree, and leaves its gradient as it is; None if this rank has all tokens.
    """

    def __init__(self, rows: RowSum, over_context: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self._rows, self._over_context = rows, over_context

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.sum, Tensor.sum):
            return _of_sum(self._rows, self._over_context, *args, **(kwargs or {}))
        if (replacement := _REPLACED.get(func)) is not None:
            return replacement(self._rows, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
    return layers.layer_norm(input, weight, bias, eps, rows)


def _of_rms_norm(
    rows: RowSum, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if len(normalized_shape) > 1:
        return F.rms_norm(input, normalized_shape, weight, eps)
    return layers.rms_norm(input, weight, eps, rows)


def _of_softmax(_: RowSum, input: Tensor, dim: int | None = None, *args: Any, **options: Any) -> Tensor:
    if dim is None or dim % input.dim() != input.dim() - 1 or args:
        return F.softmax(input, dim, *args, **options)
    return softmax(input, **options)


def _of_logsumexp(_: RowSum, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if dim not in (-1, input.dim() - 1) or keepdim:
        return torch.logsumexp(input, dim, keepdim)
    return logsumexp(input)


def _of_sum(
    rows: RowSum, over_context: Callable[[Tensor], Tensor] | None, input: Tensor, *args: Any, **options: Any
) -> Tensor:
    if args or options or not input.is_floating_point():
        return torch.sum(input, *args, **options)
    if not input.dim():
        return input.clone()
    parts = layers.context_parts(input, rows.context, -1)
    total = products.tree_sum(products.sum_dim(part.flatten(), 0).clone() for part in parts)
    return total if over_context is None else over_context(total)


def _whole_vectors(x: Tensor) -> Tensor:
    """Return `x`, contiguous, or its elements with zeros behind them, so that every thread has whole vectors alone."""
    count = size = x.numel()
    threads, parts = torch.get_num_threads(), 0
    while x.device.type == "cpu" and parts != (parts := min(threads, -(-size // _PART))):
        step = _VECTORS * lcm(parts, threads)
        size = -(-count // step) * step
    if size == count:
        return x.contiguous()
    padded = x.new_zeros(size)
    padded[:count] = x.flatten()
    return padded


def _only(padded: Tensor, x: Tensor) -> Tensor:
    """Return the elements of `padded` that are those of `x`, in its shape."""
    return padded if padded.shape == x.shape else padded[: x.numel()].clone().view(x.shape)


class _Elementwise(UninterceptedFunction):
    """Function of torch of each element, with its derivative from the upper gradient and the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return _only(value(_whole_vectors(x)), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return _only(ctx.gradient(_whole_vectors(grad), _whole_vectors(x)), x), None, None


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute `F.gelu`."""
    value, gradient = (partial(each, approximate=approximate) for each in (F.gelu, gelu_gradient))
    return _Elementwise.apply(x, value, gradient)


def sigmoid(x: Tensor) -> Tensor:
    """Compute `torch.sigmoid`."""
    return _Elementwise.apply(x, torch.sigmoid, sigmoid_gradient)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Compute `F.silu`, never in place."""
    return _Elementwise.apply(x, F.silu, silu_gradient)


def softmax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `torch.softmax` over the last dim, in fp32 at least."""
    return _Softmax.apply(x if dtype is None else x.to(dtype))


def logsumexp(x: Tensor) -> Tensor:
    """Compute `torch.logsumexp` over the last dim, in fp32 at least."""
    return _LogSumExp.apply(x)


class _LogSumExp(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = widened(x)
        top = wide.amax(-1, keepdim=True)
        out = last_dim_summed(wide.sub(top).exp_()).log_().add_(top)
        ctx.save_for_backward(x, out)
        return out.squeeze(-1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return widened(x).sub(out).exp_().mul_(grad.unsqueeze(-1)).to(x.dtype)


class _Softmax(UninterceptedFunction):
    """Softmax whose rows do not depend on the number of rows, which torch's backward pass does not guarantee."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shifted = widened(x).sub(widened(x.amax(-1, keepdim=True))).exp_()
        out = shifted.div_(last_dim_summed(shifted)).to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        weights = widened(out)
        return widened(grad).sub(last_dim_summed(weights * grad)).mul_(weights).to(out.dtype)


_REPLACED: Final[dict[Callable[..., Any], Callable[..., Tensor]]] = {
    F.gelu: lambda _, *args, **options: gelu(*args, **options),
    F.silu: lambda _, *args, **options: silu(*args, **options),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), lambda _, x: sigmoid(x)),
    F.layer_norm: _of_layer_norm,
    F.rms_norm: _of_rms_norm,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _of_softmax),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), _of_logsumexp),
}
"""Function of torch → its replacement, called with the sum of rows and the function's arguments."""
