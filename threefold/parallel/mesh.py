"""The mesh: one object with every axis, group and coordinate of this rank. Nothing else computes ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from threefold.parallel.layout import AXES, Coordinates, Layout
from threefold.parallel.shared_memory import SharedMemoryGroup

_SHARED_SLOT_BYTES = 2 << 20  # larger ones fall out of the cache that the ranks share


@dataclass(frozen=True)
class Event:
    """One collective: on which axis, which operation, and the bytes of this rank's tensor."""

    axis: str
    operation: str
    nbytes: int


@dataclass
class Recorder:
    """Collects the collectives of this rank while a recording is on."""

    _logs: list[list[Event]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Collect the events of a block."""
        log: list[Event] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs.remove(log)

    def add(self, axis: str, operation: str, tensor: Tensor) -> None:
        for log in self._logs:
            log.append(Event(axis, operation, tensor.numel() * tensor.element_size()))


@dataclass(frozen=True)
class Axis:
    """The group of ranks that differ from this one along one axis, and what they can do together.

    Attributes:
        name: `dp`, `pp`, `cp`, `tp`, `world`, or the name given to `Mesh.new_axis`.
        ranks: global ranks of the group, in the order of the axis.
        index: this rank's place among them.
        device_mesh: the one-dimensional mesh that `DTensor`s of this axis live on; None for groups that are no axis.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    recorder: Recorder
    device_mesh: DeviceMesh | None = None
    shared: SharedMemoryGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the axis, the same bits on every rank; `tensor` itself is left alone."""
        if self.shared is None or self.size == 1:
            return self.all_reduce_(tensor.clone(memory_format=torch.contiguous_format))
        self.recorder.add(self.name, "all_reduce", tensor)
        return self.shared.all_reduce(tensor)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the axis, in place; every rank ends with the same bits."""
        if self.size == 1:
            return tensor
        self.recorder.add(self.name, "all_reduce", tensor)
        if self.shared is not None:
            self.shared.all_reduce_(tensor)
        else:
            self._reduce_contiguous(tensor, dist.ReduceOp.SUM)
        return tensor

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """Maximum of `tensor` over the axis, in place."""
        if self.size == 1:
            return tensor
        self.recorder.add(self.name, "all_reduce_max", tensor)
        if self.shared is not None:
            self.shared.all_reduce_max_(tensor)
        else:
            self._reduce_contiguous(tensor, dist.ReduceOp.MAX)
        return tensor

    def start_all_reduce_(self, tensor: Tensor) -> dist.Work | None:
        """Begin to sum a contiguous `tensor` in place; wait on the returned work (None: nothing to wait for)."""
        if self.size == 1:
            return None
        self.recorder.add(self.name, "all_reduce", tensor)
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along `dim`; their sizes along `dim` may differ."""
        if self.size == 1:
            return tensor
        self.recorder.add(self.name, "all_gather", tensor)
        sizes = self._all_sizes(tensor.shape[dim], tensor.device)
        moved = tensor.movedim(dim, 0)
        padded = moved.new_zeros((max(sizes), *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank of the axis passed, in the order of the axis."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def _reduce_contiguous(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        # A collective on a non-contiguous view may work on a copy of it and drop the result.
        dense = tensor.contiguous()
        dist.all_reduce(dense, op=operation, group=self.group)
        if dense is not tensor:
            tensor.copy_(dense)

    def _all_sizes(self, size: int, device: torch.device) -> list[int]:
        mine = torch.tensor([size], device=device)
        found = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(found, mine, group=self.group)
        return [int(each) for each in found]


class Mesh:
    """This rank's place in the layout, its groups, and the device it computes on.

    Collective: every rank of the world makes it at the same time, after `torch.distributed` is initialised.

    Args:
        layout: ranks along each axis.
        device: where this rank computes.

    Attributes:
        dp, pp, cp, tp: the axes.
        replicas: dp and cp together, over which gradients are summed.
        world: all ranks.

    Raises:
        UserError: the world's size is not the layout's.
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        layout.require_world(dist.get_world_size())
        self.layout = layout
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.coordinates: Coordinates = layout.coordinates(self.rank)
        self.recorder = Recorder()
        # DTensor's cache takes equal meshes for one, and would answer with the groups of one that is gone by now.
        _clear_sharding_prop_cache()
        self.device_mesh = init_device_mesh(self.device.type, layout.shape, mesh_dim_names=AXES)
        everyone = tuple(range(layout.world_size))
        self.world = self._axis("world", everyone, dist.group.WORLD)
        self.dp, self.pp, self.cp, self.tp = (self._mesh_axis(name) for name in AXES)
        self.replicas = self._replicas()

    @property
    def is_first_stage(self) -> bool:
        return self.pp.is_first

    @property
    def is_last_stage(self) -> bool:
        return self.pp.is_last

    def new_axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis | None:
        """Make further groups of ranks; returns this rank's, or None if it is in none of them.

        Collective over the world: every rank passes the same groups.
        """
        mine = None
        for ranks in groups:
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine = self._axis(name, tuple(ranks), group)
        return mine

    def _replicas(self) -> Axis:
        """The ranks that hold the same weights and see other tokens: dp and cp together."""
        if self.cp.size == 1:
            return self.dp
        if self.dp.size == 1:
            return self.cp
        axis = self.new_axis("dp·cp", self.layout.groups("dp", "cp"))
        assert axis is not None  # each rank is in one of them
        return axis

    def _mesh_axis(self, name: str) -> Axis:
        ranks = next(group for group in self.layout.groups(name) if self.rank in group)
        return self._axis(name, tuple(ranks), self.device_mesh.get_group(name), self.device_mesh[name])

    def _axis(
        self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None = None
    ) -> Axis:
        shared = None
        if self.device.type == "cpu" and len(ranks) > 1 and group is not None:
            # What gloo's collectives cost is latency and system time; memory that the ranks share has little of either.
            shared = SharedMemoryGroup.try_create(group, _SHARED_SLOT_BYTES)
        return Axis(name, ranks, ranks.index(self.rank), group, self.recorder, device_mesh, shared)

    def __repr__(self) -> str:
        return f"Mesh({self.layout}, rank {self.rank} at {self.coordinates._asdict()}, {self.device})"
