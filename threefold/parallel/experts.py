"""Expert parallelism: each rank holds some experts, and tokens reach them by all-to-all."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.comm.differentiable import (
    all_reduce,
    copy_to,
    differentiable,
    gather_from,
    gather_shares,
    reduce_from,
    reduce_to_shares,
    scatter_to,
)
from threefold.comm.layout import shard_bounds
from threefold.models.layers.experts import Choice, Experts, Routing, swiglu, through
from threefold.models.sharding import OverExperts
from threefold.ops.exact_experts import AddGradient, grouped_linear
from threefold.parallel.context import ShardingContext, whole_sequence
from threefold.parallel.gradients import Gradients
from threefold.parallel.leaf import local, stored
from threefold.parallel.parameter import split_parameter


class ParallelRouting(Routing):
    """`Routing` of this rank's positions, with the choices that routing of the whole sequence would make."""

    def __init__(self, routing: Routing, context: ShardingContext) -> None:
        super().__init__(
            routing.experts,
            routing.per_token,
            routing.capacity_factor,
            routing.normalize,
            routing.aux_loss,
            routing.z_loss,
        )
        self._context = context

    def _whole(self, own: Tensor) -> Tensor:
        return whole_sequence(own, self._context)

    def _own(self, whole: Tensor) -> Tensor:
        cut = self._context.cut
        return whole if cut.shares == 1 else whole[:, cut.indices(whole.shape[1] // cut.shares, whole.device)]

    def _sum_over_shares(self, counts: Tensor) -> Tensor:
        if self._context.sequence_parallel:
            counts = all_reduce(counts, self._context.tp)
        return all_reduce(counts, self._context.cp)


class ParallelExperts(nn.Module):
    """`Experts` sharded over the expert axis, with each expert split over the tensor axis."""

    gate_up: nn.Parameter
    down: nn.Parameter
    adds: Mapping[str, AddGradient]
    """Parameter name → function that takes its gradients for the samples of each expert rank, in an exact run."""

    def __init__(self, experts: Experts, context: ShardingContext) -> None:
        super().__init__()
        self.context, self.count, self.adds = context, len(experts.gate_up), {}
        for name, weight in experts.named_parameters():  # this rank's experts, each cut over the tensor axis
            (_, outer), (_, inner) = OverExperts().cuts(name)
            cuts = [(context.ep, outer)] if context.ep.size > 1 else []
            self.register_parameter(name, split_parameter(weight, *cuts, (context.tp, inner)))

    def hand_gradients_to(self, gradients: Gradients) -> None:
        """Make the backward pass add the gradients for each expert rank's samples to `gradients` separately."""
        leaves = {name: local(stored(parameter)) for name, parameter in self.named_parameters()}
        self.adds = {name: partial(gradients.add_, leaf) for name, leaf in leaves.items()}

    # The number of tokens per expert is only known at run time.
    @torch.compiler.disable
    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """Run the experts: [B, S, H] → [B, S, H], whole on every tensor rank or its shard of the sequence."""
        tp, dim = self.context.tp, self.context.sequence_dim
        if self.context.pieces is not None:
            return self._exactly(x, choice)
        if dim is None:
            x, choice = copy_to(x, tp), choice._replace(weights=copy_to(choice.weights, tp))
        else:
            x = gather_shares(x, tp, dim)
            experts = tp.all_gather_equal(choice.experts, dim)
            choice = choice._replace(experts=experts, weights=gather_shares(choice.weights, tp, dim))
        out = through(x, choice, self.count, self._run)
        return reduce_from(out, tp) if dim is None else reduce_to_shares(out, tp, dim)

    def _exactly(self, x: Tensor, choice: Choice) -> Tensor:
        """Run the experts as in an exact run: tensor ranks add up whole rows of each expert, and combine them alike."""
        tp, dim = self.context.tp, self.context.sequence_dim
        if dim is None:
            return through(x, choice, self.count, self._run, exact=True)
        experts = tp.all_gather_equal(choice.experts, dim)
        choice = choice._replace(experts=experts, weights=gather_from(choice.weights, tp, dim))
        out = through(gather_from(x, tp, dim), choice, self.count, self._run, exact=True)
        return scatter_to(out, tp, dim).clone()  # FSDP warns of outputs that are views

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send `rows` to the ranks of their experts, and return the outputs."""
        ep = self.context.ep
        weights = local(self.gate_up), local(self.down)
        if ep.size == 1:
            return swiglu(rows, *weights, counts) if self.context.pieces is None else self._products(rows, counts)
        start, end = shard_bounds(self.count, ep.size, ep.index)
        arriving = ep.all_gather_equal(counts.unsqueeze(0), 0)[:, start:end]  # [ep, experts of this rank]
        sent, received = counts.view(ep.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all(rows, ep, sent, received)
        if self.context.pieces is not None:
            return all_to_all(self._products(rows, arriving.flatten()), ep, received, sent)
        # Rows arrive by sender, then expert.
        experts = torch.arange(end - start, device=rows.device).repeat(ep.size)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        done = swiglu(rows[order], *weights, arriving.sum(0))
        return all_to_all(torch.empty_like(done).index_copy(0, order, done), ep, received, sent)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute the outputs of rows [n, H] as in an exact run, whole on every tensor rank.

        Rows are sorted by the expert rank that sent them, then expert; `counts` [senders · experts] has their numbers.
        """
        assert self.context.pieces is not None  # in an exact run
        tp, features, groups = self.context.tp, self.context.pieces.features, counts.tolist()
        gate_up, down = local(self.gate_up), local(self.down)
        into = copy_to(rows, tp)
        joined = grouped_linear(into, gate_up, groups, outer=features, add=self.adds.get("gate_up"))
        gate, up = joined.unflatten(-1, (-1, 2)).unbind(-1)
        done = grouped_linear(F.silu(gate) * up, down, groups, inner=features, add=self.adds.get("down"))
        return reduce_from(done, tp)

    def extra_repr(self) -> str:
        return f"gate_up={tuple(self.gate_up.shape)}, down={tuple(self.down.shape)}"


def all_to_all(rows: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    """Send rows to each rank of the axis: [sum(sent), H] → [sum(received), H]; backward sends the gradients back."""
    return _AllToAll.apply(rows, axis, sent, received)


_AllToAll = differentiable(
    lambda rows, axis, sent, received: axis.all_to_all(rows, sent, received),
    lambda grad, axis, sent, received: axis.all_to_all(grad, received, sent),
)
