"""Functions of elements and softmax of exact runs, made of operations whose bits depend on no shape (`ops.exact`)."""

from collections.abc import Callable
from math import pi, sqrt
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.ops.exact import last_dim_summed, widened


class _Elementwise(torch.autograd.Function):
    """Function of each element, in fp32 at least, with its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return value(widened(x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.slope(widened(x)).mul_(grad).to(x.dtype), None, None


_LINEAR: Final = sqrt(2 / pi)
_CUBIC: Final = 0.044715


def _tanh(x: Tensor) -> Tensor:
    return x.square().mul_(_CUBIC).add_(1).mul_(_LINEAR).mul_(x).tanh_()


def _gelu_tanh(x: Tensor) -> Tensor:
    return _tanh(x).add_(1).mul_(x).mul_(0.5)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    # d/dx of x · (1 + t) / 2, with t' = (1 − t²) · √(2/π) · (1 + 3 · 0.044715 · x²)
    turn = _tanh(x)
    inner = x.square().mul_(3 * _CUBIC).add_(1).mul_(_LINEAR).mul_(x)
    return turn.square().neg_().add_(1).mul_(inner).add_(turn).add_(1).mul_(0.5)


def _gelu_erf(x: Tensor) -> Tensor:
    return x.mul(sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)


def _gelu_erf_slope(x: Tensor) -> Tensor:
    density = x.square().mul_(-0.5).exp_().mul_(1 / sqrt(2 * pi)).mul_(x)
    return x.mul(sqrt(0.5)).erf_().add_(1).mul_(0.5).add_(density)


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def _sigmoid_slope(x: Tensor) -> Tensor:
    value = _sigmoid(x)
    return value.neg().add_(1).mul_(value)


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1)


def _silu_slope(x: Tensor) -> Tensor:
    # σ · (1 + x · (1 − σ))
    value = _sigmoid(x)
    return value.neg().add_(1).mul_(x).add_(1).mul_(value)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute `F.gelu`, in fp32 at least."""
    functions = (_gelu_tanh, _gelu_tanh_slope) if approximate == "tanh" else (_gelu_erf, _gelu_erf_slope)
    out: Tensor = _Elementwise.apply(x, *functions)
    return out


def sigmoid(x: Tensor) -> Tensor:
    """Compute `torch.sigmoid`, in fp32 at least."""
    out: Tensor = _Elementwise.apply(x, _sigmoid, _sigmoid_slope)
    return out


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Compute `F.silu`, in fp32 at least, never in place."""
    out: Tensor = _Elementwise.apply(x, _silu, _silu_slope)
    return out


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `torch.softmax` over the last dim, in fp32 at least."""
    out: Tensor = _Softmax.apply(x if dtype is None else x.to(dtype))
    return out


def logsumexp(x: Tensor) -> Tensor:
    """Compute `torch.logsumexp` over the last dim, in fp32 at least."""
    out: Tensor = _LogSumExp.apply(x)
    return out


class _LogSumExp(torch.autograd.Function):
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


class _Softmax(torch.autograd.Function):
    """Softmax whose rows are computed alike whatever their number, which torch's backward pass does not promise."""

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
