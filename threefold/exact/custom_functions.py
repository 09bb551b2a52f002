"""Replacements of torch's functions that a user's own model calls, in the arithmetic of exact runs (`exact.layers`).

They compute the same by operations whose bits depend on no shape that a layout decides: products of oneDNN, sums in a
tree, and arithmetic of elements.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.exact import functions, layers
from threefold.exact.layers import RowSum, last_dim_summed, widened
from threefold.exact.products import product, sum_dim

Replacement: TypeAlias = Callable[..., Any]
"""Returns a function's result, or NotImplemented to leave these arguments to torch."""


def grads(x: Any) -> bool:
    """Return whether a value is a tensor that needs a gradient."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Compute `x.expand(shape)`; the gradient is a tree sum over the repeated dims."""
    if tuple(x.shape) == tuple(shape):
        return x
    if not grads(x):
        return x.expand(shape)
    return _Expand.apply(x, torch.Size(shape))


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape = x.shape
        return x.expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        lead = grad.dim() - len(ctx.shape)
        dims = [dim for dim, size in enumerate(grad.shape) if dim < lead or ctx.shape[dim - lead] != size]
        return _summed(grad, dims).view(ctx.shape), None


def _expanded(x: Tensor, *sizes: Any, implicit: bool = False) -> Tensor:
    shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    lead = len(shape) - x.dim()
    return expand(x, [x.shape[at - lead] if size == -1 else size for at, size in enumerate(shape)])


