"""Functions of elements and softmax of exact runs, whose bits depend on no shape (`ops.exact`)."""

from collections.abc import Callable
from functools import partial
from math import lcm
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from threefold.ops.exact import last_dim_summed, widened
from threefold.torch_private.runtime import UninterceptedFunction, gelu_gradient, sigmoid_gradient, silu_gradient

_VECTORS: Final = 64
"""Maximum number of elements that torch computes together on a CPU: two vectors of the narrowest dtype. It computes the
rest of a thread's part one by one, with different bits."""
_PART: Final = 1 << 15
"""Minimum number of elements of a thread's part in most functions; GELU divides a large tensor among all threads."""


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
    out: Tensor = _Elementwise.apply(x, value, gradient)
    return out


def sigmoid(x: Tensor) -> Tensor:
    """Compute `torch.sigmoid`."""
    out: Tensor = _Elementwise.apply(x, torch.sigmoid, sigmoid_gradient)
    return out


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Compute `F.silu`, never in place."""
    out: Tensor = _Elementwise.apply(x, F.silu, silu_gradient)
    return out


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `torch.softmax` over the last dim, in fp32 at least."""
    out: Tensor = _Softmax.apply(x if dtype is None else x.to(dtype))
    return out


def logsumexp(x: Tensor) -> Tensor:
    """Compute `torch.logsumexp` over the last dim, in fp32 at least."""
    out: Tensor = _LogSumExp.apply(x)
    return out


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
