"""Cross-entropy: of logits, and of a linear layer's output with only some columns of the logits in memory at a time.

On a CPU, the logits are processed in runs of rows that fit the processor's caches, with one buffer in fp32 at least:
torch's own functions pass over all logits in memory several times, and over wide copies of narrow ones.

For a layer's output in chunks (runs of columns for all tokens, so that each row of the weight's gradient comes from one
product, rounded once), the backward pass needs only the layer's input and the
largest logit of each token: it recomputes the logits chunk by chunk, as in Wijmans et al., "Cut Your Losses in
Large-Vocabulary Language Models" (arXiv 2411.09009), section 4, so that the memory does not depend on how many
micro-batches a pipeline has in flight. Where memory allows, it keeps the logits instead, in the dtype of the product.
(Liger Kernel, Hsu et al., arXiv 2410.10989, computes the gradients of chunks of tokens in the forward pass: one product
fewer too, but each micro-batch in flight holds a gradient as large as the weight.)
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from threefold.constants import COMPILED, IGNORE_INDEX, LOGITS_AT_ONCE
from threefold.ops.kernels import product, softcap, softcap_slope
from threefold.torch_private.tensors import assert_async

# Kernels of any size read single numbers; those of one size, of which a run has a few, read sixteen bytes. (The
# overloads of `torch.compile` leave out the last two arguments.)
_PER_SIZE: Final[dict[str, Any]] = {"dynamic": False, "recompile_limit": 64, "isolate_recompiles": True}
_In = ParamSpec("_In")
_Out = TypeVar("_Out")


@cache
def _compiled(function: Callable[_In, _Out]) -> Callable[_In, _Out]:
    return torch.compile(function, **_PER_SIZE)


def cross_entropy(logits: Tensor, labels: Tensor, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """Compute `F.cross_entropy(..., reduction="none")` of [T, V] and int64 [T], in fp32 at least; 0 where ignored."""
    if torch.compiler.is_compiling() and logits.device.type != "cpu":
        wide = logits if logits.itemsize >= 4 else logits.float()
        return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return _CrossEntropy.apply(logits, labels, at_once)


def tops_and_sums(logits: Tensor, least: Tensor | None = None, at_once: int = LOGITS_AT_ONCE) -> tuple[Tensor, Tensor]:
    """Return each row's maximum (at least `least` [T]) and Σ exp(logit − maximum), in one pass over memory.

    `logits` are [T, V], V > 0, computed in the dtype of `least`, fp32 at least; `at_once` is `COMPILED` for one
    compiled kernel.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if at_once == COMPILED and not torch.compiler.is_compiling():
        return _compiled(tops_and_sums)(logits, least)
    if torch.compiler.is_compiling():  # fused: the compiler widens while reading
        top = logits.to(wide).amax(1)
        top = top if least is None else torch.maximum(top, least)
        return top, (logits.to(wide) - top.unsqueeze(1)).exp().sum(1)
    tops, sums = (logits.new_empty(len(logits), dtype=wide) for _ in range(2))  # two tensors, as one may be kept alone
    buffer = logits.new_empty(rows_at_once(logits, at_once), logits.shape[1], dtype=wide)
    for rows in runs_of_rows(logits, at_once):
        shifted = buffer[: rows.stop - rows.start]
        run = logits[rows] if logits.dtype == wide else shifted.copy_(logits[rows])
        top = run.amax(1) if least is None else torch.maximum(run.amax(1), least[rows])
        tops[rows], sums[rows] = top, torch.sub(run, top.unsqueeze(1), out=shifted).exp_().sum(1)
    return tops, sums


