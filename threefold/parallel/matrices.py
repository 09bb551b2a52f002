"""Whole matrices of a sharded parameter, for computations that need more than a rank's shard."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.comm.axis import Axis
from threefold.comm.shards import shard_bounds
from threefold.parallel.parameter import cut_dims, offset


class ShardedMatrix:
    """All-gathers the last two dims of tensors that are sharded as a parameter is, or the one dim of a vector.

    Dims before the last two are a batch of matrices (experts); the axes that cut only those are not gathered.

    Args:
        parameter: as the stage stores it.
        axes: all axes that may cut it.
        every_dim: gather the whole parameter instead, of any number of dims.
    """

    def __init__(self, parameter: Tensor, axes: Iterable[Axis], every_dim: bool = False) -> None:
        self._cuts: list[tuple[Axis, int, int]] = []
        """Axis, dim, and the dim's size before the axis cut it; in the order in which the cuts are undone."""
        first = 0 if every_dim else max(0, parameter.dim() - 2)
        self._matrix_start = offset(parameter)[first:]
        if not isinstance(parameter, DTensor):
            return
        by_ranks = {axis.ranks: axis for axis in axes}
        sizes, mesh = list(parameter.shape), parameter.device_mesh
        for number, dim in reversed(list(enumerate(cut_dims(parameter)))):  # the last axis cuts first
            if dim is None or mesh.size(number) == 1:
                continue
            axis = by_ranks[tuple(dist.get_process_group_ranks(mesh.get_group(number)))]
            if dim >= first:
                self._cuts.insert(0, (axis, dim, sizes[dim]))
            start, end = shard_bounds(sizes[dim], axis.size, axis.index)
            sizes[dim] = end - start

    @property
    def is_whole(self) -> bool:
        """Whether no axis cuts the matrices."""
        return not self._cuts

    def gather(self, shard: Tensor) -> Tensor:
        """The whole matrices [..., m, n] of a tensor of the local shard's shape. Collective over the axes that cut
        them; `shard` itself where none does."""
        whole = shard
        for axis, dim, size in self._cuts:
            longest = -(-size // axis.size)
            if whole.shape[dim] < longest:  # the last shards may be shorter
                missing = [*whole.shape[:dim], longest - whole.shape[dim], *whole.shape[dim + 1 :]]
                whole = torch.cat([whole, whole.new_zeros(missing)], dim)
            whole = axis.all_gather_equal(whole.contiguous(), dim).narrow(dim, 0, size)
        return whole

    def shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's shard of whole matrices, as a view of the shape of `like`."""
        for dim, start in zip(range(-len(self._matrix_start), 0), self._matrix_start, strict=True):
            whole = whole.narrow(dim, start, like.shape[dim])
        return whole
