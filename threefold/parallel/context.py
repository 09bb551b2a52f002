"""Sequence and context parallelism: positions of a sequence that a rank works on, and attention over all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from threefold.comm.axis import Axis
from threefold.comm.differentiable import all_gather_equal, copy_to, gather_shares, reduce_scatter
from threefold.config import ParallelConfig
from threefold.doors import hook
from threefold.errors import UserError
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.ops.kernels import AttentionMask, Scoring, serve_heads
from threefold.ops.tiles import Tile, whole_tiles
from threefold.random.dropout import drop
from threefold.random.rng import Positions, Slice
from threefold.torch_private.tensors import has_module_hooks

_TILES: Final[Callable[..., Iterable[Tile]]] = hook("attention_tiles") or whole_tiles


@dataclass(frozen=True)
class SequenceCut:
    """Positions of every sequence that one rank holds; implements `Positions` for the sequence dim.

    Context parallelism cuts the sequence into 2·cp chunks. Rank i takes the i-th and the i-th from the end, so that
    causal attention is the same amount of work for all ranks (Llama 3, arXiv 2407.21783, section 3.3.2). Sequence
    parallelism cuts each rank's part into tp consecutive shards; without it, `tp` is 1.
    """

    cp: int = 1
    cp_index: int = 0
    tp: int = 1
    tp_index: int = 0

    @property
    def shares(self) -> int:
        """Number of ranks that a sequence is sharded over."""
        return self.cp * self.tp

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this context rank's two chunks, of the 2·cp chunks of the sequence."""
        return self.cp_index, 2 * self.cp - 1 - self.cp_index

    @property
    def across_context(self) -> "SequenceCut":
        """Cut with the same positions on every tensor rank, as inside attention."""
        return replace(self, tp=1, tp_index=0)

    def whole(self, size: int) -> int:
        """Return the length of a sequence if a rank holds `size` of its positions."""
        return size * self.shares

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Return the `size` positions held, int64, ascending within a chunk."""
        held = torch.arange(self.tp_index * size, (self.tp_index + 1) * size, device=device)
        if self.cp == 1:
            return held
        if size * self.tp % 2:
            raise ValueError(f"{size * self.shares} positions do not divide into {2 * self.cp} chunks")
        chunk = size * self.tp // 2
        first, last = (number * chunk for number in self.chunks)
        return torch.where(held < chunk, held + first, held - chunk + last)


def chunk_length(positions: int) -> int:
    """Return the number of positions in each of a rank's two chunks; raise a `ValueError` if it is odd."""
    if positions % 2:
        raise ValueError(f"{positions} positions of a rank are not two chunks of one length")
    return positions // 2


@dataclass(frozen=True)
class ShardingContext:
    """Mesh axes that parallel layers are made for, with this rank's coordinates, and settings of these layers.

    Attributes:
        tp_shares: number of neighbouring tensor ranks that share a unit → axis of these ranks.
        arithmetic: how layers multiply and add.
        is_custom: whether the model is not built in, so that its activations may have any shapes.
    """

    tp: Axis
    cp: Axis
    ep: Axis
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tp_shares: Mapping[int, Axis] = field(default_factory=dict)
    arithmetic: LayerArithmetic = PLAIN
    is_custom: bool = False

    @property
    def cut(self) -> SequenceCut:
        """Part of the sequence that this rank's activations between parallel layers cover."""
        context = SequenceCut(self.cp.size, self.cp.index)
        return replace(context, tp=self.tp.size, tp_index=self.tp.index) if self.parallel.sequence_parallel else context

    @property
    def sequence_dim(self) -> int | None:
        """Dim of activations [B, S, H] that is sharded over tp between parallel layers; None if none is."""
        return 1 if self.parallel.sequence_parallel else None

    @property
    def divides(self) -> bool:
        """Whether any layer has to be replaced."""
        return self.tp.size > 1 or self.cp.size > 1 or self.ep.size > 1 or self.arithmetic.replaces_layers


def sum_over_shares_(gradients: Sequence[Tensor], axis: Axis) -> None:
    """All-reduce gradients of weights that each rank of `axis` holds whole but used on its local positions only.

    The gradients, of one dtype and in the same order on every rank, are replaced by their sums. For training steps of
    your own; the training step of a run sums them itself (`train.gradient_update`).
    """
    axis.all_reduce_together_(gradients)


def check_whole_sequences(cp: int, sequence_parallel: bool) -> None:
    """Raise a `UserError` if a layout shards sequences, since a user's loss function needs whole ones."""
    if cp > 1 or sequence_parallel:
        setting = f"cp is {cp}" if cp > 1 else "sequence_parallel is true"
        raise UserError(
            f"{setting} but a loss function of the user's needs whole sequences; use "
            f"{'cp 1' if cp > 1 else 'sequence_parallel false'}."
        )


