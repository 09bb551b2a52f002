"""The mesh: one object with every axis, group and coordinate of this rank. Nothing else computes ranks."""

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from socket import gethostname

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from threefold.comm.axis import Axis, Event, Recorder
from threefold.comm.heartbeat import Activity, Heartbeat, wait_code
from threefold.comm.layout import AXES, Coordinates, Layout
from threefold.comm.shared_memory import SharedMemoryGroup
from threefold.errors import naming_arguments
from threefold.torch_private.distributed import (
    clear_dtensor_cache,
    copy_group_timeout,
    flatten_mesh,
    unflatten_mesh,
)

__all__ = ["Axis", "Event", "Mesh", "Recorder"]

_SHARED_SLOT_BYTES = 2 << 20  # larger ones fall out of the cache that the ranks share


class Mesh:
    """This rank's coordinates in the layout, its process groups, and its device.

    Collective: every rank of the world makes it at the same time, after `torch.distributed` is initialised.

    Args:
        layout: ranks along each axis.
        device: of this rank.
        shared_memory: whether collectives of CPU tensors between ranks of one host go through memory that they share;
            False for those of the process group alone.
        heartbeat: where this rank notes what it does; None for one that nobody reads.

    Attributes:
        heartbeat: as given.
        dp, pp, cp, tp: the axes.
        replicas: dp and cp together, over which gradients are summed.
        ep: neighbouring replicas that share the experts; its `device_mesh` has `tp` as well.
        expert_replicas: over which the gradients of the experts are summed.
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
        heartbeat: Heartbeat | None = None,
    ) -> None:
        with naming_arguments():
            layout.require_world(dist.get_world_size())
        self.layout = layout
        self.device = torch.device(device)
        self._shares_memory = shared_memory and self.device.type == "cpu"
        self.rank = dist.get_rank()
        self.coordinates: Coordinates = layout.coordinates(self.rank)
        self.recorder = Recorder()
        self.heartbeat = heartbeat or Heartbeat()
        self.heartbeat.activity(Activity.MESH)
        everyone = tuple(range(layout.world_size))
        with self.heartbeat.waiting(wait_code("gather", self.heartbeat.axis("world", everyone))):
            self._make_axes(everyone)

    def _make_axes(self, everyone: tuple[int, ...]) -> None:
        # DTensor's cache treats equal meshes as one, and would return the destroyed groups of an earlier one.
        clear_dtensor_cache()
        self.device_mesh = init_device_mesh(self.device.type, self.layout.shape, mesh_dim_names=AXES)
        self.world = self._axis("world", everyone, dist.group.WORLD)
        self.dp, self.pp, self.cp, self.tp = (self._mesh_axis(name) for name in AXES)
        self.replicas = self._replicas()
        self.ep, self.expert_replicas = self._expert_axes()
        self._tp_shares: dict[int, Axis] = {}

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> "Mesh":
        """The mesh of a process without a process group: one rank, on which nothing is sharded."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.rank, mesh.device = Layout(), 0, torch.device(device)
        mesh.coordinates, mesh.recorder, mesh.heartbeat = mesh.layout.coordinates(0), Recorder(), Heartbeat()
        for name in ("world", *AXES, "ep"):
            setattr(mesh, name, Axis(name, (0,), 0, None, mesh.recorder))
        mesh.replicas = mesh.expert_replicas = mesh.dp
        return mesh

    @property
    def is_alone(self) -> bool:
        """Whether it was made by `alone`, so that there is no process group."""
        return self.world.group is None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is the first of its pipeline."""
        return self.pp.is_first

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is the last of its pipeline. (Some schedules give a rank several stages; with `zbv` and
        `dualpipev` it is the first rank that has the model's last layers.)"""
        return self.pp.is_last

    @cached_property
    def check_group(self) -> Axis:
        """The ranks that together hold one copy of the model: what each finds in its shards, such as an overflow or a
        term of a norm, has to be agreed among them.

        They are those of this rank's pp, cp and tp groups, with ep above 1 of ep neighbouring replicas. Collective over
        the world when it is first asked for; `threefold.init_mesh` has done that.
        """
        groups = self.layout.model_groups()
        if len(groups) == 1:
            return self.world
        axis = self.new_axis("check", groups)
        assert axis is not None  # each rank is in one of them
        return axis

    @cached_property
    def local_rank(self) -> int:
        """This rank's number among those of its host, from 0 on: the index of its GPU where a host gives each rank one.

        Hosts are told apart by their names. Collective over the world when it is first asked for;
        `threefold.init_mesh` has done that.
        """
        hosts = self.world.gather_objects(gethostname())
        return hosts[: self.rank].count(hosts[self.rank])

    def new_axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis | None:
        """Make further groups of ranks; returns this rank's, or None if it is in none of them.

        Collective over the world: every rank passes the same groups.
        """
        mine = None
        world = self.heartbeat.axis("world", range(self.layout.world_size))
        with self.heartbeat.waiting(wait_code("gather", world)):
            for ranks in groups:
                group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
                if self.rank in ranks:
                    mine = self._axis(name, tuple(ranks), group)
        return mine

    def background_axis(self) -> Axis:
        """All ranks once more, with a process group of its own, for collectives of a thread beside the training.

        They are of tensors on the CPU, may be waited for a day, use no processor while they wait, and are not recorded.
        Collective over the world.
        """
        world = self.world
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if world.size > 1 else None
        return Axis("background", world.ranks, world.index, group, Recorder())

    def tp_shares(self, count: int) -> Axis:
        """The `count` neighbouring ranks of the tensor axis that this rank is one of. Collective over the world."""
        if count == self.tp.size:
            return self.tp
        if count not in self._tp_shares:
            groups = [group[i : i + count] for group in self.layout.groups("tp") for i in range(0, len(group), count)]
            axis = self.new_axis("tp shares", groups)
            assert axis is not None  # each rank is in one of them
            self._tp_shares[count] = axis
        return self._tp_shares[count]

    def shard_and_replica_axes(self, shards: int) -> tuple[Axis, Axis]:
        """The axis over which ZeRO shards one copy of the weights, and that of the ranks with the same shard.

        Collective over the world.

        Args:
            shards: over how many neighbouring dp replicas (with all their cp ranks) a copy is sharded; a divisor of dp.
        """
        name = self.replicas.name
        ranks = tuple(next(group for group in self.layout.shard_groups(shards) if self.rank in group))
        if ranks == self.replicas.ranks and self.replicas.device_mesh is not None:
            shared = self.replicas
        else:
            held_by = self._shard_mesh(shards)
            shared = self._axis(name, ranks, held_by.get_group(), held_by)
        copies = self.new_axis(name, self.layout.copy_groups(shards))
        assert copies is not None  # each rank is in one of them
        return shared, copies

    def expert_shard_and_replica_axes(self, shards: int) -> tuple[Axis, Axis]:
        """The same for experts that `ep` replicas share: a group of `shards` replicas has one copy of them, or several
        such groups have one together.

        Collective over the world.

        Args:
            shards: as for `shard_and_replica_axes`; a multiple or a divisor of ep.
        """
        name, ep, cp = self.expert_replicas.name, self.layout.ep, self.cp.size
        each = max(1, shards // ep)  # replicas of those that have the same experts
        copies = self.dp.size // ep // each
        if copies == 1:
            return self.expert_replicas, self._axis(name, (self.rank,), None)
        names = ("expert_group", "expert_shard", "expert_part")
        fine = unflatten_mesh(self.device_mesh, "dp", (copies, each, ep), names)
        if cp == 1:
            held_by = fine["expert_shard"]
        else:
            held_by = fine["cp"] if each == 1 else flatten_mesh(fine["expert_shard", "cp"], "expert_shard_cp")
        ranks = next(group for group in self.layout.expert_shard_groups(shards) if self.rank in group)
        replicas = self.new_axis(name, self.layout.expert_shard_copy_groups(shards))
        assert replicas is not None  # each rank is in one of them
        return self._axis(name, tuple(ranks), held_by.get_group(), held_by), replicas

    def _shard_mesh(self, shards: int) -> DeviceMesh:
        """The one-dimensional mesh over the ranks that share a copy."""
        fine, axis = self.device_mesh, "dp"
        if shards < self.dp.size:
            fine, axis = unflatten_mesh(fine, "dp", (self.dp.size // shards, shards), ("copy", "shard")), "shard"
        if self.cp.size == 1:
            return fine[axis]
        return fine["cp"] if shards == 1 else flatten_mesh(fine[axis, "cp"], f"{axis}_cp")

    def _replicas(self) -> Axis:
        """The ranks that hold the same weights and process other tokens: dp and cp together."""
        if self.cp.size == 1:
            return self.dp
        if self.dp.size == 1:
            return self.cp
        axis = self.new_axis("dp·cp", self.layout.groups("dp", "cp"))
        assert axis is not None  # each rank is in one of them
        return axis

    def _expert_axes(self) -> tuple[Axis, Axis]:
        ep = self.layout.ep
        if ep == 1:
            return self._axis("ep", (self.rank,), None), self.replicas
        ranks = next(group for group in self.layout.expert_groups() if self.rank in group)
        fine = unflatten_mesh(self.device_mesh, "dp", (self.dp.size // ep, ep), ("expert_copy", "ep"))
        experts = self._axis("ep", tuple(ranks), fine.get_group("ep"), fine["ep", "tp"])
        held_by = (
            fine["expert_copy"] if self.cp.size == 1 else flatten_mesh(fine["expert_copy", "cp"], "expert_copy_cp")
        )
        same = next(group for group in self.layout.expert_copy_groups() if self.rank in group)
        return experts, self._axis("expert copies", tuple(same), held_by.get_group(), held_by)

    def _mesh_axis(self, name: str) -> Axis:
        ranks = next(group for group in self.layout.groups(name) if self.rank in group)
        return self._axis(name, tuple(ranks), self.device_mesh.get_group(name), self.device_mesh[name])

    def _axis(
        self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None = None
    ) -> Axis:
        if group is not None:
            copy_group_timeout(group)
        shared = None
        if self._shares_memory and len(ranks) > 1 and group is not None:
            # Collectives of gloo cost latency and system time; those in shared memory have little of either.
            shared = SharedMemoryGroup.try_create(group, _SHARED_SLOT_BYTES)
        number = self.heartbeat.axis(name, ranks) if len(ranks) > 1 else 0
        index = ranks.index(self.rank)
        return Axis(name, ranks, index, group, self.recorder, device_mesh, shared, self.heartbeat, number)

    def __repr__(self) -> str:
        return f"Mesh({self.layout}, rank {self.rank} at {self.coordinates._asdict()}, {self.device})"
