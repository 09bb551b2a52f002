"""Layers of exact runs that take the place of a plan's modules, beside the tensor-parallel ones.

Attention, learned positions, experts, per-head norms and whole linear layers are replaced in every layout, one process
included, so that all compute alike.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from threefold.comm.axis import Axis
from threefold.comm.differentiable import copy_to, gather_from, reduce_from, reduce_scatter, scatter_to
from threefold.comm.layout import shard_bounds
from threefold.cpu.dropped_attention import head_drop
from threefold.errors import UserError
from threefold.exact import layers
from threefold.exact.attention import exact_attention
from threefold.exact.experts import AddGradient, grouped_linear
from threefold.exact.functions import ExactFunctions, sigmoid
from threefold.exact.grain import Pieces
from threefold.exact.layers import RowSum, widened
from threefold.exact.products import tree_sum
from threefold.models import sharding
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, PositionEmbedding, SampleInfo
from threefold.models.layers.experts import Choice, Experts, Routing, through
from threefold.ops.kernels import AttentionMask
from threefold.parallel.context import ContextParallelAttention, ShardingContext, by_rank, in_order, require_standard
from threefold.parallel.experts import ParallelExperts, ParallelRouting
from threefold.parallel.gradients import Gradients
from threefold.parallel.leaf import local, stored
from threefold.parallel.shard_modules import MakeModule, extend, heads_of
from threefold.random.dropout import Dropout
from threefold.random.rng import Slice


class ExactAttention(CausalAttention):
    """`CausalAttention`, computed by `exact.attention`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Attend as `CausalAttention` does."""
        hidden = AttentionMask(self.window, None if samples.documents is None else samples.documents[:, : k.shape[1]])
        keys = samples.keys if self.dropout.draws(samples.keys) else None
        drop = None if keys is None else head_drop(q, keys, self.dropout)
        return exact_attention(q, k, v, hidden, drop, self.scoring)

    @classmethod
    def of(cls, core: CausalAttention) -> "ExactAttention":
        """Return the exact attention in place of another."""
        require_standard(core, "train.exact is true, which", "false")
        if not core.scoring.is_fused:
            raise UserError("train.exact is true, which computes attention without soft caps and sinks; use false.")
        attention = cls(window=core.window, scale=core.scoring.scale)
        attention.dropout = core.dropout
        return attention.train(core.training)


class ExactContextAttention(ContextParallelAttention):
    """Context-parallel attention with the bits of one process on any number of ranks.

    No tile of attention crosses the bounds of a chunk of a context piece. The gradients of keys and values are summed
    over the two chunks of a piece, then over the pieces in a tree, whose upper part is over the context ranks.

    Args:
        pieces: context pieces of the grain, a multiple of the ranks.
    """

    def __init__(self, core: CausalAttention, axis: Axis, heads: Slice, pieces: int) -> None:
        super().__init__(ExactAttention.of(core), axis, heads, pieces // axis.size)

    def gathered(self, shard: Tensor) -> Sequence[Tensor]:
        found: tuple[Tensor, ...] = _KeysOfPieces.apply(shard, self.axis, self.runs)
        return found


class _KeysOfPieces(torch.autograd.Function):
    """Keys and values [2, B, S, heads, d] of the whole sequence, once for each context piece of this rank."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis, pieces: int) -> tuple[Tensor, ...]:
        ctx.axis = axis
        whole = in_order(shard, axis, 2)
        return tuple(whole.view_as(whole) for _ in range(pieces))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = tree_sum(widened(each).clone() for each in grads)
        shard = reduce_scatter(by_rank(total, ctx.axis, 2), ctx.axis, 2)
        return shard.to(grads[0].dtype), None, None