@dataclass(frozen=True)
class SequenceChunk:
    """One of `count` equal chunks of a dim; implements `Positions`."""

    number: int
    count: int

    def indices(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.number * size, (self.number + 1) * size, device=device)

    def whole(self, size: int) -> int:
        return size * self.count


class ContextParallelAttention(nn.Module):
    """Causal attention with all-gathered keys and values, for the queries of this rank's `heads`.

    The queries of each of a rank's chunks attend separately.

    Args:
        core: attention of one device.
        runs: runs of chunks per rank, each with its mirror images.
    """

    def __init__(self, core: CausalAttention, axis: Axis, heads: Slice, runs: int = 1) -> None:
        super().__init__()
        self.check(core)
        self.sinks = core.sinks
        self.axis, self.runs, whole = axis, runs, runs * axis.size
        numbers = list(range(runs * axis.index, runs * (axis.index + 1)))
        self.numbers = numbers + [2 * whole - 1 - each for each in reversed(numbers)]
        self.chunks = nn.ModuleList(of_chunk(core, heads, SequenceChunk(number, 2 * whole)) for number in self.numbers)

    @staticmethod
    def check(core: CausalAttention) -> None:
        """Raise a `UserError` if an attention with sinks has another `forward` or hooks."""
        if core.sinks is not None:
            require_standard(core, "parallel.cp is above 1, which with attention sinks", "cp 1")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Attend from `q` [B, S / cp, heads, d], this rank's chunks in a row → [B, S / cp, heads · d].

        Keys and values [B, S / cp, key-value heads, d] are of the same positions, documents of the whole sequence; or
        keys and values are of the whole sequence too, as `SharedOverRanks` gives them.
        """
        size = chunk_length(q.shape[1]) // self.runs
        keys: list[tuple[Tensor, ...]] = [(k, v)]
        if k.shape[1] == q.shape[1]:
            keys = [each.unbind() for each in self.gathered(torch.stack([k, v]))]
        out = []
        for number, of_run, attend, queries in zip(
            self.numbers, keys + keys[::-1], self.chunks, q.split(size, 1), strict=True
        ):
            k, v = (each[:, : (number + 1) * size] for each in of_run)
            assert isinstance(attend, CausalAttention)
            if self.sinks is None:
                out.append(attend(queries, k, v, samples))
            else:
                out.append(attend.attend(queries, k, v, samples, attend.scoring._replace(sinks=self.sinks)))
        return torch.cat(out, 1)

    def gathered(self, shard: Tensor) -> Sequence[Tensor]:
        """Gather keys and values [2, B, S, heads, d] of the whole sequence, once for each run of chunks."""
        return (_GatherSequence.apply(shard, self.axis, 2),)


class SharedOverRanks(nn.Module):
    """`SharedByHeads` for latents of which each rank computes those of its positions.

    A rank gets those of all positions that its attention takes keys of: with `cp_method: all-gather` the whole
    sequence's, so that latents cross the context axis and not the wider keys and values of all heads.
    """

    def __init__(self, context: ShardingContext) -> None:
        super().__init__()
        self.tp, self.cp, self.sequence_dim = context.tp, context.cp, context.sequence_dim
        self.gathers = context.cp.size > 1 and context.parallel.cp_method != "ring"

    def forward(self, latents: Tensor) -> Tensor:
        """[B, S of this rank, n] → [B, S of its keys, n]; backward sums the gradients over the ranks."""
        if self.sequence_dim is None:
            latents = copy_to(latents, self.tp)
        else:
            latents = gather_shares(latents, self.tp, self.sequence_dim)
        return _GatherSequence.apply(latents, self.cp, 1) if self.gathers else latents


def of_chunk(core: CausalAttention, heads: Slice, queries: SequenceChunk) -> CausalAttention:
    """Restrict attention to some heads and queries, with the dropout masks of the whole."""
    attention = deepcopy(core)  # with the settings of a custom subclass
    attention.sinks = None  # of which the whole attention has the only ones
    # Dropout is of weights [B, heads, queries, keys]; keys start at position 0, so their dim has no offset.
    attention.dropout = core.dropout.of_part({1: heads, 2: queries})
    return attention


def require_standard(core: CausalAttention, replacing: str, instead: str) -> None:
    """Raise a `UserError` if an attention has another `forward` or hooks, which `replacing` would leave out."""
    called = type(core).forward, type(core).__call__
    if called != (CausalAttention.forward, CausalAttention.__call__) or "forward" in vars(core):
        left_out = f"the forward of {type(core).__name__}"
    elif has_module_hooks(core):
        left_out = f"the hooks of {type(core).__name__}"
    else:
        return
    raise UserError(f"{replacing} computes attention itself, without {left_out}; use {instead}.")


def whole_sequence(x: Tensor, context: ShardingContext) -> Tensor:
    """Gather the whole sequence along dim 1; not differentiable."""
    if context.parallel.sequence_parallel:
        x = all_gather_equal(x, context.tp, 1)
    if context.cp.size > 1:
        x = in_order(x, context.cp, 1)
    return x


def in_order(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gather the ranks' chunks along `dim`, in the order of the sequence; not differentiable."""
    return _take_chunks(all_gather_equal(x, axis, dim), dim, _places(axis.size))