def _summed(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum over dims, as a tree, in fp32 at least."""
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    sizes = [x.shape[dim] for dim in kept]
    rows = widened(x).permute(*dims, *kept).reshape(prod(x.shape[dim] for dim in dims), *sizes)
    return sum_dim(rows, 0).to(x.dtype)


def total(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Compute `x.sum(dim, keepdim)` of floats."""
    dims = (dim,) if isinstance(dim, int) else dim or range(x.dim())
    chosen = tuple(sorted({each % max(1, x.dim()) for each in dims}))
    out: Tensor = _Total.apply(x, chosen) if x.dim() else x.clone()
    if keepdim:
        out = out.reshape([1 if dim in chosen else size for dim, size in enumerate(x.shape)])
    return out


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.shape, ctx.kept = x.shape, [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        return _summed(x, dims).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.reshape(ctx.kept).expand(ctx.shape), None


def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    if not x.is_floating_point():
        return torch.sum(x) if dim is None else torch.sum(x, dim, keepdim)
    return total(x, dim, keepdim)


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    found = total(x, dim, keepdim)
    return found / (x.numel() // max(1, found.numel()))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b` of vectors, matrices or batches of matrices."""
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1)).squeeze(-1)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if b.dim() == 2:  # one product: its rows do not depend on each other
        out: Tensor = _Products.apply(a.reshape(1, -1, a.shape[-1]), b.unsqueeze(0))
        return out.view(*a.shape[:-1], b.shape[-1])
    a, b = (expand(each, (*batch, *each.shape[-2:])) for each in (a, b))
    count = prod(batch)
    out = _Products.apply(a.reshape(count, *a.shape[-2:]), b.reshape(count, *b.shape[-2:]))
    return out.view(*batch, a.shape[-2], b.shape[-1])


class _Products(torch.autograd.Function):
    """Products of each pair of matrices of `a` [n, r, k] and `b` [n, k, c]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _stacked(a, b.mT, (len(a), a.shape[1], b.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return _stacked(grad, b, a.shape) if wants_a else None, _stacked(a.mT, grad.mT, b.shape) if wants_b else None


def _stacked(a: Tensor, b: Tensor, shape: Sequence[int]) -> Tensor:
    found = [product(*each) for each in zip(a.unbind(), b.unbind(), strict=True)]
    return torch.stack(found) if found else a.new_empty(shape)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    flat = x.flatten(-len(shape))
    weight, bias = (None if each is None else each.flatten() for each in (weight, bias))
    return layers.layer_norm(flat, weight, bias, eps, RowSum()).view(x.shape)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    weight = None if weight is None else weight.flatten()
    return layers.rms_norm(x.flatten(-len(shape)), weight, eps, RowSum()).view(x.shape)


def _softmax_by(compute: Callable[[Tensor], Tensor]) -> Replacement:
    """Return the replacement that computes over the last dim, in fp32 at least."""

    def replaced(
        input: Tensor, dim: int | None = None, *args: Any, dtype: torch.dtype | None = None, _stacklevel: int = 3
    ) -> Any:
        if dim is None or args or not input.dim():
            return NotImplemented
        x = input if dtype is None else input.to(dtype)
        return compute(x.movedim(dim, -1).contiguous()).movedim(-1, dim)

    return replaced


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shifted = widened(x).sub(widened(x.amax(-1, keepdim=True)))
        out = shifted.sub(last_dim_summed(shifted.exp()).log())
        ctx.save_for_backward(out)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        wide = widened(grad).contiguous()
        return wide.sub(out.exp().mul_(last_dim_summed(wide))).to(grad.dtype)


_log_softmax = _softmax_by(_LogSoftmax.apply)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    deprecated = size_average is not None or reduce is not None
    if target.is_floating_point() or weight is not None or label_smoothing or deprecated or not input.dim():
        return NotImplemented
    log_probabilities = _log_softmax(input, min(1, input.dim() - 1))
    return _nll_loss(log_probabilities, target, weight, size_average, ignore_index, reduce, reduction)


def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    by_class = input.movedim(min(1, input.dim() - 1), -1)  # dim 0 of a vector
    hidden = target == ignore_index
    picked = by_class.gather(-1, target.masked_fill(hidden, 0).unsqueeze(-1)).squeeze(-1)
    losses = picked.neg().masked_fill(hidden, 0)
    if reduction == "none":
        return losses
    found = total(losses)
    return found / (~hidden).sum().to(found.dtype) if reduction == "mean" else found


def _loss_of(losses: Callable[[Tensor], Tensor]) -> Replacement:
    def replaced(
        input: Tensor,
        target: Tensor,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
    ) -> Any:
        if size_average is not None or reduce is not None or weight is not None or input.shape != target.shape:
            return NotImplemented
        found = losses(input - target)
        if reduction == "none":
            return found
        return total(found) / found.numel() if reduction == "mean" else total(found)

    return replaced


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute `F.scaled_dot_product_attention` without dropout; it keeps the attention weights."""
    if dropout_p or grads(attn_mask):
        return NotImplemented
    if enable_gqa:
        served = query.shape[-3] // key.shape[-3]
        key, value = (
            expand(x.unsqueeze(-3), (*x.shape[:-2], served, *x.shape[-2:])).flatten(-4, -3) for x in (key, value)
        )
    scores = matmul(query * (query.shape[-1] ** -0.5 if scale is None else scale), key.mT)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
    return matmul(functions.softmax(scores), value)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training and p else input


def _power(x: Any, exponent: Any) -> Any:
    if isinstance(exponent, int | float) and exponent in (1, 2, 3):
        return torch.pow(x, exponent)
    return torch.sqrt(x) if isinstance(exponent, int | float) and exponent == 0.5 else NotImplemented


def _of_elements(compute: Callable[..., Tensor]) -> Replacement:
    return lambda input, *args, **options: compute(input, *args, **options)


REPLACED: Final[dict[str, Replacement]] = {
    "linear": layers.linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm", "mv"), matmul),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax_by(functions.softmax),
    "log_softmax": _log_softmax,
    "sum": _sum,
    "mean": _mean,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "mse_loss": _loss_of(torch.square),
    "l1_loss": _loss_of(torch.abs),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("expand", "broadcast_to"), _expanded),
    "expand_as": lambda x, other: expand(x, other.shape),
    "gelu": _of_elements(functions.gelu),
    "silu": _of_elements(functions.silu),
    "sigmoid": _of_elements(functions.sigmoid),
    "rsqrt": lambda x: torch.sqrt(x).reciprocal(),
    **dict.fromkeys(("pow", "__pow__"), _power),
    "dropout": _dropout,
    "relu": lambda input, inplace=False: torch.relu_(input) if inplace else torch.relu(input),
}
"""Function by its name in torch → its replacement."""
