"""Torch's functions that a user's own model calls, in the arithmetic of exact runs (`ops.exact`).

Each computes the same as torch's function of the same name, by operations whose bits depend on no shape that a layout
decides: products of oneDNN, sums in a tree, and arithmetic of elements. Arguments that none of them handles are left to
torch's own (`ops.own_arithmetic`).
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.ops.exact import last_dim_summed, widened
from threefold.ops.exact_functions import softmax as last_dim_softmax
from threefold.ops.exact_products import product, sum_dim


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Compute `x.expand(shape)`; the gradient is a tree sum over the repeated dims."""
    if tuple(x.shape) == tuple(shape):
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.expand(shape)
    out: Tensor = _Expand.apply(x, torch.Size(shape))
    return out


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


def _summed(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum over dims, as a tree, in fp32 at least."""
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    sizes = [x.shape[dim] for dim in kept]
    rows = widened(x).permute(*dims, *kept).reshape(prod(x.shape[dim] for dim in dims), *sizes)
    return sum_dim(rows, 0).to(x.dtype)


def total(x: Tensor, dims: Iterable[int] | None = None, keepdim: bool = False) -> Tensor:
    """Compute `x.sum(dims, keepdim)` of floats."""
    chosen = range(x.dim()) if dims is None else sorted({dim % max(1, x.dim()) for dim in dims})
    out: Tensor = _Total.apply(x, tuple(chosen)) if x.dim() else x.clone()
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


def softmax(x: Tensor, dim: int) -> Tensor:
    """Compute `x.softmax(dim)`."""
    return last_dim_softmax(x.movedim(dim, -1).contiguous()).movedim(-1, dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """Compute `x.log_softmax(dim)`, in fp32 at least."""
    out: Tensor = _LogSoftmax.apply(x.movedim(dim, -1).contiguous())
    return out.movedim(-1, dim)


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


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
    """Compute `F.cross_entropy` of labels int64, with the classes in dim 1 (dim 0 of a vector)."""
    return nll_loss(log_softmax(logits, min(1, logits.dim() - 1)), labels, ignored, reduction)


def nll_loss(log_probabilities: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
    """Compute `F.nll_loss` of labels int64."""
    by_class = log_probabilities.movedim(min(1, log_probabilities.dim() - 1), -1)
    hidden = labels == ignored
    picked = by_class.gather(-1, labels.masked_fill(hidden, 0).unsqueeze(-1)).squeeze(-1)
    losses = picked.neg().masked_fill(hidden, 0)
    if reduction == "none":
        return losses
    found = total(losses)
    return found / (~hidden).sum().to(found.dtype) if reduction == "mean" else found


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Reduce the losses of elements as the functions of torch with a `reduction` do."""
    if reduction == "none":
        return losses
    return total(losses) / losses.numel() if reduction == "mean" else total(losses)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` without dropout; it keeps the attention weights."""
    if grouped:
        k, v = (_serve(each, q.shape[-3]) for each in (k, v))
    scores = matmul(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return matmul(last_dim_softmax(scores), v)


def _serve(x: Tensor, heads: int) -> Tensor:
    groups = x.shape[-3]
    repeated = expand(x.unsqueeze(-3), (*x.shape[:-2], heads // groups, *x.shape[-2:]))
    return repeated.flatten(-4, -3)
