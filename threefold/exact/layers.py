"""Arithmetic of exact runs: sums in a fixed order, and kernels whose bits depend on no shape that a layout decides.

A floating-point sum depends on the order of its additions, and a layout decides which rank adds what. An exact run
therefore cuts every sum that a layout may cut into *pieces* that are the same in every layout, and adds the pieces in
one balanced binary tree: piece 0 + piece 1, piece 2 + piece 3, then the sums of pairs, and so on. A rank adds the
subtree of its own pieces; ranks then add their roots in the same tree, so every addition has the same two operands
wherever it is made.

Elementwise functions are a second trap: torch computes the last elements of a tensor, or of a thread's part of it, with
other instructions than the rest. The sigmoid, SiLU and GELU then differ in the last bit. `exact.functions` gives
every thread whole vectors.

`tests/exact/test_layers.py` verifies what these functions rely on for a CPU in fp32, over odd sizes, cuts, offsets and
1, 2 and 4 threads:

- products whose bits are defined by calls of one shape; faster ones where a trial shows the same bits
  (`exact.products`).
  Torch's `@`, `baddbmm` and `F.scaled_dot_product_attention` differ with heads and threads
  (`test_torchs_attention_depends_on_heads_or_threads`).
- torch's arithmetic of elements, square roots, reciprocals, `exp`, `tanh` and `erf` (`test_elementwise`); not its
  `sigmoid`, SiLU and GELU.
- torch's `amax`, softmax and sums over a contiguous last dim of several rows (`test_rows`); not the backward pass of
  softmax, nor sums of a whole tensor or over the rows.
- the gradient of a layer norm's input in its backward pass (`test_norms_are_the_tree_over_ranks`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from threefold.exact.products import Parts, equal_parts, product, sum_dim, tree_sum
from threefold.ops.kernels import GradientStore, defer_or_compute, gradient_store
from threefold.torch_private.runtime import UninterceptedFunction, layer_norm_gradient


@dataclass(frozen=True)
class RowSum:
    """Sum of the rows of a sample group's sequences, of which this rank holds some, for gradients of norms and biases.

    It is a sum over pieces of each context piece, then over the context pieces of this rank. `exact.sample_sums`
    sums over context ranks.
    """

    pieces: int = 1  # of a context piece on this rank; with `gather`, of all context pieces together
    over_ranks: Callable[[Tensor], Tensor] | None = None  # sum in a tree over the ranks that share the sequence
    context: int = 1  # context pieces that this rank, or the ranks of `gather` together, hold
    # Concatenation along the first dim over ranks that share context pieces, none of which one of them holds whole.
    gather: Callable[[Tensor], Tensor] | None = None

    def __call__(self, *rows: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Sum the rows of tensors, in fp32 at least and in one exchange: [n] each, in `dtype` or their own.

        A piece of a tensor [B, S, n] is a run of positions of all samples if the pieces divide S. Otherwise, and of a
        tensor with other dims [..., n], it is a run of rows.

        Sums of several context pieces are rounded before they are added, as they are between ranks.
        """
        if not rows:
            return []
        sums = torch.stack([sum_dim(self._of_runs(each), 1) for each in rows])
        if self.over_ranks is not None:
            sums = self.over_ranks(sums)
        return [sum_dim(total.to(dtype or each.dtype), 0) for total, each in zip(sums.unbind(), rows, strict=True)]

    def parts(self) -> Parts:
        """Return the parts of a sequence's rows that a rank of another layout may hold alone (`exact.products`)."""
        runs, last = self.pieces, 2 * self.context - 1
        if self.context == 1:
            return equal_parts(runs)
        # A context piece is a chunk and its mirror image, of `runs` pieces of half a run each.
        chunks = (
            (*(each * runs + at for at in range(runs)), *((last - each) * runs + at for at in range(runs)))
            for each in range(self.context)
        )
        return tuple(chunk[first : first + 2] for chunk in chunks for first in range(0, 2 * runs, 2))

    def _of_runs(self, x: Tensor) -> Tensor:
        """Sum the rows of each run of each context piece: [context pieces, runs, n]."""
        if self.gather is None:
            parts = [_runs_summed(part, self.pieces) for part in context_parts(x, self.context, -2)]
            return torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
        return torch.stack(context_parts(self.gather(_runs_summed(x, self.pieces)), self.context, 0))


