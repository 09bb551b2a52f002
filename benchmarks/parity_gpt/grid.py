"""The grid of ranks, pp × dp × cp × tp, and collectives that autograd goes through."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Axis:
    """The ranks that one collective joins.

    Attributes:
        name: what it is for.
        ranks: global ranks, in order.
        rank: place of this process among them.
        group: its process group; None if it has one rank.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: Any

    @property
    def size(self) -> int:
        return len(self.ranks)


class Grid:
    """Places this process and makes the groups; tp is the innermost axis, pp the outermost.

    `data` joins the ranks that hold the same dense shard (dp · cp), `stage` those of a pipeline stage. With `ep` above
    1, whole experts are spread over consecutive ranks of a stage, whatever their axes; with `ep` 1 and tp, every expert
    is split over tp. `expert_data` joins the ranks with the same experts or shards of them. `shards` and `replicas` are
    the two levels of a hybrid reduction over `data`.
    """

    def __init__(self, dp: int, tp: int, pp: int, cp: int, ep: int, hybrid: int) -> None:
        world = dp * tp * pp * cp
        self.dp_size, self.tp_size, self.pp_size, self.cp_size, self.ep_size = dp, tp, pp, cp, ep
        self.world_size = world
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if world != (dist.get_world_size() if dist.is_initialized() else 1):
            raise SystemExit(f"dp {dp} · tp {tp} · pp {pp} · cp {cp} needs {world} processes")
        inner = dp * cp * tp
        if inner % ep:
            raise SystemExit(f"ep {ep} does not divide the {inner} ranks of a stage")

        def at(rank: int) -> dict[str, int]:
            return {
                "pp": rank // inner,
                "dp": rank // (cp * tp) % dp,
                "cp": rank // tp % cp,
                "tp": rank % tp,
                "ep": rank % inner % ep,
                "expert_data": rank % inner // ep,
                "shards": rank // tp % (dp * cp) % hybrid,
                "replicas": rank // tp % (dp * cp) // hybrid,
            }

        self.at = at
        self.experts_split = ep == 1 and tp > 1
        self.tp = self._axis("tp", lambda c: (c["pp"], c["dp"], c["cp"]))
        self.cp = self._axis("cp", lambda c: (c["pp"], c["dp"], c["tp"]))
        self.dp = self._axis("dp", lambda c: (c["pp"], c["cp"], c["tp"]))
        self.pp = self._axis("pp", lambda c: (c["dp"], c["cp"], c["tp"]))
        self.data = self._axis("data", lambda c: (c["pp"], c["tp"]))
        self.stage = self._axis("stage", lambda c: (c["pp"],))
        self.ep = self._axis("ep", lambda c: (c["pp"], c["expert_data"]))
        self.expert_data = self.data if self.experts_split else self._axis("expert_data", lambda c: (c["pp"], c["ep"]))
        self.shards = self._axis("shards", lambda c: (c["pp"], c["tp"], c["replicas"]))
        self.replicas = self._axis("replicas", lambda c: (c["pp"], c["tp"], c["shards"]))
        self.world = self._axis("world", lambda c: ())

    def _axis(self, name: str, key: Callable[[dict[str, int]], tuple[int, ...]]) -> Axis:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(key(self.at(rank)), []).append(rank)
        mine = None
        for ranks in found.values():  # every process takes part in making every group
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine = Axis(name, tuple(ranks), ranks.index(self.rank), group)
        assert mine is not None
        return mine

    @property
    def first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1


def sum_over(tensor: Tensor, *axes: Axis) -> Tensor:
    """Add a tensor up over axes, in place, without autograd."""
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def max_over(tensor: Tensor, axis: Axis) -> Tensor:
    if axis.size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=axis.group)
    return tensor


def gathered(tensor: Tensor, axis: Axis) -> list[Tensor]:
    """Return the tensors of all ranks, without autograd."""
    if axis.size == 1:
        return [tensor]
    tensor = tensor.contiguous()
    found = [torch.empty_like(tensor) for _ in range(axis.size)]
    dist.all_gather(found, tensor, group=axis.group)
    return found


def part(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part of a tensor along a dim."""
    return tensor.chunk(axis.size, dim)[axis.rank]


def _scattered_sum(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    return part(sum_over(tensor.clone(), axis), axis, dim).contiguous()  # gloo has no reduce-scatter


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return sum_over(gradient.clone(), ctx.axis), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return sum_over(tensor.clone(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int, adds: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.adds = axis, dim, adds
        return torch.cat(gathered(tensor, axis), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.adds:
            return _scattered_sum(gradient, ctx.axis, ctx.dim), None, None, None
        return part(gradient, ctx.axis, ctx.dim).contiguous(), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int, adds: bool) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _scattered_sum(tensor, axis, dim) if adds else part(tensor, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.cat(gathered(gradient, ctx.axis), ctx.dim), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, split: int, joined: int) -> Tensor:
        ctx.axis, ctx.split, ctx.joined = axis, split, joined
        return _all_to_all(tensor, axis, split, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_to_all(gradient, ctx.axis, ctx.joined, ctx.split), None, None, None


def _all_to_all(tensor: Tensor, axis: Axis, split: int, joined: int) -> Tensor:
    sent = torch.stack(tensor.chunk(axis.size, split)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return torch.cat(received.unbind(0), joined)


def copied(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor; its gradient is the sum over the axis (Megatron's f)."""
    return tensor if axis.size == 1 else _Copy.apply(tensor, axis)


def summed(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the axis; its gradient is the one of the sum (Megatron's g)."""
    return tensor if axis.size == 1 else _Sum.apply(tensor, axis)


def gather(tensor: Tensor, axis: Axis, dim: int, adds: bool) -> Tensor:
    """Join the ranks' parts; the gradient is this rank's part of it, of the sum over the axis if `adds`.

    It is a sum where each rank's loss is a share of the whole one, and none where every rank has the whole loss.
    """
    return tensor if axis.size == 1 else _Gather.apply(tensor, axis, dim, adds)


def scatter(tensor: Tensor, axis: Axis, dim: int, adds: bool) -> Tensor:
    """Return this rank's part, of the sum over the axis if `adds`; the gradient is joined."""
    return tensor if axis.size == 1 else _Scatter.apply(tensor, axis, dim, adds)


def exchange(tensor: Tensor, axis: Axis, split: int, joined: int) -> Tensor:
    """Split along one dim and join along another (Ulysses)."""
    return tensor if axis.size == 1 else _Exchange.apply(tensor, axis, split, joined)


def in_buckets(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Group tensors in order into buckets of at most `size` elements, or one tensor."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.numel() > room:
            buckets.append([])
            room = size
        buckets[-1].append(tensor)
        room -= tensor.numel()
    return buckets
