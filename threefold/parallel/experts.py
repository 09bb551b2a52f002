"""Expert parallelism: each rank holds some experts, and tokens reach them by all-to-all."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.differentiable import (
    all_reduce,
    copy_to,
    differentiable,
    gather_shares,
    reduce_from,
    reduce_to_shares,
)
from threefold.comm.layout import shard_bounds
from threefold.models.layers.experts import Choice, Experts, Routing, grouped_linear, swiglu, through
from threefold.models.sharding import OverExperts
from threefold.parallel.context import ShardingContext, whole_sequence
from threefold.parallel.leaf import local
from threefold.parallel.parameter import split_parameter


class ParallelRouting(Routing):
    """`Routing` of this rank's positions, with the choices that routing of the whole sequence would make."""

    def __init__(self, routing: Routing, context: ShardingContext) -> None:
        super().__init__(routing.config)
        self.bias, self._context = routing.bias, context

    def _whole(self, shard: Tensor) -> Tensor:
        return whole_sequence(shard, self._context)

    def _local(self, whole: Tensor) -> Tensor:
        cut = self._context.cut
        return whole if cut.shares == 1 else whole[:, cut.indices(whole.shape[1] // cut.shares, whole.device)]

    def _sum_over_shares(self, counts: Tensor) -> Tensor:
        if self._context.parallel.sequence_parallel:
            counts = all_reduce(counts, self._context.tp)
        return all_reduce(counts, self._context.cp)


class ParallelExperts(nn.Module):
    """`Experts` sharded over the expert axis, with each expert split over the tensor axis."""

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, experts: Experts, context: ShardingContext) -> None:
        super().__init__()
        self.context, self.count = context, len(experts.gate_up)
        self.activation, self.gate = experts.activation, experts.gate
        axes = {"tp": context.tp, **({"ep": context.ep} if context.ep.size > 1 else {})}
        for name, weight in experts.named_parameters():  # this rank's experts, most of them cut over the tensor axis
            cuts = [(axes[axis], dim) for axis, dim in OverExperts().cuts(name) if axis in axes]
            self.register_parameter(name, split_parameter(weight, *cuts) if cuts else weight)
        for name in ("gate_up_bias", "down_bias"):
            if getattr(experts, name) is None:
                self.register_parameter(name, None)

    # The number of tokens per expert is only known at run time.
    @torch.compiler.disable
    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """Run the experts: [B, S, H] → [B, S, H], whole on every tensor rank or its shard of the sequence."""
        tp, dim = self.context.tp, self.context.sequence_dim
        if dim is None:
            x, choice = copy_to(x, tp), choice._replace(weights=copy_to(choice.weights, tp))
        else:
            x = gather_shares(x, tp, dim)
            experts = tp.all_gather_equal(choice.experts, dim)
            choice = choice._replace(experts=experts, weights=gather_shares(choice.weights, tp, dim))
        out = through(x, choice, self.count, self.run)
        return reduce_from(out, tp) if dim is None else reduce_to_shares(out, tp, dim)

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send `rows` [n, H], sorted by expert, to the ranks of their experts, and return the outputs [n, H]."""
        ep = self.context.ep
        if ep.size == 1:
            return self.products(rows, counts)
        start, end = shard_bounds(self.count, ep.size, ep.index)
        arriving = ep.all_gather_equal(counts.unsqueeze(0), 0)[:, start:end]  # [ep, experts of this rank]
        sent, received = counts.view(ep.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        return all_to_all(self.products(all_to_all(rows, ep, sent, received), arriving), ep, received, sent)

    def products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute this rank's part of the outputs of rows [n, H], sorted by the rank that sent them, then expert.

        `counts` are the numbers of rows, [experts] or [senders, experts].
        """
        weights: list[Any] = [self.gate, local(self.gate_up), local(self.down)]
        if self.gate_up_bias is not None and self.down_bias is not None:
            # Outputs are summed over the tensor ranks, each of which adds the biases of some features.
            first, _ = shard_bounds(self.down.shape[1], self.context.tp.size, self.context.tp.index)
            weights += [local(self.gate_up_bias), local(self.down_bias), first]
        compute = partial(swiglu, linear=self.linear)
        if counts.dim() == 1:
            return compute(rows, counts, *weights)
        experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
        order = experts.repeat_interleave(counts.flatten()).argsort(stable=True)
        done = compute(rows[order], counts.sum(0), *weights)
        return torch.empty_like(done).index_copy(0, order, done)

    def linear(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Compute `grouped_linear`, which an adapter may add to."""
        return grouped_linear(rows, weight, counts)

    def extra_repr(self) -> str:
        return f"gate_up={tuple(self.gate_up.shape)}, down={tuple(self.down.shape)}"


def all_to_all(rows: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    """Send rows to each rank of the axis: [sum(sent), H] → [sum(received), H]; backward sends the gradients back."""
    return _AllToAll.apply(rows, axis, sent, received)


_AllToAll = differentiable(
    lambda rows, axis, sent, received: axis.all_to_all(rows, sent, received),
    lambda grad, axis, sent, received: axis.all_to_all(grad, received, sent),
)