def by_rank(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Arrange the chunks of a sequence along `dim` in the order in which the ranks hold them."""
    return _take_chunks(x, dim, _held(axis.size))


class _GatherSequence(torch.autograd.Function):
    """Gather of the ranks' chunks along `dim`, in the order of the sequence; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return in_order(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(by_rank(grad, ctx.axis, ctx.dim), ctx.axis, ctx.dim), None, None


def _held(cp: int) -> list[int]:
    """Return the numbers of the chunks, in the order in which the ranks hold them."""
    return [number for index in range(cp) for number in SequenceCut(cp, index).chunks]


def _places(cp: int) -> list[int]:
    """Return the index in `_held` of each chunk of the sequence."""
    held = _held(cp)
    return [held.index(number) for number in range(2 * cp)]


def _take_chunks(x: Tensor, dim: int, numbers: list[int]) -> Tensor:
    chunks = x.chunk(len(numbers), dim)
    return torch.cat([chunks[number] for number in numbers], dim)


class RingAttention(nn.Module):
    """Causal ring attention: blocks of keys and values move around the context axis while the ranks compute."""

    def __init__(self, core: CausalAttention, axis: Axis, heads: Slice) -> None:
        super().__init__()
        self.check(core)
        self.dropout, self.window, self.sinks = core.dropout, core.window, core.sinks
        self.scoring = core.scoring._replace(sinks=None)
        self.axis, self.heads = axis, heads

    @staticmethod
    def check(core: CausalAttention) -> None:
        """Raise a `UserError` if an attention has another `forward` or hooks."""
        require_standard(core, "parallel.cp_method is ring, which", "all-gather")

    # A compiler cannot follow sends that overlap with matrix products.
    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Attend as `ContextParallelAttention.forward` does, with the same shapes and errors."""
        chunk_length(q.shape[1])  # refuses an odd number of positions
        p = self.dropout.p if self.dropout.draws(samples.keys) else 0.0
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        site, shapes = self.dropout.site, (k.shape, v.shape)
        ring = _Ring(self.axis, self.heads, p, site, samples, self.window, self.scoring, shapes)
        out: Tensor = _Attention.apply(q, k, v, self.sinks, ring)
        return out.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class _Ring:
    """Settings of one pass of ring attention, shared by all its tiles; `p` and `site` are its dropout's."""

    axis: Axis
    heads: Slice
    p: float
    site: int
    samples: SampleInfo
    window: int
    scoring: Scoring
    shapes: tuple[torch.Size, torch.Size]  # of a rank's keys and values, [B, key-value heads, S / cp, d]

    def keys_and_values(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """View a rank's block as its keys and its values, whose heads may have another width."""
        of_k, of_v = self.shapes
        k, v = block.split((of_k.numel(), of_v.numel()))
        return k.view(of_k), v.view(of_v)

    def rounds(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each block with its owner's index: this rank's own first, then those of the ranks before it."""
        for step in range(self.axis.size):
            last = step == self.axis.size - 1
            arriving = None if last else self.axis.start_shift(block)
            yield (self.axis.index - step) % self.axis.size, block
            if arriving is not None:
                block = arriving()

    def of_owner(self, owner: int, batch: int, size: int) -> Iterator["_RingTile"]:
        """Yield the tiles where this rank's queries attend to keys of rank `owner`; a chunk has `size` positions."""
        mask = AttentionMask(self.window, self.samples.documents)
        for row, query in enumerate(SequenceCut(self.axis.size, self.axis.index).chunks):
            for column, key in enumerate(SequenceCut(self.axis.size, owner).chunks):
                queries, keys = (range(each * size, (each + 1) * size) for each in (query, key))
                for tile in _TILES(batch, queries, keys, mask, longest=0):
                    before, above = row * size - queries.start, column * size - keys.start
                    at_queries = slice(tile.queries.start + before, tile.queries.stop + before)
                    at_keys = slice(tile.keys.start + above, tile.keys.stop + above)
                    yield _RingTile(self, tile, at_queries, at_keys)


@dataclass(frozen=True)
class _RingTile:
    """Some of this rank's queries, and keys of one rank that they attend to.

    `tile` has their positions in the whole sequence, `at_queries` and `at_keys` those in the blocks of the two ranks.
    """

    ring: _Ring
    tile: Tile
    at_queries: slice
    at_keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """Select the tile's queries from `x` [B, heads, S / cp, …]."""
        return x[self.tile.rows, :, self.at_queries]

    def of_keys(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Select the tile's keys and values from a rank's block: [b, key-value heads, keys, d] each."""
        k, v = self.ring.keys_and_values(block)
        return k[self.tile.rows, :, self.at_keys], v[self.tile.rows, :, self.at_keys]

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores [b, heads, queries, keys] in fp32 or wider, −∞ where a query does not attend.

        With a soft cap, also return tanh(score / cap).
        """
        cap, bent = self.ring.scoring.softcap, None
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * self.ring.scoring.factor(q.shape[-1])
        if cap:
            bent = scores.div_(cap).tanh_()
            scores = bent * cap
        return scores if self.tile.is_full else scores.masked_fill_(self.tile.hidden(q.device), -torch.inf), bent

    def drop(self, weights: Tensor, length: int) -> Tensor:
        """Drop weights [b, heads, queries, keys] or their gradient by the tile's mask; `length` is the whole S."""
        keys, p = self.ring.samples.keys, self.ring.p
        if keys is None or p == 0:
            return weights
        queries = Slice(self.tile.queries.start, length)
        parts: dict[int, Positions] = {1: self.ring.heads, 2: queries, 3: Slice(self.tile.keys.start)}
        return drop(weights, keys[self.tile.rows], self.ring.site, p, parts)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        local = torch.cat([k.flatten(), v.flatten()])  # in one message
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        # Log-sum-exp of the scores so far, of which sinks are the first.
        total = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        if sinks is not None:
            total.copy_(sinks.unsqueeze(1))
        held = q.shape[2]
        for owner, block in ring.rounds(local):
            for part in ring.of_owner(owner, len(q), chunk_length(held)):
                query, mean, sofar = (part.of_queries(each) for each in (q, out, total))
                key, value = (serve_heads(each, q.shape[1], dim=1) for each in part.of_keys(block))
                scores, _ = part.scores(query, key)
                joined = torch.logaddexp(sofar, scores.logsumexp(-1))
                base = _finite(joined)
                weights = part.drop((scores - base.unsqueeze(-1)).exp_(), held * ring.axis.size)
                mean.mul_((sofar - base).exp_().unsqueeze(-1)).add_(weights.to(q.dtype) @ value)
                sofar.copy_(joined)
        ctx.save_for_backward(q, local, out, total, sinks)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, local, out, total, sinks = ctx.saved_tensors
        ring: _Ring = ctx.ring
        common = (grad * out).sum(-1)  # the softmax denominator's part of each score's gradient
        grad_q = torch.zeros(q.shape, dtype=out.dtype, device=q.device)
        grad_local = torch.zeros(local.shape, dtype=out.dtype, device=local.device)
        held = q.shape[2]
        for owner, block in ring.rounds(local):
            for part in ring.of_owner(owner, len(q), chunk_length(held)):
                query, upper, base, shared, to_query = (
                    part.of_queries(each) for each in (q, grad, _finite(total), common, grad_q)
                )
                key, value = (serve_heads(each, q.shape[1], dim=1) for each in part.of_keys(block))
                to_key, to_value = part.of_keys(grad_local)
                scores, bent = part.scores(query, key)
                weights = scores.sub_(base.unsqueeze(-1)).exp_()
                dropped = part.drop(weights, held * ring.axis.size)
                to_value.add_(_gathered(dropped.to(q.dtype).mT @ upper, to_value))
                of_weights = part.drop((upper @ value.mT).to(out.dtype), held * ring.axis.size)
                of_scores = weights.mul_(of_weights.sub_(shared.unsqueeze(-1))).mul_(ring.scoring.factor(q.shape[-1]))
                of_scores = (of_scores if bent is None else of_scores.mul_(1 - bent.square())).to(q.dtype)
                to_query.add_(of_scores @ key)
                to_key.add_(_gathered(of_scores.mT @ query, to_key))
            # The gradient travels behind its block and is back at the block's owner after a full round.
            grad_local = ring.axis.start_shift(grad_local)()
        grad_k, grad_v = ring.keys_and_values(grad_local.to(q.dtype))
        grad_sinks = None
        if sinks is not None:  # each query gives a sink its weight times −Σ output · gradient
            grad_sinks = -((sinks.unsqueeze(1) - total).exp_() * common).sum((0, 2)).to(sinks.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None


def _gathered(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a key or value gradient [b, heads, keys, d] over the heads that share a key-value head of `like`."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _finite(total: Tensor) -> Tensor:
    """Replace −∞ log-sum-exps (queries without a key so far), since −∞ − (−∞) would be NaN."""
    return total.clamp_min(torch.finfo(total.dtype).min)
