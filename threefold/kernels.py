"""Faster ways to compute the same on a CPU; elsewhere torch's own.

Torch's fp32 linear goes through MKL, which on processors that are not Intel's takes a slow path; oneDNN, which torch
carries too, does not. Torch's fused attention pays for saving memory, which short sequences on a CPU do not need.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_LONGEST_MATERIALISED = 512  # tokens; above it the attention matrices are worth saving
_QUERY_BLOCKS = {torch.float32: 4, torch.bfloat16: 2}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: `x` [..., in], `weight` [out, in], `bias` [out] → [..., out]."""
    if _onednn_serves(x, weight):
        out: Tensor = _OneDnnLinear.apply(x, weight, bias)
        return out
    return F.linear(x, weight, bias)


def causal_attention(qkv: Tensor) -> Tensor:
    """Causal self-attention of the heads in `qkv` [B, S, heads, 3, d] → [B, S, heads · d]."""
    if _blocks_serve(qkv):
        out: Tensor = _BlockedAttention.apply(qkv, _QUERY_BLOCKS[qkv.dtype])
        return out
    q, k, v = qkv.transpose(1, 2).unbind(3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == torch.float32 == weight.dtype
        and x.device.type == "cpu"
        and x.numel() > 0 < weight.numel()
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )


def _blocks_serve(qkv: Tensor) -> bool:
    return (
        qkv.dtype in _QUERY_BLOCKS
        and qkv.device.type == "cpu"
        and qkv.shape[1] <= _LONGEST_MATERIALISED
        and not torch.compiler.is_compiling()
    )


def _times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a` [m, k] times the transpose of `b` [n, k], through oneDNN, which takes transposed views as they are."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return out


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.has_bias = bias is not None
        return _times_transposed(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _times_transposed(flat, weight.t()).view(*grad.shape[:-1], weight.shape[1]) if wants_x else None,
            _times_transposed(flat.t(), x.t()) if wants_weight else None,
            flat.sum(0) if ctx.has_bias and wants_bias else None,
        )


class _BlockedAttention(torch.autograd.Function):
    """Attention that keeps its probabilities, by blocks of queries, each against the keys it may see."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, blocks: int) -> Tensor:
        batch, length, heads, _, width = qkv.shape
        packed = qkv.permute(3, 0, 2, 1, 4).reshape(3, batch * heads, length, width)
        q, k, v = packed
        mask = torch.full((length, length), -torch.inf, dtype=qkv.dtype).triu_(1)
        out = torch.empty_like(q)
        kept = []
        for start, end in _blocks(length, blocks):
            scores = torch.baddbmm(mask[start:end, :end], q[:, start:end], k[:, :end].mT, alpha=width**-0.5)
            weights = torch.softmax(scores, -1)
            torch.bmm(weights, v[:, :end], out=out[:, start:end])
            kept.append(weights)
        ctx.save_for_backward(packed, *kept)
        ctx.sizes = (batch, length, heads, width, blocks)
        return out.view(batch, heads, length, width).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (q, k, v), *kept = ctx.saved_tensors
        batch, length, heads, width, blocks = ctx.sizes
        grad = grad.view(batch, length, heads, width).transpose(1, 2).reshape(batch * heads, length, width)
        packed = torch.zeros(3, batch * heads, length, width, dtype=grad.dtype)
        dq, dk, dv = packed
        scale = width**-0.5
        for (start, end), weights in zip(_blocks(length, blocks), kept, strict=True):
            part = grad[:, start:end]
            dv[:, :end].baddbmm_(weights.mT, part)
            d_weights = torch.bmm(part, v[:, :end].mT)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, grad.dtype)
            dq[:, start:end].baddbmm_(d_scores, k[:, :end], beta=0, alpha=scale)
            dk[:, :end].baddbmm_(d_scores.mT, q[:, start:end], alpha=scale)
        return packed.view(3, batch, heads, length, width).permute(1, 3, 2, 0, 4).contiguous(), None


def _blocks(length: int, blocks: int) -> list[tuple[int, int]]:
    step = -(-length // blocks)
    return [(start, min(start + step, length)) for start in range(0, length, step)]
