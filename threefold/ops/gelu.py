"""GELU by its tanh approximation on a CPU, twice as fast as torch's kernel, which computes a tanh in both passes.

As 1 + tanh(u) is 2 · σ(2u), the function is x · σ(z), z = x · (a + b · x²), and σ takes one exponential. The forward
pass computes the derivative too, σ(z) + x · σ(z) · (1 − σ(z)) · (a + 3 b · x²), while caches hold all that it needs.
The derivative is kept for the backward pass in the place of x, of the same size.
"""

from math import pi, sqrt
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from threefold.torch_private.operators import operator

_LINEAR: Final = 2 * sqrt(2 / pi)
_CUBIC: Final = 0.044715 * _LINEAR
_AT_ONCE: Final = 1 << 17  # elements that are gone over at once: what the second-level caches of two cores hold


def gelu_tanh(x: Tensor) -> Tensor:
    """`F.gelu(x, approximate="tanh")`."""
    if torch.compiler.is_compiling():
        # Compiled code goes over x once, and for a CPU takes less than half the time for σ of what it takes for a tanh.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.sigmoid(wide * (_LINEAR + _CUBIC * wide * wide))).to(x.dtype)
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _both(x, False)[0]
    out: Tensor = _GELU.apply(x)
    return out


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, derivative = _both(x, True)
        ctx.save_for_backward(derivative)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return grad * derivative


def _both(x: Tensor, derives: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    buffers = x.new_empty(2 if x.dtype == wide else 4, min(_AT_ONCE, x.numel()), dtype=wide)
    found: tuple[Tensor, Tensor] = GELU(x, buffers, derives)
    return found


def _shapes(x: Tensor, buffers: Tensor, derives: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if derives else 0)


def _gelu(x: Tensor, buffers: Tensor, derives: bool) -> tuple[Tensor, Tensor]:
    """The function, and its derivative where `derives` asks for it; each rounded once to the dtype of `x`.

    Args:
        x: the values.
        buffers: written into; [2, n] in the dtype of `x`, or [4, n] in fp32 for a narrower one.
        derives: whether the derivative is asked for.
    """
    out, derivative = _shapes(x, buffers, derives)
    linear = torch.full((), _LINEAR, dtype=buffers.dtype)
    runs = (each.reshape(-1).split(_AT_ONCE) for each in (x, out, derivative if derives else out))
    for at, to_out, to_derivative in zip(*runs, strict=True):
        factor, share, *copies = buffers[:, : len(at)]
        values, result, z = (copies[0].copy_(at), *copies) if copies else (at, to_out, to_derivative)
        torch.addcmul(linear, values, values, value=_CUBIC, out=factor)
        torch.mul(values, factor, out=z)
        torch.sigmoid(z, out=share)
        torch.mul(values, share, out=result)
        if copies:
            to_out.copy_(result)
        if derives:  # σ + y · (1 − σ) · (3 · factor − 2a), y being the result
            rest = torch.addcmul(result, result, share, value=-1, out=z)
            share.addcmul_(rest, factor, value=3)
            torch.add(share, rest, alpha=-2 * _LINEAR, out=rest)
            if copies:
                to_derivative.copy_(rest)
    return out, derivative


GELU: Final[Any] = operator("gelu_tanh", _shapes, changes=("buffers",))(_gelu)