def scaled_exponentials(
    logits: Tensor, top: Tensor, factor: Tensor, column: Tensor, added: Tensor, at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """Compute exp(logit − top) · factor in each row, plus `added` at `column` in [0, V), rounded once: [T, V].

    `top`, `factor` and `added` [T] are in the dtype to compute in, the result in that of `logits`. `at_once` is
    `COMPILED` for one compiled kernel.
    """
    if at_once == COMPILED and not torch.compiler.is_compiling():
        return _compiled(scaled_exponentials)(logits, top, factor, column, added)
    factor, column, added = (each.unsqueeze(1) for each in (factor, column, added))
    if torch.compiler.is_compiling():
        shift = top.unsqueeze(1)
        others = (logits.to(top.dtype) - shift).exp() * factor
        there = (logits.gather(1, column) - shift).exp() * factor + added
        return others.to(logits.dtype).scatter(1, column, there.to(logits.dtype))
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    is_wide, shift = out.dtype == top.dtype, top.unsqueeze(1)
    buffer = top.new_empty(0 if is_wide else rows_at_once(logits, at_once), logits.shape[1])
    for rows in runs_of_rows(logits, at_once):
        if is_wide:
            run = torch.sub(logits[rows], shift[rows], out=out[rows])
        else:
            run = buffer[: rows.stop - rows.start].copy_(logits[rows]).sub_(shift[rows])
        run.exp_().mul_(factor[rows]).scatter_add_(1, column[rows], added[rows])
        if not is_wide:
            out[rows] = run
    return out


def runs_of_rows(logits: Tensor, at_once: int) -> Iterator[slice]:
    """Yield runs of rows to process at once: all on a GPU, as many as fit its caches on a CPU.

    A dry run, which has nothing to compute, gets only the first run: all need the same memory.
    """
    count, rows = len(logits), max(1, rows_at_once(logits, at_once))
    firsts = range(0, count, rows)
    for first in firsts[:1] if logits.untyped_storage().device.type == "meta" else firsts:
        yield slice(first, min(first + rows, count))


def rows_at_once(logits: Tensor, at_once: int) -> int:
    count, columns = logits.shape
    fitting = max(1, at_once // max(1, columns))
    return min(count, fitting) if logits.device.type == "cpu" else count


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, at_once: int) -> Tensor:
        ctx.at_once = at_once
        top, total = tops_and_sums(logits, at_once=at_once)
        ignored = labels == IGNORE_INDEX
        target = logits.gather(1, labels.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(logits, labels, top, total)
        return (total.log() - (target - top)).masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, top, total = ctx.saved_tensors
        ignored = labels == IGNORE_INDEX
        grad, column = grad.masked_fill(ignored, 0), labels.masked_fill(ignored, 0)
        return scaled_exponentials(logits, top, grad / total, column, -grad, ctx.at_once), None, None


# Torch's compiler would recognize the logits of both passes as equal, and keep them.
@torch.compiler.disable
def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    at_once: int = LOGITS_AT_ONCE,
    keep: bool = False,
    cap: float = 0.0,
) -> Tensor:
    """Compute `cross_entropy` of `F.linear(x, weight)`, with `chunk` columns of the logits in memory at once.

    `x` is [..., H], `weight` [V, H], `labels` and the result [...]. With `keep`, the backward pass does not compute the
    logits again. With `cap`, they are those of `kernels.softcap`.
    """
    flat = labels.flatten()
    top, total, target = logit_sums(x.flatten(0, -2), weight, flat, chunk, at_once, keep, cap)
    losses = total.log() - (target - top)
    return losses.masked_fill(flat == IGNORE_INDEX, 0).view(labels.shape)


def logit_sums(
    x: Tensor,
    weight: Tensor,
    column: Tensor,
    chunk: int,
    at_once: int = LOGITS_AT_ONCE,
    keep: bool = False,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum, Σ exp(logit − maximum), and the logit at `column`, of each row of `x @ weight.T`.

    The three results [T] are in fp32 at least; the maximum is a constant to autograd. V may be 0; for a column int64
    [T] outside of [0, V), the logit is zero. `chunk`, `at_once`, `keep` and `cap` are those of `chunked_cross_entropy`.
    """
    keep = keep and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _LogitSums.apply(x, weight, column, chunk, at_once, keep, cap)


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise RuntimeError if a label is neither in the vocabulary nor -100 (on a GPU, as a device-side assertion)."""
    known = (labels >= 0) & (labels < vocab_size) | (labels == IGNORE_INDEX)
    assert_async(known.all(), f"a label is neither in the vocabulary of {vocab_size} nor {IGNORE_INDEX}")


class _LogitSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, column: Tensor, chunk: int, at_once: int, keep: bool, cap: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        top = x.new_full((len(x),), -torch.inf, dtype=wide)
        total, target = torch.zeros_like(top), torch.zeros_like(top)
        kept = []
        for first, rows in _chunks(weight, chunk):
            padded = _capped(product(x, _aligned(rows)), cap)
            kept += [padded] * keep
            logits = padded[:, : len(rows)]
            place, there = _within(column - first, len(rows))
            target += logits.gather(1, place).squeeze(1).masked_fill_(~there, 0)
            higher, added = tops_and_sums(logits, top, at_once)
            total.mul_((top - higher).exp_()).add_(added)
            top = higher
            del padded, logits  # unless they are kept, free them before the next chunk
        ctx.save_for_backward(x, weight, column, top, *kept)
        ctx.chunk, ctx.at_once, ctx.cap = chunk, at_once, cap
        ctx.mark_non_differentiable(top)
        return top, total, target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _top: Tensor, total: Tensor, target: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, column, top, *kept = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=total.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for index, (first, rows) in enumerate(_chunks(weight, ctx.chunk)):
            (place, there), aligned = _within(column - first, len(rows)), _aligned(rows)
            logits = kept[index] if kept else _capped(product(x, aligned), ctx.cap)
            grad = scaled_exponentials(logits, top, total, place.squeeze(1), target * there, ctx.at_once)
            if ctx.cap:
                grad *= softcap_slope(logits, ctx.cap)
            if len(aligned) > len(rows):
                grad[:, len(rows) :] = 0
            if grad_x is not None:
                grad_x += product(grad, aligned.t())
            if grad_weight is not None:
                grad_weight[first : first + len(rows)] = product(grad.t(), x.t())[: len(rows)]
            del logits, grad
        return None if grad_x is None else grad_x.to(x.dtype), grad_weight, *(None,) * 5


def _capped(logits: Tensor, cap: float) -> Tensor:
    return softcap(logits, cap) if cap else logits


def _chunks(weight: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, len(weight), size):
        yield first, weight[first : first + size]


def _aligned(rows: Tensor) -> Tensor:
    """Return `rows` [C, H], on a GPU with zero rows up to a multiple of 16 bytes of logits.

    Products of other widths take seven times as long (bf16 on an H200).
    """
    missing = -len(rows) % (16 // rows.itemsize) if rows.is_cuda else 0
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _within(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return indices [T, 1] that are safe to gather, and whether each token's column is among them [T]."""
    there = (column >= 0) & (column < columns)
    return column.masked_fill(~there, 0).unsqueeze(1), there
