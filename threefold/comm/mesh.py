"""The mesh: one object with every axis, group and coordinate of this rank. Nothing else computes ranks."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from socket import gethostname
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from threefold.comm.axis import REFUSED, Axis, Event, EventRecorder, HostGroup
from threefold.comm.heartbeat import Activity, Heartbeat, new_heartbeat, wait_code
from threefold.comm.layout import AXES, Coordinates, Layout
from threefold.doors import hook
from threefold.errors import naming_arguments
from threefold.torch_private import distributed
from threefold.torch_private.fake import COLLECTIVES, OperationMode

__all__ = ["Axis", "Event", "EventRecorder", "Mesh"]


class PlannedAxis(NamedTuple):
    """Axis before its set-up."""

    name: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    device_mesh: DeviceMesh | None = None


class _NoCollectives(OperationMode):
    """Mode in which collectives of torch's own process groups raise a `RuntimeError`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(REFUSED)
        return func(*args, **(kwargs or {}))


class Mesh:
    """This rank's coordinates in the layout, its process groups, and its device.

    Collective: every rank of the world creates it at the same time, after `torch.distributed` is initialized.

    Args:
        layout: ranks along each axis.
        device: device of this rank.
        shared_memory: whether collectives of CPU tensors between ranks of one host use shared memory; False for those
            of the process group only.
        in_tree: whether sums over ranks are computed in a binary tree on every backend (`Axis.in_tree`).
        heartbeat: heartbeat that notes what this rank does; None for one that nobody reads.
        sizes: bytes at which shared-memory collectives split their work, which change no result (`SharedMemorySizes`).

    Attributes:
        in_tree: whether the axes' sums are computed in a binary tree.
        heartbeat: heartbeat of this rank.
        dp, pp, cp, tp: axes of the layout.
        replicas: dp and cp together, over which gradients are summed.
        ep: neighboring replicas that share the experts; its `device_mesh` also has `tp`.
        expert_replicas: replicas over which the gradients of the experts are summed.
        world: all ranks.

    Raises:
        UserError: the world's size is not the layout's.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        shared_memory: bool = True,
        in_tree: bool = False,
        heartbeat: Heartbeat | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        with naming_arguments():
            layout.require_world(dist.get_world_size())
        distributed.settle_gloo_at_exit()
        self.layout, self.in_tree = layout, in_tree
        self.device = torch.device(device)
        self._shares_memory, self._sizes = shared_memory and self.device.type == "cpu", sizes
        self.rank = dist.get_rank()
        self.coordinates: Coordinates = layout.coordinates(self.rank)
        self.recorder = EventRecorder()
        self.heartbeat = heartbeat or new_heartbeat()
        self.heartbeat.activity(Activity.MESH)
        everyone = tuple(range(layout.world_size))
        with self.heartbeat.waiting(wait_code("gather", self.heartbeat.axis("world", everyone))):
            self._make_axes(everyone)

    def _make_axes(self, everyone: tuple[int, ...]) -> None:
        # DTensor's cache treats equal meshes as one, and would return destroyed groups of an earlier mesh.
        distributed.clear_dtensor_cache()
        self.device_mesh = init_device_mesh(self.device.type, self.layout.shape, mesh_dim_names=AXES)
        planned = [PlannedAxis("world", everyone, dist.group.WORLD)]
        for name in AXES:
            ranks = self._mine(self.layout.groups(name))
            planned.append(PlannedAxis(name, ranks, self.device_mesh.get_group(name), self.device_mesh[name]))
        # Ranks with the same weights and other tokens; dp or cp may be that axis.
        layout = self.layout
        replicas = self._new_group("dp·cp", layout.groups("dp", "cp")) if layout.cp > 1 and layout.dp > 1 else None
        experts = self._experts()
        # Set up together, because each set-up waits for all ranks.
        made = self._axes([*planned, *([replicas] if replicas else []), *experts])
        self.world, self.dp, self.pp, self.cp, self.tp, *others = made
        self.replicas = others.pop(0) if replicas else self.dp if self.cp.size == 1 else self.cp
        self.ep, self.expert_replicas = others[0], others[1] if len(others) > 1 else self.replicas
        self._tp_shares: dict[int, Axis] = {}

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> "Mesh":
        """Create the mesh of a process without a process group: one rank, on which nothing is sharded or summed."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.in_tree, mesh.rank, mesh.device = Layout(), True, 0, torch.device(device)
        mesh.coordinates, mesh.recorder, mesh.heartbeat = mesh.layout.coordinates(0), EventRecorder(), new_heartbeat()
        for name in ("world", *AXES, "ep"):
            setattr(mesh, name, Axis(name, (0,), 0, None, mesh.recorder))
        mesh.replicas = mesh.expert_replicas = mesh.dp
        mesh._tp_shares = {}
        return mesh

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Raise a `RuntimeError` from collectives in the block, which the other ranks do not run."""
        axes = [each for each in (*vars(self).values(), *self._tp_shares.values()) if isinstance(each, Axis)]
        groups = {id(each.group): each.group for each in axes if isinstance(each.group, HostGroup)}
        with ExitStack() as stack:
            for group in groups.values():
                stack.enter_context(group.refusing())
            stack.enter_context(_NoCollectives())
            yield

    @property
    def is_alone(self) -> bool:
        """Whether this mesh was created by `alone` and has no process group."""
        return self.world.group is None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is the first of its pipeline."""
        return self.pp.is_first

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is the last of its pipeline.

        Some schedules give a rank several stages; with `zbv` and `dualpipev`, the first rank has the model's last
        layers.
        """
        return self.pp.is_last

    @cached_property
    def check_group(self) -> Axis:
        """Ranks that together hold one copy of the model, and agree on findings in their shards (overflow, norm).

        These are the ranks of this rank's pp, cp and tp groups, of `ep` neighboring replicas. The first access is
        collective over the world; `threefold.init_mesh` already makes it.
        """
        groups = self.layout.model_groups()
        if len(groups) == 1:
            return self.world
        axis = self.new_axis("check", groups)
        assert axis is not None  # each rank is in one of them
        return axis

    @cached_property
    def local_rank(self) -> int:
        """Number of this rank among those of its host, from 0: the index of its GPU if a host gives each rank one.

        Hosts are distinguished by name. The first access is collective over the world; `threefold.init_mesh` already
        makes it.
        """
        hosts = self.world.gather_objects(gethostname())
        return hosts[: self.rank].count(hosts[self.rank])

    def new_axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis | None:
        """Create further groups of ranks; return this rank's, or None if it is in none of them.

        Collective over the world: every rank passes the same groups.
        """
        with self.heartbeat.waiting(wait_code("gather", self.world.number)):
            axis = self._new_group(name, groups)
            return None if axis is None else self._axes([axis])[0]

    def tp_shares(self, count: int) -> Axis:
        """Return the axis of the `count` neighboring tensor ranks around this one. Collective over the world."""
        if count == self.tp.size:
            return self.tp
        if count not in self._tp_shares:
            groups = [group[i : i + count] for group in self.layout.groups("tp") for i in range(0, len(group), count)]
            axis = self.new_axis("tp shares", groups)
            assert axis is not None  # each rank is in one of them
            self._tp_shares[count] = axis
        return self._tp_shares[count]

    def shard_and_replica_axes(self, shards: int) -> tuple[Axis, Axis]:
        """Return the axis over which ZeRO shards one copy of the weights, and that of ranks with the same shard.

        `shards` neighboring dp replicas, a divisor of dp, share a copy, with all their cp ranks. Collective over the
        world.
        """
        name = self.replicas.name
        ranks = self._mine(self.layout.shard_groups(shards))
        if ranks == self.replicas.ranks and self.replicas.device_mesh is not None:
            shared = self.replicas
        else:
            fine, axis, dp = self.device_mesh, "dp", self.dp.size
            if shards < dp:
                axis = "shard"
                fine = distributed.unflatten_mesh(fine, "dp", (dp // shards, shards), ("copy", axis))
            held_by = self._with_cp(fine, axis, shards)
            shared = self._axis(name, ranks, held_by.get_group(), held_by)
        copies = self.new_axis(name, self.layout.copy_groups(shards))
        assert copies is not None  # each rank is in one of them
        return shared, copies

    def expert_shard_and_replica_axes(self, shards: int) -> tuple[Axis, Axis]:
        """Return the axis over which ZeRO shards one copy of some experts, and that of ranks with the same shard.

        A group of `shards` replicas, a multiple or a divisor of ep, has one copy of all experts, or several such groups
        have one together. Collective over the world.
        """
        name, ep = self.expert_replicas.name, self.layout.ep
        each = max(1, shards // ep)  # replicas that shard the same experts
        copies = self.dp.size // ep // each
        if copies == 1:
            return self.expert_replicas, self._axis(name, (self.rank,), None)
        names = ("expert_group", "expert_shard", "expert_part")
        fine = distributed.unflatten_mesh(self.device_mesh, "dp", (copies, each, ep), names)
        held_by = self._with_cp(fine, "expert_shard", each)
        ranks = self._mine(self.layout.expert_shard_groups(shards))
        replicas = self.new_axis(name, self.layout.expert_shard_copy_groups(shards))
        assert replicas is not None  # each rank is in one of them
        return self._axis(name, ranks, held_by.get_group(), held_by), replicas

    def _with_cp(self, fine: DeviceMesh, axis: str, size: int = 0) -> DeviceMesh:
        """Return an axis of `fine`, which has `size` ranks if that may be one, together with cp."""
        if self.layout.cp == 1:
            return fine[axis]
        return fine["cp"] if size == 1 else distributed.flatten_mesh(fine[axis, "cp"], f"{axis}_cp")

    def _experts(self) -> list[PlannedAxis]:
        """Plan the axis of ranks that share the experts, and with ep above 1 that of ranks with the same experts."""
        ep = self.layout.ep
        if ep == 1:
            return [PlannedAxis("ep", (self.rank,), None)]
        fine = distributed.unflatten_mesh(self.device_mesh, "dp", (self.layout.dp // ep, ep), ("expert_copy", "ep"))
        experts = PlannedAxis("ep", self._mine(self.layout.expert_groups()), fine.get_group("ep"), fine["ep", "tp"])
        same, held_by = self._mine(self.layout.expert_copy_groups()), self._with_cp(fine, "expert_copy")
        return [experts, PlannedAxis("expert copies", same, held_by.get_group(), held_by)]

    def _mine(self, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return tuple(next(group for group in groups if self.rank in group))

    def _new_group(self, name: str, groups: Sequence[Sequence[int]]) -> PlannedAxis | None:
        group = distributed.new_group_among(groups)
        mine = next((tuple(ranks) for ranks in groups if self.rank in ranks), None)
        return None if mine is None else PlannedAxis(name, mine, group)

    def _axis(
        self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None = None
    ) -> Axis:
        return self._axes([PlannedAxis(name, ranks, group, device_mesh)])[0]

    def _axes(self, planned: Sequence[PlannedAxis]) -> list[Axis]:
        for each in planned:
            if each.group is not None:
                distributed.copy_group_timeout(each.group)
        # Gloo's collectives cost latency and system time; shared memory has little of either.
        several = {each.name: each.group for each in planned if each.group is not None and len(each.ranks) > 1}
        over_shared_memory = hook("over_shared_memory") if self._shares_memory and several else None
        if over_shared_memory is not None:
            shared = over_shared_memory(list(several.values()), *self._sizes, rounding=self.in_tree)
            several = dict(zip(several, shared, strict=True))
        axes = []
        for name, ranks, group, device_mesh in planned:
            number = self.heartbeat.axis(name, ranks) if len(ranks) > 1 else 0
            index, group = ranks.index(self.rank), several.get(name, group)
            axis = Axis(name, ranks, index, group, self.recorder, device_mesh, self.heartbeat, number, self.in_tree)
            if isinstance(group, HostGroup):
                weakref.finalize(axis, distributed.withdraw, group).atexit = False  # frees its memory and pipes
            axes.append(axis)
        return axes

    def __repr__(self) -> str:
        return f"Mesh({self.layout}, rank {self.rank} at {self.coordinates._asdict()}, {self.device})"