class ExactPositions(PositionEmbedding):
    """`PositionEmbedding` whose gradient is a sum of `rows`, of which this rank keeps the table's rows `kept`."""

    rows: RowSum
    kept: range

    @classmethod
    def of(cls, module: PositionEmbedding, rows: RowSum, kept: range) -> "ExactPositions":
        """Return the exact layer in place of another, with its weight."""
        with torch.device("meta"):
            layer = cls(module.num_embeddings, module.embedding_dim, module.held)
        layer.weight, layer.rows, layer.kept = module.weight, rows, kept
        return layer.train(module.training)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Look up the positions of `x` [B, S, H]: [B, S, H]."""
        if samples.positions is not None:
            ids = samples.positions[:, self.held.indices(x.shape[1], x.device)]
            return layers.embedding(ids, self.weight, self.rows, self.kept)
        found = super().forward(x, samples)
        return layers.repeat(found.reshape(1, -1), len(x)).view(len(x), *found.shape)


class ExactRouting(ParallelRouting):
    """Routing whose sigmoid has the same bits wherever an element is in a tensor."""

    def _scores(self, logits: Tensor) -> Tensor:
        return sigmoid(logits) if self.config.router == "sigmoid" else super()._scores(logits)


class ExactExperts(ParallelExperts):
    """Experts whose tensor ranks add up whole rows of each expert, and combine them alike."""

    adds: Mapping[str, AddGradient]
    """Parameter name → function that takes its gradients for the samples of each expert rank."""

    def __init__(self, experts: Experts, context: ShardingContext, pieces: Pieces) -> None:
        super().__init__(experts, context)
        self.features, self.adds = pieces.features, {}

    def hand_gradients_to(self, gradients: Gradients) -> None:
        """Make the backward pass add the gradients for each expert rank's samples to `gradients` separately."""
        leaves = {name: local(stored(parameter)) for name, parameter in self.named_parameters()}
        self.adds = {name: partial(gradients.add_, leaf) for name, leaf in leaves.items()}

    @torch.compiler.disable
    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """Run the experts as `ParallelExperts` does."""
        tp, dim, arithmetic = self.context.tp, self.context.sequence_dim, self.context.arithmetic
        if dim is None:
            return through(x, choice, self.count, self.run, arithmetic)
        experts = tp.all_gather_equal(choice.experts, dim)
        choice = choice._replace(experts=experts, weights=gather_from(choice.weights, tp, dim))
        out = through(gather_from(x, tp, dim), choice, self.count, self.run, arithmetic)
        return scatter_to(out, tp, dim).clone()  # FSDP warns of outputs that are views

    def products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute the outputs of rows [n, H], whole on every tensor rank; see `ParallelExperts.products`."""
        tp, groups = self.context.tp, counts.flatten().tolist()
        gate_up, down = local(self.gate_up), local(self.down)
        into = copy_to(rows, tp)
        joined = grouped_linear(into, gate_up, groups, outer=self.features, add=self.adds.get("gate_up"))
        gate, up = joined.unflatten(-1, (-1, 2)).unbind(-1)
        done = grouped_linear(self.activation(gate) * up, down, groups, inner=self.features, add=self.adds.get("down"))
        return reduce_from(done, tp)


def shardings(pieces: Pieces, context_pieces: int) -> dict[type[sharding.Split], MakeModule]:
    """Return how the rules of a plan are applied in an exact run, where that differs from any other run."""

    def attention(rule: sharding.AttentionCore, module: CausalAttention, context: ShardingContext) -> nn.Module:
        heads = heads_of(rule, context)
        if context_pieces > 1:
            return ExactContextAttention(module, context.cp, heads, context_pieces)
        found = ExactAttention.of(module)
        found.dropout = found.dropout.of_part({1: heads})  # of the weights [B, heads, queries, keys]
        return found

    def positions(rule: sharding.Split, module: Dropout | PositionEmbedding, context: ShardingContext) -> nn.Module:
        if isinstance(module, Dropout):
            return module.of_part({1: context.cut})
        placed = module.of_positions(context.cut) if context.cut.shares > 1 else module
        # Complete sums, of which each rank keeps some rows: the ranks' gradients are added at the end of the step.
        rows, tp = placed.num_embeddings, context.tp
        kept = shard_bounds(rows, tp.size, tp.index) if context.parallel.sequence_parallel else (0, rows)
        return ExactPositions.of(placed, pieces.rows, range(*kept))

    def experts(rule: sharding.Split, module: Experts, context: ShardingContext) -> nn.Module:
        return ExactExperts(module, context, pieces)

    def routing(rule: sharding.Split, module: Routing, context: ShardingContext) -> nn.Module:
        return ExactRouting(module, context)

    def per_head(rule: sharding.Split, module: nn.Module, context: ShardingContext) -> nn.Module:
        if context.is_custom:
            return module
        return _with_forward(module, partial(_heads_first, type(module), partial(ExactFunctions, pieces.heads)))

    def replicated(rule: sharding.Split, module: nn.Module, context: ShardingContext) -> nn.Module:
        return _with_forward(module, partial(_whole_linear, pieces.rows)) if isinstance(module, nn.Linear) else module

    return {
        sharding.AttentionCore: attention,
        sharding.OverSequence: positions,
        sharding.OverExperts: experts,
        sharding.TokenRouting: routing,
        sharding.PerHead: per_head,
        sharding.Replicated: replicated,
    }


def _with_forward(module: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    extend(module, {"forward": lambda self, x: forward(self, x)})
    return module


def _heads_first(kind: type[nn.Module], functions: Callable[[], ExactFunctions], self: nn.Module, x: Tensor) -> Tensor:
    # Heads first, so that a run of rows is a run of heads.
    with functions():
        out: Tensor = kind.forward(self, x.movedim(2, 0)).movedim(0, 2)
    return out


def _whole_linear(rows: RowSum, self: nn.Linear, x: Tensor) -> Tensor:
    return layers.linear(x, self.weight, self.bias, rows=rows, weight_rows=rows)
