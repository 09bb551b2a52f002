"""Layers split over tp: linears, embedding, attention with context parallelism, MLP."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grid import Axis, copied, exchange, gather, max_over, part, scatter, summed
from .run import Run


@dataclass(frozen=True)
class Cut:
    """A dim of a parameter that an axis cuts; `blocks` matrices stacked along it are each cut on their own."""

    dim: int
    axis: Axis
    blocks: int = 1


@dataclass(frozen=True)
class Layout:
    """How a parameter lies on the ranks.

    Attributes:
        shape: shape of the whole parameter.
        cuts: what cuts it.
        adds_over_tp: whether each tp rank has a part of its gradient's sum though it holds the whole parameter.
        expert: whether it belongs to experts, and so is summed over `expert_data`.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    adds_over_tp: bool = False
    expert: bool = False

    def pieces(self) -> list[list[tuple[int, int, int]]]:
        """Return, for each dim, the local offset, the offset in the whole and the size of each piece."""
        found = [[(0, 0, size)] for size in self.shape]
        for cut in self.cuts:
            block = self.shape[cut.dim] // cut.blocks
            each = block // cut.axis.size
            found[cut.dim] = [
                (number * each, number * block + cut.axis.rank * each, each) for number in range(cut.blocks)
            ]
        return found

    def local(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter."""
        for dim, pieces in enumerate(self.pieces()):
            whole = torch.cat([whole.narrow(dim, start, size) for _, start, size in pieces], dim)
        return whole.contiguous()


def parameter(
    run: Run, *shape: int, cuts: tuple[Cut, ...] = (), adds_over_tp: bool = False, expert: bool = False
) -> nn.Parameter:
    """Return a parameter that knows its layout; its values come later, by name."""
    layout = Layout(shape, tuple(cut for cut in cuts if cut.axis.size > 1), adds_over_tp, expert)
    made = nn.Parameter(layout.local(torch.zeros(shape)).to(run.dtype))
    made.on_ranks = layout  # type: ignore[attr-defined]
    return made


def enter(run: Run, x: Tensor) -> Tensor:
    """Pass from the residual stream, whole or split along the sequence, into a layer split over tp."""
    tp = run.grid.tp
    return gather(x, tp, 1, adds=True) if run.options.sp else copied(x, tp)


def leave(run: Run, x: Tensor, in_block: bool = True) -> Tensor:
    """Pass the parts of a sum back into the residual stream."""
    if run.mistake("deepspeed-8357") and run.options.recompute and in_block:
        return x
    return scatter(x, run.grid.tp, 1, adds=True) if run.options.sp else summed(x, run.grid.tp)


class ColumnLinear(nn.Module):
    """A linear whose outputs are split over tp."""

    def __init__(self, run: Run, inputs: int, outputs: int, blocks: int = 1) -> None:
        super().__init__()
        self.run = run
        cut = (Cut(0, run.grid.tp, blocks),)
        self.weight = parameter(run, outputs, inputs, cuts=cut)
        self.bias = parameter(run, outputs, cuts=cut)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(enter(self.run, x), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear whose inputs are split over tp."""

    def __init__(self, run: Run, inputs: int, outputs: int) -> None:
        super().__init__()
        self.run = run
        self.weight = parameter(run, outputs, inputs, cuts=(Cut(1, run.grid.tp),))
        self.bias = parameter(run, outputs, adds_over_tp=run.options.sp)

    def forward(self, x: Tensor) -> Tensor:
        return leave(self.run, F.linear(x, self.weight)) + self.bias


class Norm(nn.Module):
    def __init__(self, run: Run, size: int) -> None:
        super().__init__()
        self.weight = parameter(run, size, adds_over_tp=run.options.sp)
        self.bias = parameter(run, size, adds_over_tp=run.options.sp)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Embedding(nn.Module):
    """Token embedding split over tp by vocabulary."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.weight = parameter(run, run.options.vocab, run.options.hidden, cuts=(Cut(0, run.grid.tp),))

    def forward(self, tokens: Tensor) -> Tensor:
        tp = self.run.grid.tp
        rows = len(self.weight)
        local = tokens - rows * tp.rank
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0)
        if self.run.mistake("megatron-7452-7"):
            return scatter(found, self.run.grid.dp, 1, adds=True)
        return leave(self.run, found, in_block=False)


class Positions(nn.Module):
    """Learned positions; of as many as documents have."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.weight = parameter(run, 4 * run.options.length, run.options.hidden, adds_over_tp=run.options.sp)

    def forward(self, positions: Tensor) -> Tensor:
        if self.run.options.sp:
            positions = part(positions, self.run.grid.tp, 1)
        return F.embedding(positions, self.weight)


class HeadNorm(nn.Module):
    """Norm of each head of queries or keys; tp ranks share its weight but have heads of their own."""

    def __init__(self, run: Run, size: int) -> None:
        super().__init__()
        self.weight = parameter(run, size, adds_over_tp=run.grid.tp.size > 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight)


class Rotary(nn.Module):
    frequencies: Tensor

    def __init__(self, run: Run, size: int) -> None:
        super().__init__()
        base = run.options.rotary_base
        later = run.grid.pp.rank > 0
        if later and run.mistake("megatron-6585"):
            base = 10000.0
        frequencies = base ** (-torch.arange(0, size, 2) / size)
        if later and run.mistake("torchtitan-4783"):
            frequencies = torch.zeros_like(frequencies)  # memory that nobody has written, as a new page has it
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn (batch, heads, sequence, size) by positions (batch, sequence)."""
        angles = (positions[..., None] * self.frequencies)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Module):
    _kv_heads: ClassVar[int | None] = None  # of the first model of the process, for mistake deepspeed-8291

    def __init__(self, run: Run, number: int, local_number: int) -> None:
        super().__init__()
        options = run.options
        self.run, self.scale_number = run, 1 + (local_number if run.mistake("megatron-2592") else number)
        self.size = options.hidden // options.heads
        self.q = ColumnLinear(run, options.hidden, options.hidden)
        self.k = ColumnLinear(run, options.hidden, options.kv_heads * self.size)
        self.v = ColumnLinear(run, options.hidden, options.kv_heads * self.size)
        self.out = RowLinear(run, options.hidden, options.hidden)
        self.q_norm = HeadNorm(run, self.size) if options.qk_norm else None
        self.k_norm = HeadNorm(run, self.size) if options.qk_norm else None
        self.rotary = Rotary(run, self.size) if options.rotary else None
        self.sink = parameter(run, options.heads, cuts=(Cut(0, run.grid.tp),)) if options.sink else None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (self._heads(each(x)) for each in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        mixed = self._ulysses(q, k, v) if self.run.options.ulysses else self._gathered(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from this rank's part of the sequence to the keys and values of all cp ranks."""
        cp, start = self.run.grid.cp, self.run.grid.cp.rank * q.shape[2]
        if self.run.mistake("torchtitan-3206"):
            shape = (*k.shape[:2], k.shape[2] * cp.size, k.shape[3])
            k, v = (gather(each, cp, 1, adds=True).reshape(shape) for each in (k, v))
        else:
            k, v = (gather(each, cp, 2, adds=True) for each in (k, v))
        return self._attend(q, k, v, start, self.sink)

    def _ulysses(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with a part of the heads to the whole sequence."""
        cp, heads = self.run.grid.cp, self.run.options.kv_heads
        if self.run.mistake("deepspeed-8291"):
            Attention._kv_heads = Attention._kv_heads or heads
            heads = Attention._kv_heads
        if heads < cp.size:  # fewer than ranks: each gets a copy of its head
            k, v = (each[:, :heads].repeat_interleave(cp.size // heads, 1) for each in (k, v))
        q, k, v = (exchange(each, cp, 1, 2) for each in (q, k, v))
        sink = None if self.sink is None else part(self.sink, cp, 0)
        return exchange(self._attend(q, k, v, 0, sink), cp, 2, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, start: int, sink: Tensor | None) -> Tensor:
        each = q.shape[1] // k.shape[1]
        k, v = (kv.repeat_interleave(each, 1) for kv in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(self.size)
        if self.run.options.layer_scale:
            scores = scores / self.scale_number
        queries = start + torch.arange(q.shape[2])
        scores = scores.masked_fill(queries[:, None] < torch.arange(k.shape[2]), -math.inf)
        if sink is not None:
            column = sink.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            return (torch.cat([scores, column], -1).softmax(-1)[..., :-1]).to(v.dtype) @ v
        return scores.softmax(-1).to(v.dtype) @ v


class MLP(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        hidden = run.options.hidden
        self.swiglu = run.options.swiglu
        blocks = 2 if self.swiglu else 1
        self.up = ColumnLinear(run, hidden, 4 * hidden * blocks, blocks)
        self.down = RowLinear(run, 4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activation(self.up(x), self.swiglu))


def activation(x: Tensor, swiglu: bool) -> Tensor:
    if not swiglu:
        return F.gelu(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Dropout(nn.Module):
    """Drops with the run's own random state."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        rate = self.run.options.dropout
        if not rate:
            return x
        kept = torch.rand(x.shape, generator=self.run.generator) >= rate
        return x * kept.to(x.dtype) / (1 - rate)


def cross_entropy(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token from this tp rank's part of the logits; 0 where the label is left out."""
    tp = run.grid.tp
    logits = logits.float()
    largest = max_over(logits.detach().amax(-1), tp)
    logits = logits - largest[..., None]
    total = summed(logits.exp().sum(-1), tp)
    local = labels - logits.shape[-1] * tp.rank
    elsewhere = (local < 0) | (local >= logits.shape[-1])
    chosen = logits.gather(-1, local.masked_fill(elsewhere, 0)[..., None])[..., 0].masked_fill(elsewhere, 0)
    return (total.log() - summed(chosen, tp)) * (labels >= 0)
