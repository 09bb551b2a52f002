"""Experts: feed-forward networks of which each token passes a few, on one device and over the mesh.

Expert parallelism (Lepikhin et al., GShard, arXiv 2006.16668): neighbouring replicas hold some experts each and send
each other their tokens, there and back. The tensor axis cuts every expert as it cuts a dense network.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.comm.collectives import copy_to, gather_shares, reduce_from, reduce_to_shares, shard_bounds
from threefold.models.layers.router import Choice
from threefold.ops.kernels import grouped_linear
from threefold.parallel.context.sequence import Region
from threefold.parallel.parameter import local, split_parameter, split_parameter_twice


class Experts(nn.Module):
    """SwiGLU networks without biases.

    The rows of each expert's `gate_up` alternate, a gate's before that of what it gates.

    Args:
        experts: E.
        hidden: H.
        inner: F, the inner features of each.
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """[B, S, H] → [B, S, H]: the weighted sum of what each token's experts answer."""
        return through(x, choice, len(self.gate_up), lambda rows, counts: swiglu(rows, self.gate_up, self.down, counts))


class ParallelExperts(nn.Module):
    """`Experts`, some of them on each rank of the expert axis, and of each a part on every rank of the tensor axis.

    Args:
        experts: all of them.
        region: says where this rank is.
    """

    def __init__(self, experts: Experts, region: Region) -> None:
        super().__init__()
        self.region, self.count = region, len(experts.gate_up)
        self.gate_up = _part(experts.gate_up, region, dim=1)
        self.down = _part(experts.down, region, dim=2)

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """[B, S, H], the same on every rank of the tensor axis or its share of the sequence → the same."""
        tp, dim = self.region.tp, self.region.sequence_dim
        if dim is None:
            x, choice = copy_to(x, tp), Choice(choice.experts, copy_to(choice.weights, tp))
        else:
            x = gather_shares(x, tp, dim)
            choice = Choice(tp.all_gather_equal(choice.experts, dim), gather_shares(choice.weights, tp, dim))
        out = through(x, choice, self.count, self._run)
        return reduce_from(out, tp) if dim is None else reduce_to_shares(out, tp, dim)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send `rows` to the ranks of their experts, and take their answers back."""
        ep = self.region.ep
        weights = local(self.gate_up), local(self.down)
        if ep.size == 1:
            return swiglu(rows, *weights, counts)
        start, end = shard_bounds(self.count, ep.size, ep.index)
        arriving = ep.all_gather_equal(counts.unsqueeze(0), 0)[:, start:end]  # [ep, experts of this rank]
        sent, received = counts.view(ep.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all(rows, ep, sent, received)
        # They came by sender, then expert.
        experts = torch.arange(end - start, device=rows.device).repeat(ep.size)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        done = swiglu(rows[order], *weights, arriving.sum(0))
        return all_to_all(torch.empty_like(done).index_copy(0, order, done), ep, received, sent)

    def extra_repr(self) -> str:
        return f"gate_up={tuple(self.gate_up.shape)}, down={tuple(self.down.shape)}"


def through(x: Tensor, choice: Choice, experts: int, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sort tokens by expert, have them answered, and add each token's answers up by their weights.

    Args:
        x: [B, S, H].
        choice: of each token.
        experts: how many there are.
        run: (rows [n, H] sorted by expert, int64 [experts] rows of each) → their answers [n, H].

    Returns:
        [B, S, H]; zero for a token that no expert had room for.
    """
    hidden, per_token = x.shape[-1], choice.experts.shape[-1]
    chosen = choice.experts.flatten()
    counts = torch.bincount(chosen, minlength=experts + 1)[:experts]
    order = chosen.argsort(stable=True)[: int(counts.sum())]  # without those that found no room, who come last
    # One row for each token and expert: both ways through are then copies, whose gradients are the same every time.
    rows = x.reshape(-1, 1, hidden).expand(-1, per_token, -1).reshape(-1, hidden)[order]
    answers = run(rows, counts)
    slots = answers.new_zeros(chosen.numel(), hidden).index_copy(0, order, answers)
    weighted = slots.view(*choice.experts.shape, hidden) * choice.weights.unsqueeze(-1)
    return weighted.sum(-2)


def swiglu(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """Each expert's answers to its rows.

    Args:
        rows: [n, H], sorted by expert.
        gate_up, down: [experts, 2F, H], [experts, H, F].
        counts: int64 [experts], rows of each.
    """
    gate, up = grouped_linear(rows, gate_up, counts).unflatten(-1, (-1, 2)).unbind(-1)
    return grouped_linear(F.silu(gate) * up, down, counts)


def all_to_all(rows: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    """Send the first `sent[0]` rows to the first rank of the axis, the next `sent[1]` to the second, and so on.

    Backward sends the gradients back.

    Args:
        rows: [sum(sent), H].
        axis: the ranks.
        sent: rows to each.
        received: rows from each.

    Returns:
        [sum(received), H], in the order of the senders.
    """
    return _AllToAll.apply(rows, axis, sent, received)


def _part(weight: nn.Parameter, region: Region, dim: int) -> nn.Parameter:
    """This rank's experts, and of each the tensor rank's part along `dim`."""
    if region.ep.size == 1:
        return split_parameter(weight, region.tp, dim)
    return split_parameter_twice(weight, (region.ep, region.tp), (0, dim))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_to_all(grad, ctx.received, ctx.sent), None, None, None