def context_parts(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Cut `dim`, whose positions are in two halves, into `count` context pieces.

    The first is the first chunk of the first half and the last one of the second, and so on: so a piece has the same
    positions whether a rank holds one context piece or all (`parallel.context.SequenceCut`).
    """
    if count == 1:
        return [x]
    chunks = x.chunk(2 * count, dim)
    return [torch.cat([chunks[number], chunks[-1 - number]], dim) for number in range(count)]


def _runs_summed(x: Tensor, runs: int) -> Tensor:
    """Sum each of `runs` equal runs of positions of `x` [B, S, n], or of rows of `x` [..., n]: [runs, n].

    Sums are in fp32 at least. The bits of torch's own sums of rows depend on the number of columns and threads;
    additions of elements do not.
    """
    samples = len(x) if x.dim() == 3 and len(x) and x.shape[1] % runs == 0 else 1
    count = x.shape[:-1].numel() // (samples * runs)
    if samples * count < 2:
        return widened(x).reshape(runs, count, x.shape[-1]).sum(1)
    left = min(128, count if samples > 1 else count // 2)  # rows added to others at once: their sum stays in the cache
    of_samples = x.reshape(samples, runs, count, x.shape[-1]).unbind()
    at_once = zip(*(sample.split(left, 1) for sample in of_samples), strict=True)
    first, second, *others = (part for parts in at_once for part in parts)
    total = widened(first) + second
    for part in others:
        total.narrow(1, 0, part.shape[1]).add_(part)
    while left > 1:
        half = (left + 1) // 2
        total.narrow(1, 0, left - half).add_(total.narrow(1, half, left - half))
        left = half
    return total[:, 0]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    inner: int = 1,
    outer: int = 1,
    rows: RowSum | None = None,
    weight_rows: RowSum | None = None,
) -> Tensor:
    """Compute `F.linear` of `x` [..., in], `weight` [out, in], `bias` [out] with sums in pieces that a layout may cut.

    The output sums over `inner` pieces of the input features (of a row-parallel layer), the gradient of `x` over
    `outer` pieces of the output features (of a column-parallel one). `rows` sums those of `x` for the bias's gradient,
    whose context pieces the weight's gradient has too, unless `weight_rows` sums the latter. Like `kernels.linear`, it
    defers the gradients of a `DeferrableWeight` whose store is open.
    """
    rows = rows or RowSum()
    sums = rows, weight_rows or RowSum(context=rows.context)
    return _Linear.apply(x, weight, bias, inner, outer, sums, gradient_store(weight))


class _Linear(UninterceptedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner: int,
        outer: int,
        sums: tuple[RowSum, RowSum],
        store: GradientStore | None,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.inner, ctx.outer, (ctx.rows, ctx.weight_rows) = inner, outer, sums
        ctx.store, ctx.leaves = store, (None, None) if store is None else (weight, bias)
        out = product(flat, weight, inner, ctx.weight_rows.parts(), outer)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        (leaf, bias), rows, of_weight, cuts = ctx.leaves, ctx.rows, ctx.weight_rows, (ctx.outer, ctx.inner)
        grad_x = product(flat, weight.t(), ctx.outer, of_weight.parts(), ctx.inner) if wants_x else None
        return (
            None if grad_x is None else grad_x.view(*grad.shape[:-1], weight.shape[1]),
            defer_or_compute(ctx.store, leaf, wants_weight, partial(_weight_gradient, of_weight, flat, x, *cuts)),
            defer_or_compute(ctx.store, bias, wants_bias, lambda: rows(grad)[0]),
            *(None,) * 4,
        )


def _weight_gradient(rows: RowSum, grad: Tensor, x: Tensor, outer: int, inner: int) -> Tensor:
    """Return `grad.T @ x` of `grad` [rows, out] and `x` [rows, in], as a tree sum over context pieces of the rows."""
    parts = zip(context_parts(grad, rows.context, 0), context_parts(x, rows.context, 0), strict=True)
    total = tree_sum(product(one.t(), other.t(), rows.pieces, equal_parts(outer), inner) for one, other in parts)
    return total if rows.over_ranks is None else rows.over_ranks(total)


def add_bias(x: Tensor, bias: Tensor, rows: RowSum) -> Tensor:
    """Add `bias` [n] to `x` [..., n]."""
    return _AddBias.apply(x, bias, rows)


class _AddBias(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, rows: RowSum) -> Tensor:
        ctx.rows = rows
        return x + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.rows(grad)[0] if ctx.needs_input_grad[1] else None, None


def embedding(ids: Tensor, table: Tensor, rows: RowSum, local: range) -> Tensor:
    """Look up rows of `table` [V, H] at `ids` int64 [B, S], the same id several times or on several ranks: [B, S, H].

    `rows` sums the positions for the table's gradient, of which this rank keeps the rows `local`; its others are zero.
    """
    return _Embedding.apply(ids, table, rows, local)


class _Embedding(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, rows: RowSum, local: range) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.local, ctx.count = rows, local, len(table)
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows: RowSum = ctx.rows
        wide, pieces = widened(grad), rows.pieces
        if rows.gather is not None:
            wide, ids = (rows.gather(each.squeeze(0)).unsqueeze(0) for each in (wide, ids))
            pieces = pieces * wide.shape[1] // (grad.shape[1] * rows.context)
        parts = zip(context_parts(wide, rows.context, 1), context_parts(ids, rows.context, 1), strict=True)
        sums = tree_sum(_table_sum(*each, ctx.count, pieces, rows.over_ranks).to(grad.dtype) for each in parts)
        kept = torch.zeros_like(sums)
        kept[ctx.local.start : ctx.local.stop] = sums[ctx.local.start : ctx.local.stop]
        return None, kept, None, None


def _table_sum(
    grad: Tensor, ids: Tensor, count: int, pieces: int, over_ranks: Callable[[Tensor], Tensor] | None
) -> Tensor:
    parts = zip(grad.chunk(pieces, 1), ids.chunk(pieces, 1), strict=True)
    sums = tree_sum(_looked_up(*each, count) for each in parts)
    return sums if over_ranks is None else over_ranks(sums)


def _looked_up(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Return the gradient of a table of `rows` rows, summed in the order of `ids`."""
    table = grad.new_zeros(rows, grad.shape[-1]).requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(F.embedding(ids, table), table, grad)
    return found


def repeat(x: Tensor, times: int) -> Tensor:
    """Repeat `x` [..., 1, n] along its last dim but one; the gradient is a tree sum: [..., times, n]."""
    return _Repeat.apply(x, times)


class _Repeat(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        return x.expand(*x.shape[:-2], times, -1).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return tree_sum(each.clone() for each in grad.split(1, -2)), None


def widened(x: Tensor) -> Tensor:
    """Return `x` in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: RowSum) -> Tensor:
    """Compute `F.layer_norm` over the last dim; `rows` sums the gradients of weight and bias."""
    return _LayerNorm.apply(x, weight, bias, eps, rows)


class _LayerNorm(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: RowSum) -> Tensor:
        out, mean, scale = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.rows = rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        summed = [widened(x).sub(mean).mul_(scale).mul_(widened(grad))] if wants_weight else []
        like = x.dtype if weight is None else weight.dtype
        sums = ctx.rows(*summed, *([grad] if wants_bias else []), dtype=like)
        grad_x = None
        if wants_x:  # torch computes each row alone; only its sums over rows depend on threads
            grad_x = layer_norm_gradient(grad.contiguous(), x.contiguous(), mean, scale, weight)
        return grad_x, sums[0] if wants_weight else None, sums[-1] if wants_bias else None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None, rows: RowSum) -> Tensor:
    """Compute `F.rms_norm` over the last dim, in fp32 at least; `rows` sums the gradient of the weight."""
    return _RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps, rows)


class _RMSNorm(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, rows: RowSum) -> Tensor:
        wide = widened(x).contiguous()
        scale = last_dim_summed(wide.square()).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_()
        ctx.save_for_backward(x, weight, scale)
        ctx.rows = rows
        normed = wide * scale
        return (normed if weight is None else normed.mul_(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        wide = widened(grad).contiguous()
        normed = widened(x).contiguous() * scale
        grad_weight = ctx.rows(wide * normed, dtype=weight.dtype)[0] if wants_weight else None
        grad_x = None
        if wants_x:
            scaled = wide if weight is None else wide * weight
            along = last_dim_summed(scaled * normed).div_(x.shape[-1])
            grad_x = (scaled - normed.mul_(along)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None, None


def last_dim_summed(x: Tensor) -> Tensor:
    """Sum the last dim, keeping it; torch divides the sum of a single row among its threads."""
    if x.shape[:-1].numel() != 1:
        return x.sum(-1, keepdim=True)
    return torch.stack([x, x]).sum(-1, keepdim=True)[0]
